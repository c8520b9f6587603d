"""What is particular to DP-SSGD: what is dropped lies inside of what is left after pruning."""

import torch

from leakbench.defenses.core import Coordinates
from leakbench.defenses.dp_ssgd import dp_ssgd
from leakbench.defenses.random_dropping import random_dropping
from leakbench.defenses.random_pruning import random_pruning

from ..parameters import subtests
from . import duties


@subtests("pruning", ["random", "flow", "sensitivity"])
@subtests("dropping", ["random", "magnitude"])
def test_a_step_drops_a_part_of_what_is_left_of_every_weight(pruning, dropping):
    defense = dp_ssgd(
        clip_norm=0.5, pruning=pruning, prune_rate=0.5, dropping=dropping, drop_rate=0.4, rounds=3, noise_multiplier=1.0
    )
    run = duties.trained(defense, momentum=0.9)
    left = torch.zeros(duties.DIM, dtype=torch.bool).index_fill(0, run.state, True)
    for step in run.transcript.steps:
        assert step.plan and isinstance(step.plan.blocks[0].codec, Coordinates)
        kept = torch.zeros_like(left).index_fill(0, step.plan.blocks[0].codec.kept, True)
        assert not bool((kept & ~left).any())
        for a, b in duties.LAYOUT.weights:
            there = int(left[a:b].sum())
            assert int(kept[a:b].sum()) == there - min(int(0.4 * there), there - 1)
        assert not step.parameters[~left].any()  # pruned weights are zero, momentum or not
    assert not duties.parameters(run)[~left].any()
    assert any(entry.one_off for entry in run.ledger.entries) is (pruning == "sensitivity")


def test_without_dropping_it_is_pruning_and_without_pruning_dropping():
    for ours, theirs in (
        (dp_ssgd(clip_norm=0.5, drop_rate=0.0), random_pruning(clip_norm=0.5, prune_rate=0.3)),
        (dp_ssgd(clip_norm=0.5, prune_rate=0.0, drop_rate=0.4), random_dropping(clip_norm=0.5, drop_rate=0.4)),
    ):
        one, other = (duties.trained(defense.with_noise(1.3)) for defense in (ours, theirs))
        assert torch.equal(duties.parameters(one), duties.parameters(other))
