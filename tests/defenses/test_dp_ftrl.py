"""Tree aggregation: one Gaussian a pass, restarts, and hand-worked noise."""

import pytest
import torch

from leakbench.defenses.core import Context, Tree, partition, predict, shuffle
from leakbench.defenses.core.privacy.accounting import epsilon
from leakbench.defenses.core.privacy.events import Gaussian
from leakbench.defenses.dp_ftrl import dp_ftrl

from . import duties

DELTA = 1e-5


@pytest.mark.parametrize("sampling", [partition(0.125), shuffle(0.125)])
def test_with_a_tree_an_epoch_every_pass_costs_one_gaussian(sampling):
    claim = predict(dp_ftrl(noise_multiplier=1.9), sampling=sampling, steps=24).claim(DELTA)
    assert claim.epsilon == pytest.approx(epsilon([Gaussian(1.0, 1.9, 3)], DELTA).value, rel=1e-9)


def test_one_tree_for_the_run_costs_more_for_the_nodes_above_several_uses():
    restarted = predict(dp_ftrl(noise_multiplier=1.9), sampling=partition(0.125), steps=64).claim(DELTA)
    one_tree = dp_ftrl(noise_multiplier=1.9, tree_per_epoch=False)
    assert predict(one_tree, sampling=partition(0.125), steps=64).claim(DELTA).epsilon > restarted.epsilon


def test_an_epoch_begins_a_tree():
    method = dp_ftrl().method
    context = Context(step=0, steps=10, steps_per_epoch=4, dim=3)
    rows = [method.plan(None, context.at(step))[1].correlated for step in range(10)]
    assert [row and row.position for row in rows] == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert {row and row.strategy for row in rows} == {Tree(4)}
    # A run that is shorter than an epoch is one tree of its length.
    short = method.plan(None, Context(step=0, steps=3, steps_per_epoch=4, dim=3))[1].correlated
    assert short and short.strategy == Tree(3)


def test_a_nodes_noise_is_the_multiplier_times_the_root_of_the_nodes_above_a_step():
    plan = dp_ftrl(clip_norm=0.5).method.plan(None, Context(step=0, steps=8, steps_per_epoch=8, dim=3))[1]
    assert plan.at(2.0).fresh_stds == pytest.approx([2.0 * 0.5 * 4**0.5])  # nodes of 1, 2, 4 and 8 steps
    last = dp_ftrl(clip_norm=0.5).method.plan(None, Context(step=7, steps=8, steps_per_epoch=8, dim=3))[1]
    # The eighth step draws one node and takes three back.
    assert last.at(2.0).stds == pytest.approx([2.0 * 0.5 * 4**0.5 * 4**0.5])


def test_the_same_draws_are_taken_back():
    """Without data, a model after 8 steps has moved by the noise of one node, not by that of eight draws."""
    run = duties.trained(dp_ftrl(noise_multiplier=1.0), sampling=partition(0.125), steps=8, lr=1.0, momentum=0.0)
    noisy = torch.stack([step.noisy[0] for step in run.transcript.steps if step.noisy])
    stds = torch.tensor([step.plan.fresh_stds[0] for step in run.transcript.steps if step.plan])
    assert float(stds[0]) == pytest.approx(stds[-1].item())
    # Sums of a clipped batch are small beside this noise; what is left of all of it has one node's size.
    total = noisy.sum(dim=0)
    assert float(total.norm()) < 0.7 * float(noisy.norm())
