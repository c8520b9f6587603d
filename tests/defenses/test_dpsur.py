"""What is particular to DPSUR: what a trial releases, what a step that fails leaves behind, and what both cost."""

import copy
import math

import pytest
import torch
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant

from leakbench.defenses.core import (
    Block,
    Everything,
    LossChange,
    StepPlan,
    Trial,
    calibrate,
    clip,
    contributions,
    full,
    poisson,
    predict,
    shuffle,
)
from leakbench.defenses.core.gradients.executor import Engine
from leakbench.defenses.core.randomness.keys import key_from
from leakbench.defenses.dp_sgd import dp_sgd
from leakbench.defenses.dpsur import dpsur

from ..parameters import subtests
from . import duties


def run(beta, *, sigma=1.3, steps=duties.STEPS, loss_clip=0.1, **settings):
    defense = dpsur(clip_norm=0.5, loss_clip=loss_clip, beta=beta, validation_rate=0.5, noise_multiplier=sigma)
    return duties.trained(defense, steps=steps, **settings)


def stood(found):
    """Whether the parameters of each step but the last are others than those after it."""
    after = [step.parameters for step in found.transcript.steps[1:]]
    return [not torch.equal(a.parameters, b) for a, b in zip(found.transcript.steps, after, strict=False)]


def verdict(step):
    """What the trial of a step released."""
    assert step.verdict is not None
    return float(step.verdict)


def test_a_first_step_that_stands_is_one_of_dp_sgd_to_the_same_noise_draw():
    other = duties.trained(dp_sgd(clip_norm=0.5, noise_multiplier=1.3), steps=1)
    torch.testing.assert_close(duties.parameters(run(math.inf, steps=1)), duties.parameters(other), rtol=0, atol=1e-6)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_where_every_step_stands_it_is_dp_sgd(optimizer):
    how = {"optimizer": optimizer, "momentum": 0.5 if optimizer == "sgd" else 0.0}
    other = duties.trained(dp_sgd(clip_norm=0.5, noise_multiplier=0.0), **how)
    one = duties.trained(dpsur(clip_norm=0.5, beta=math.inf, noise_multiplier=0.0), **how)
    torch.testing.assert_close(duties.parameters(one), duties.parameters(other), rtol=0, atol=1e-6)


def test_where_no_step_stands_nothing_moves_and_everything_is_charged():
    found = run(-math.inf)
    assert torch.equal(duties.parameters(found), duties.LAYOUT.read(duties.network()))
    assert not any(stood(found)) and len(found.transcript.steps) == duties.STEPS
    assert [(e.trial, e.steps, e.noise_multiplier, e.sampling) for e in found.ledger.entries] == [
        (False, duties.STEPS, 1.3, duties.POISSON),
        (True, duties.STEPS, 5.0, poisson(0.5)),
    ]


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.SGD])
def test_a_step_that_fails_leaves_no_trace_in_the_optimizer(make):
    """The optimizer goes on from its state before the step, its moments and its count of steps included."""
    states, kept = [], []

    def optimizer(parameters):
        one = make(parameters, lr=0.1, **({"momentum": 0.9} if make is torch.optim.SGD else {}))
        take = one.step

        def watched(closure=None):
            states.append(copy.deepcopy(one.state_dict()["state"]))
            return take(closure)

        one.step = watched
        kept.append(one)
        return one

    found = run(0.0, steps=12, sigma=3.0, optimizer=optimizer, momentum=0.0)
    verdicts = stood(found)
    assert any(verdicts) and not all(verdicts)
    for stands, before, after in zip(verdicts, states, states[1:], strict=False):
        assert duties.same(before, after) is not stands


def test_the_verdict_is_the_noisy_sum_over_the_expected_batch():
    found = run(0.0, steps=12, sigma=3.0)
    expected = 0.5 * len(duties.DATA[0])
    assert stood(found) == [verdict(s) / expected < 0.0 for s in found.transcript.steps[:-1]]
    # At a threshold between two verdicts that were released, the same run goes another way.
    first = verdict(found.transcript.steps[0]) / expected / 0.1
    for below, stands in ((first - 1e-3, False), (first + 1e-3, True)):
        assert stood(run(below, steps=2, sigma=3.0)) == [stands]


def test_what_is_released_is_the_sum_of_clipped_changes_of_a_batch_drawn_by_itself():
    """By hand, from the losses of the records that the trial's own coins choose, and the noise that is drawn second."""
    found = run(math.inf, steps=2, sigma=0.0, loss_clip=0.02)
    first, second = found.transcript.steps
    assert first.plan and first.plan.plan.trial
    batch = poisson(0.5).indices(0, 24, key_from("trial", 3))
    assert batch.tolist() != duties.POISSON.indices(0, 24, 3).tolist()
    inputs, labels = duties.DATA[0][batch], duties.DATA[1][batch]
    changes = torch.zeros(len(batch))
    for sign, point in ((-1, first.parameters), (1, second.parameters)):
        model = duties.network()
        duties.LAYOUT.write(model, point)
        changes += sign * torch.nn.functional.cross_entropy(model(inputs), labels, reduction="none").detach()
    assert (changes.abs() > 0.02).any() and (changes.abs() < 0.02).any()
    noise = float(duties.noise_of(1, 1, 5.0 * 0.02))
    assert verdict(first) == pytest.approx(float(changes.clamp(-0.02, 0.02).sum()) + noise, rel=1e-4)


def test_who_joins_a_trial_is_independent_of_who_joins_its_step():
    """Of 20,000 examples a quarter joins both; the same coins would give half of them."""
    one, other = (set(poisson(0.5).indices(4, 20_000, key).tolist()) for key in (9, key_from("trial", 9)))
    assert abs(len(one & other) - 5_000) < 6 * math.sqrt(20_000 * 0.25 * 0.75)


@pytest.mark.parametrize("now", [0.3, 1e30, math.inf, math.nan])
def test_no_example_moves_a_verdict_by_more_than_the_clip(now):
    query = LossChange(torch.zeros(2))
    plan = StepPlan(Block(codec=Everything(1), bound=clip(0.1), query=query))
    (found,) = contributions(
        plan,
        lambda point: torch.zeros(2, 2),
        lambda point: torch.tensor([[now], [0.2]]) if point is None else torch.full((2, 1), 0.15),
    )
    # A loss that is no number is the worst there is, and not one that did not change.
    torch.testing.assert_close(found, torch.tensor([[0.1], [0.05]]))


def test_losses_are_not_answered_from_gradients():
    plan = StepPlan(Block(codec=Everything(1), bound=clip(0.1), query=LossChange(torch.zeros(2))))
    with pytest.raises(ValueError, match="LossChange must be asked of a model and data, got gradients alone"):
        contributions(plan, lambda point: torch.zeros(2, 2))


@pytest.mark.parametrize("engine", ["layerwise", "torch.func", "one_by_one"])
def test_every_engine_gives_the_mean_loss_of_an_example_s_views(engine):
    runner = Engine(duties.network_with_dropout().train(), engine=engine, **duties.DRAWN.settings)
    inputs, labels = duties.DRAWN.data
    point = duties.LAYOUT.read(duties.network()) + 0.1
    plan = StepPlan(Block(codec=Everything(1), bound=clip(1e3), query=LossChange(point))).at(0.0)
    whole = float(runner.run(plan, inputs, labels, seed=5).noisy[0])
    alone = [float(runner.run(plan, inputs[i : i + 1], labels[i : i + 1], seed=5).noisy[0]) for i in range(24)]
    assert whole == pytest.approx(sum(alone), rel=1e-4)
    # Engines draw dropout alike, so the reference says what is right.
    reference = Engine(duties.network_with_dropout().train(), engine="torch.func", **duties.DRAWN.settings)
    assert whole == pytest.approx(float(reference.run(plan, inputs, labels, seed=5).noisy[0]), rel=1e-4)


def test_its_epsilon_is_that_of_every_round_by_dp_accounting():
    defense = dpsur(noise_multiplier=1.7, validation_rate=0.031, validation_noise_multiplier=2.3)
    found = predict(defense, sampling=poisson(0.017), steps=143).claim(3e-6).epsilon
    accountant = PLDAccountant()
    for rate, sigma in ((0.017, 1.7), (0.031, 2.3)):
        event = dp_event.PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(sigma))
        accountant.compose(dp_event.SelfComposedDpEvent(event, 143))
    assert found == pytest.approx(accountant.get_epsilon(3e-6), rel=1e-3)


@pytest.mark.long
@pytest.mark.parametrize("sampling", [poisson(0.02), pytest.param(shuffle(0.1), marks=pytest.mark.slow), full()])
def test_calibration_leaves_the_trial_s_noise_and_keeps_the_epsilon(sampling):
    defense = calibrate(dpsur(), epsilon=6.0, delta=1e-5, sampling=sampling, steps=30)
    ledger = predict(defense, sampling=sampling, steps=30)
    assert [e.noise_multiplier for e in ledger.entries if e.trial] == [5.0]
    assert 5.95 < ledger.claim(1e-5).epsilon <= 6.0


def test_without_noise_on_the_verdict_nothing_is_proved():
    claim = predict(dpsur(validation_noise_multiplier=0.0, noise_multiplier=1.0), sampling=poisson(0.1), steps=3).claim(
        1e-5
    )
    assert claim.epsilon == math.inf and claim.reason == "no noise is added"


@subtests(
    ("name", "value"),
    [("loss_clip", 0.0), ("beta", math.nan), ("validation_rate", 0.0), ("validation_noise_multiplier", -1.0)],
)
def test_what_makes_no_sense_is_refused(name, value):
    with pytest.raises(ValueError, match=" must be "):
        dpsur(**{name: value})


def test_a_trial_is_of_one_number_with_its_noise():
    one = StepPlan(Block(codec=Everything(1), bound=clip(0.1)))
    with pytest.raises(ValueError, match="one block that releases one number"):
        Trial(plan=StepPlan(Block(codec=Everything(2), bound=clip(0.1))).at(1.0), rate=0.1, below=0.0)
    for rate, below in ((0.0, 0.0), (1.5, 0.0), (0.1, math.nan)):
        with pytest.raises(ValueError, match="must be"):
            Trial(plan=one.at(1.0), rate=rate, below=below)
