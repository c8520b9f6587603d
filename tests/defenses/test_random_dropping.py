"""What is particular to random dropping: a fresh mask a step, layer by layer, and what momentum may do."""

import pytest
import torch

from leakbench.defenses.core import Coordinates
from leakbench.defenses.dp_sgd import dp_sgd
from leakbench.defenses.random_dropping import random_dropping

from . import duties


def masks(run):
    found = []
    for step in run.transcript.steps:
        assert step.plan and isinstance(step.plan.blocks[0].codec, Coordinates)
        found.append(torch.zeros(duties.DIM, dtype=torch.bool).index_fill(0, step.plan.blocks[0].codec.kept, True))
    return found


def test_a_fraction_of_every_weight_is_dropped_afresh_in_every_step():
    kept = masks(duties.trained(random_dropping(drop_rate=0.4, noise_multiplier=1.0)))
    for mask in kept:
        dropped = [int((~mask[a:b]).sum()) for a, b in duties.LAYOUT.slices]
        assert dropped == [int(0.4 * 24), 0, int(0.4 * 12), 0]
    assert len({tuple(mask.tolist()) for mask in kept}) == len(kept)


@pytest.mark.parametrize("hold", [True, False])
def test_what_is_dropped_stays_whatever_momentum_says_unless_it_is_let_go(hold):
    run = duties.trained(
        random_dropping(clip_norm=0.5, drop_rate=0.4, hold_dropped=hold, noise_multiplier=1.0), momentum=0.9
    )
    after = [step.parameters for step in run.transcript.steps[1:]] + [duties.parameters(run)]
    moved = [a != step.parameters for step, a in zip(run.transcript.steps, after, strict=True)]
    stray = [bool((change & ~mask).any()) for change, mask in zip(moved, masks(run), strict=True)]
    # Momentum has nothing to carry on in the first step.
    assert stray == [False] * 6 if hold else stray == [False] + [True] * 5


def test_with_nothing_dropped_it_is_dp_sgd_to_the_same_noise_draw():
    one = duties.trained(random_dropping(clip_norm=0.5, drop_rate=0.0, noise_multiplier=1.3))
    other = duties.trained(dp_sgd(clip_norm=0.5, noise_multiplier=1.3))
    assert torch.equal(duties.parameters(one), duties.parameters(other))


def test_a_rate_that_leaves_nothing_is_refused():
    with pytest.raises(ValueError, match=r"drop_rate must be in \[0, 1\), got 1.0"):
        random_dropping(drop_rate=1.0)
