"""What is particular to DIFF2: differences add up to gradients, and their bound is the distance between iterates."""

import pytest
import torch

from leakbench.defenses.core import Context, GradientDifference, Layout, full, train
from leakbench.defenses.diff2 import diff2
from leakbench.defenses.dp_sgd import dp_sgd
from leakbench.defenses.sgd import sgd

from ..parameters import subtests
from . import duties


@pytest.mark.parametrize("radius", ["moving", "constant"])
def test_differences_without_noise_or_clipping_add_up_to_the_gradient(radius):
    loose = diff2(clip_norm=1e6, smoothness=1e6, restart=100, radius=radius, noise_multiplier=0.0)
    run = train(duties.network(), duties.DATA, loose, sampling=full(), steps=8, lr=0.5)
    plain = train(duties.network(), duties.DATA, sgd(), sampling=full(), steps=8, lr=0.5)
    torch.testing.assert_close(duties.parameters(run), duties.parameters(plain), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("radius", ["moving", "constant"])
def test_the_bound_of_a_difference_is_the_distance_between_released_iterates_or_constant(radius):
    defense = diff2(clip_norm=0.5, smoothness=2.0, restart=4, radius=radius, noise_multiplier=1.0)
    steps = duties.trained(defense, momentum=0.0).transcript.steps
    for i, step in enumerate(steps):
        assert step.plan
        block = step.plan.blocks[0]
        if i % 4 == 0:
            assert block.bound.norm == 0.5
        else:
            moved = float((step.parameters - steps[i - 1].parameters).norm())
            assert block.bound.norm == pytest.approx(2.0 * moved if radius == "moving" else 2.0)
            assert isinstance(block.query, GradientDifference)
            assert torch.equal(block.query.earlier, steps[i - 1].parameters)


def test_where_nothing_moved_a_difference_starts_anew():
    context = Context(step=1, steps=5, layout=Layout.flat(3), parameters=torch.ones(3))
    state = {"estimate": torch.ones(3), "earlier": torch.ones(3)}
    plan = diff2(clip_norm=0.5, noise_multiplier=1.0).plan(state, context)[1]
    assert plan.blocks[0].bound.norm == 0.5
    assert torch.equal(plan.post(torch.zeros(3)), torch.zeros(3))


def test_with_a_restart_a_step_it_is_dp_sgd_to_the_same_noise_draw():
    one = duties.trained(diff2(clip_norm=0.5, restart=1, noise_multiplier=1.3))
    other = duties.trained(dp_sgd(clip_norm=0.5, noise_multiplier=1.3))
    assert torch.equal(duties.parameters(one), duties.parameters(other))


@subtests("settings", [{"restart": 0}, {"smoothness": 0.0}, {"clip_norm": -1.0}])
def test_what_makes_no_sense_is_refused(settings):
    with pytest.raises(ValueError, match="must be"):
        diff2(**settings)
