"""The averaged model is the moving average of the iterates, whatever is trained, and a resumed run goes on with it."""

import pytest
import torch

from leakbench.defenses.core import Layout, Recipe
from leakbench.defenses.core.training.average import ParameterAverage
from leakbench.defenses.dp_sgd import dp_sgd
from leakbench.defenses.random_pruning import random_pruning

from ....parameters import subtests
from ... import duties

DEFENSE = dp_sgd(noise_multiplier=1.0)


def test_the_weight_of_the_past_grows_with_the_step_up_to_the_decay():
    """By hand: weights of the past are 1/10, 2/11 and, of 3/12, the decay 0.2."""
    average = ParameterAverage(0.2)
    points = [torch.tensor([value]).double() for value in (10.0, 1.0, 3.0, 7.0)]
    expected = [0.1 * 10 + 0.9 * 1, (2 * 1.9 + 9 * 3) / 11, 0.2 * (2 * 1.9 + 9 * 3) / 11 + 0.8 * 7]
    for step in range(3):
        average.add(step, points[step], points[step + 1])
        assert average.value is not None
        assert float(average.value) == pytest.approx(expected[step], rel=1e-12)


@pytest.mark.parametrize("world", duties.WORLDS)
def test_the_model_has_the_average_and_what_is_released_is_the_same(world):
    plain = duties.trained(DEFENSE, duties.WORLDS[world])
    run = duties.trained(DEFENSE, duties.WORLDS[world], average=0.3)
    assert plain.last is None and run.last is not None
    assert torch.equal(run.last, duties.parameters(plain))
    for one, other in zip(run.transcript.steps, plain.transcript.steps, strict=True):
        assert torch.equal(one.parameters, other.parameters) and duties.same(one.noisy, other.noisy)
    assert run.claim(1e-5).epsilon == plain.claim(1e-5).epsilon
    expected = plain.transcript.steps[0].parameters.double()
    points = [step.parameters for step in plain.transcript.steps[1:]] + [duties.parameters(plain)]
    for t, point in enumerate(points):
        past = min(0.3, (1 + t) / (10 + t))
        expected = past * expected + (1 - past) * point.double()
    torch.testing.assert_close(duties.parameters(run).double(), expected, rtol=1e-5, atol=1e-6)
    assert float((duties.parameters(run) - run.last).norm()) > 0.01


def test_a_decay_of_zero_leaves_the_last_parameters():
    assert torch.equal(
        duties.parameters(duties.trained(DEFENSE, average=0.0)), duties.parameters(duties.trained(DEFENSE))
    )


@pytest.mark.parametrize("after", [1, 3, duties.STEPS])
def test_a_resumed_run_has_the_same_average(tmp_path, after):
    whole = duties.trained(DEFENSE, average=0.5)
    resumed = duties.interrupted(DEFENSE, tmp_path / "c", after=after, average=0.5)
    duties.check_same_run(resumed, whole)
    assert duties.same(resumed.last, whole.last)


def test_pruned_weights_are_zero_in_the_average_too():
    """The average begins where the plan put the model, and not at weights that were there before."""
    run = duties.trained(random_pruning(clip_norm=0.5, prune_rate=0.5, noise_multiplier=1.0), average=0.9)
    assert run.last is not None
    pruned = run.last == 0
    assert int(pruned.sum()) >= Layout.of(duties.network()).dim // 3
    assert not duties.parameters(run)[pruned].any()


@subtests("average", [1.0, -0.1, float("nan")])
def test_a_decay_outside_of_its_range_is_refused(average):
    with pytest.raises(ValueError, match=r"average must be in \[0, 1\), or None for no average, got"):
        Recipe(average=average)
