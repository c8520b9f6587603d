"""What is particular to FedLRS: the penalty against autograd, the entries that are kept, its limits and refusals."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from leakbench.defenses.core import Context, LargestEntries, Layout
from leakbench.defenses.fed_avg import fed_avg
from leakbench.defenses.fed_lrs import WithinBall, fed_lrs
from leakbench.defenses.local_noise_filter import local_noise_filter

from .federated_runs import EVERYBODY, FEDERATION, federated, parameters, round_at

DRAW = torch.Generator().manual_seed(0)
POINT, THETA, UPDATE = (torch.randn(43, generator=DRAW) for _ in range(3))
HERE = round_at(THETA)


@pytest.mark.parametrize("radius", [0.0, 2.0, 1e3])
def test_the_penalty_is_the_gradient_of_the_squared_excess_over_the_radius(radius):
    leaf = POINT.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(0.5 * 0.7 * ((leaf - THETA).norm() - radius).clamp(min=0).square(), leaf)
    corrected = WithinBall(radius=radius, penalty=0.7).correct(None, HERE, POINT, UPDATE)
    torch.testing.assert_close(corrected, UPDATE + gradient)


def test_a_displacement_of_zero_has_no_penalty():
    assert torch.equal(WithinBall(radius=0.0, penalty=1.0).correct(None, HERE, THETA, UPDATE), UPDATE)


def test_messages_have_the_largest_entries_and_the_server_adds_nothing_elsewhere():
    run = federated(fed_lrs(sparsity=0.8, noise_multiplier=1.3), schedule=EVERYBODY)
    kept = math.ceil(0.2 * 43)
    for message in run.rounds[0].messages.values():
        assert message.tensors["values"].numel() == kept
        assert message.bytes == 4 * kept + math.ceil(43 / 8)  # a bitmap is shorter than nine indices
    dense = federated(fed_lrs(sparsity=0.0, noise_multiplier=1.3), schedule=EVERYBODY)
    values = dense.rounds[0].messages[0].tensors["values"]
    largest = values.abs().topk(kept).values.min()
    expected = values[values.abs() >= largest]
    assert torch.equal(run.rounds[0].messages[0].tensors["values"], expected)


def test_entries_are_kept_by_the_noisy_update_of_the_last_step_as_well():
    """With one local step of plain SGD, |delta u| ranks as |delta| does; with four, it does not."""
    for steps, alike in ((1, True), (4, False)):
        federation = replace(FEDERATION, local_steps=steps)
        by_size, by_effect = (
            federated(fed_lrs(penalty=0.0, sparsity=0.8, score=score, noise_multiplier=1.3), federation=federation)
            for score in ("size", "effect")
        )
        first, other = (run.rounds[0].messages[0].tensors for run in (by_size, by_effect))
        assert torch.equal(first["bitmap"], other["bitmap"]) == alike


def test_a_score_by_effect_is_of_the_update_that_was_released():
    codec = LargestEntries(sparsity=0.5, score="effect")
    delta, update = torch.tensor([3.0, 2.0, 1.0, 0.5]), torch.tensor([0.0, 0.1, 1.0, 1.0])
    here = replace(HERE, update=update)
    assert torch.equal(
        codec.decode(codec.encode(delta, here), replace(here, context=_context(4))), delta * (update == 1)
    )
    with pytest.raises(ValueError, match="score must be 'size' without a noisy update"):
        codec.encode(delta, HERE)
    of_update = replace(local_noise_filter(), messages=codec)
    with pytest.raises(ValueError, match="score must be 'size' for noise in the update, got 'effect'"):
        federated(of_update)


def _context(dim):
    return Context(step=0, steps=1, layout=Layout(("w",), ((dim,),)))


def test_without_penalty_and_sparsity_it_is_fed_avg_and_a_penalty_shortens_displacements():
    plain = federated(fed_avg(noise_multiplier=1.3), schedule=EVERYBODY)
    off = federated(fed_lrs(penalty=0.0, sparsity=0.0, noise_multiplier=1.3), schedule=EVERYBODY)
    assert torch.equal(parameters(off), parameters(plain))
    short = federated(fed_lrs(radius=0.1, penalty=2.0, sparsity=0.0, noise_multiplier=1.3), schedule=EVERYBODY)
    first, second = (run.rounds[0].messages[0].tensors["values"].norm() for run in (plain, short))
    assert second < 0.8 * first


def test_settings_out_of_range_are_refused():
    cases: Any = (
        ({"radius": -1.0}, "radius must be at least 0"),
        ({"penalty": float("nan")}, "penalty must be at least 0"),
        ({"sparsity": 1.0}, r"sparsity must be in \[0, 1\)"),
    )
    for settings, words in cases:
        with pytest.raises(ValueError, match=words):
            fed_lrs(**settings)
