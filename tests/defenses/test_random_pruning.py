"""What is particular to random pruning: which weights go, and that they stay where they are."""

import pytest
import torch

from leakbench.defenses.core import Context, Coordinates, Layout
from leakbench.defenses.dp_sgd import dp_sgd
from leakbench.defenses.random_pruning import random_pruning

from . import duties

LAYOUT = Layout(
    ("conv.weight", "conv.bias", "norm.weight", "gain", "fc.weight"), ((4, 3, 2, 2), (4,), (4,), (4, 1, 1, 1), (5, 8))
)


def kept(prune_rate, seed=0):
    context = Context(step=0, steps=2, layout=LAYOUT, parameters=torch.ones(LAYOUT.dim), seed=seed)
    defense = random_pruning(prune_rate=prune_rate)
    state = defense.start(context)
    codec = defense.plan(state, context)[1].blocks[0].codec
    assert isinstance(codec, Coordinates) and torch.equal(codec.kept, state)
    return torch.zeros(LAYOUT.dim, dtype=torch.bool).index_fill(0, state, True)


def test_a_fraction_of_every_weight_goes_and_nothing_else():
    mask = kept(0.7)
    left = [int(mask[start:stop].sum()) for start, stop in LAYOUT.slices]
    assert left == [48 - 33, 4, 4, 4, 40 - 28]
    assert not torch.equal(kept(0.7, seed=1), mask) and torch.equal(kept(0.7), mask)


def test_something_of_every_weight_is_left():
    left = [int(kept(0.99)[start:stop].sum()) for start, stop in LAYOUT.weights]
    assert left == [48 - 47, 1]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_pruned_weights_are_zero_from_the_first_step_to_the_last_or_what_they_were(momentum):
    start = duties.LAYOUT.read(duties.network())
    for pruned in ("zero", "initial"):
        defense = random_pruning(clip_norm=0.5, prune_rate=0.6, pruned=pruned, noise_multiplier=1.0)
        run = duties.trained(defense, momentum=momentum)
        gone = torch.ones(duties.DIM, dtype=torch.bool).index_fill(0, run.state, False)
        assert int(gone.sum()) == sum(int(0.6 * (b - a)) for a, b in duties.LAYOUT.weights)
        held = torch.zeros_like(start) if pruned == "zero" else start
        for step in run.transcript.steps:
            assert torch.equal(step.parameters[gone], held[gone])
        end = duties.parameters(run)
        assert torch.equal(end[gone], held[gone]) and bool((end[~gone] != start[~gone]).all())


def test_with_nothing_pruned_it_is_dp_sgd_to_the_same_noise_draw():
    one = duties.trained(random_pruning(clip_norm=0.5, prune_rate=0.0, noise_multiplier=1.3))
    other = duties.trained(dp_sgd(clip_norm=0.5, noise_multiplier=1.3))
    assert torch.equal(duties.parameters(one), duties.parameters(other))


def test_a_rate_that_leaves_nothing_is_refused():
    with pytest.raises(ValueError, match=r"prune_rate must be in \[0, 1\), got 1.0"):
        random_pruning(prune_rate=1.0)
