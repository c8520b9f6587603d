"""What is particular to per-layer clipping: the sensitivity that it really has."""

import math

import pytest
import torch

from leakbench.defenses.core import Context, clipped_sums, poisson, predict
from leakbench.defenses.dp_sgd import dp_sgd
from leakbench.defenses.per_layer import per_layer

from . import duties

CONTEXT = Context(step=0, steps=1, layout=duties.LAYOUT)
SPANS = duties.LAYOUT.layers


def plan(**settings):
    return per_layer(**settings).plan(None, CONTEXT)[1]


def test_every_layer_is_clipped_by_itself_and_together_they_reach_the_clip_norm():
    rows = 1e3 * torch.randn(1, duties.DIM, generator=torch.Generator().manual_seed(1))
    sums = clipped_sums(plan(clip_norm=0.8), [lambda _: rows], rows)
    assert [float(part.norm()) for part in sums] == pytest.approx([0.8 / math.sqrt(2)] * 2, rel=1e-5)
    assert math.hypot(*(float(part.norm()) for part in sums)) == pytest.approx(0.8, rel=1e-5)


def test_a_layer_with_long_gradients_leaves_the_others_alone():
    rows = torch.zeros(1, duties.DIM)
    rows[:, slice(*SPANS[0])], rows[:, slice(*SPANS[1])] = 1e4, 1e-3
    _, small = clipped_sums(plan(clip_norm=1.0), [lambda _: rows], rows)
    torch.testing.assert_close(small, rows[0, slice(*SPANS[1])])


def test_noise_is_sigma_times_the_clip_norm_of_all_layers_on_every_coordinate():
    for weights in ("equal", "by_size"):
        assert plan(clip_norm=0.8, weights=weights).at(1.5).stds == pytest.approx([1.5 * 0.8] * 2)


def test_by_size_a_layer_has_the_clip_norm_of_its_coordinates():
    norms = [block.bound.norm for block in plan(clip_norm=0.8, weights="by_size").blocks]
    assert norms == pytest.approx([0.8 * math.sqrt((b - a) / duties.DIM) for a, b in SPANS])


def test_it_costs_what_dp_sgd_costs():
    """And not what L layers clipped to C each would with noise of sigma C: that is DP-SGD at sigma / sqrt(L)."""
    ours, theirs, trap = (
        predict(defense, sampling=poisson(0.01), steps=100).claim(1e-5).epsilon
        for defense in (
            per_layer(noise_multiplier=1.0),
            dp_sgd(noise_multiplier=1.0),
            dp_sgd(noise_multiplier=1.0 / math.sqrt(2)),
        )
    )
    assert ours == theirs < 0.6 * trap
