"""The battery: its error rate and its power on mechanisms whose curve is known, and what it does not ask."""

import math

import pytest
import torch
from scipy.stats import binom

from leakbench.audit.selftest.battery import TESTS, battery
from leakbench.audit.selftest.scenarios import scenarios
from leakbench.defenses.core import Layout, cross_entropy, per_example_gradients

from .mechanisms import claiming, gaussian_mechanism

CANARY = {"canary"}


def accusations(repetitions, level, only, **given):
    outcomes = [battery(gaussian_mechanism(i, **given), seed=i, level=level, only=only) for i in range(repetitions)]
    return sum(bool(one.accused_by) for one in outcomes)


def outcome(found, name):
    return next(one for one in found.outcomes if one.test == name)


@pytest.mark.long
def test_a_mechanism_at_its_claim_is_not_accused_and_one_with_half_the_noise_is():
    assert accusations(3, 0.05, CANARY) == 0  # the level of all twelve tests
    assert accusations(2, 1e-3, CANARY, scale=0.5) == 2


@pytest.mark.slow
def test_a_mechanism_at_its_claim_is_accused_at_most_as_often_as_declared():
    """Every test that applies, at a level of which a fifth is exceeded once in a million by chance alone."""
    repetitions, level = 60, 0.2
    assert accusations(repetitions, level, None) <= binom.ppf(1 - 1e-6, repetitions, level)
    assert accusations(10, level, None, scale=0.7) == 10


@pytest.mark.long
def test_taking_part_more_often_than_charged_is_found():
    found = battery(gaussian_mechanism(0, rate=0.9), seed=0, only={"participation"})
    assert found.accused_by == ("participation",)
    assert not battery(gaussian_mechanism(0), seed=0, only={"participation"}).accused_by


@pytest.mark.long
def test_a_claim_of_epsilon_alone_is_held_to_its_own_region():
    # One Gaussian of multiplier 2 is 1.99 at delta 1e-5: much less is a violation, as much is not.
    found = battery(gaussian_mechanism(0, answers=claiming(events=None, epsilon=0.02, delta=1e-5)), seed=0, only=CANARY)
    assert found.accused_by == ("canary",)
    found = battery(gaussian_mechanism(0, answers=claiming(events=None, epsilon=10.0, delta=1e-5)), seed=0, only=CANARY)
    assert not found.accused_by and outcome(found, "canary").runs == 640


@pytest.mark.long
def test_what_does_not_apply_says_why_and_the_level_stays_that_of_all_tests():
    zero_out = gaussian_mechanism(0, answers=claiming(relation="zero_out", arithmetic="real"))
    found = battery(zero_out, seed=0, only={"count", "buffers", "traces"})
    assert outcome(found, "size").why == "the claim is of zero_out, and no record of this test contributes nothing"
    replaced = gaussian_mechanism(0, answers=claiming(relation="replace_one"))
    why = outcome(battery(replaced, seed=0, only={"count", "traces"}), "size").why
    assert why == "the claim is of replace_one, and no record of this test contributes nothing"
    assert outcome(found, "buffers").why == "refused: model must be a LinearLogit" and found.failed == ()
    assert outcome(found, "low_bits").why == "the claim is about real numbers, not about those that are released"
    assert outcome(found, "canary").why == "not asked for" and found.tests_run == 3
    # 96 of 96 runs with, none without: what these prove at a level of 1e-3 over 12 tests, two looks and two rates.
    support = outcome(found, "support")
    assert support.runs == 96 and support.at_most_fpr is not None
    assert math.isclose(support.at_most_fpr, 1 - (1e-3 / 48) ** (1 / 96))


def test_a_trainer_that_raises_where_nothing_may_be_refused_is_named():
    found = battery(gaussian_mechanism(0), seed=0, only={"layers", "count"})
    assert found.failed == ("layers",) and outcome(found, "layers").why == "failed: model must be a LinearLogit"


def test_a_trainer_that_cannot_be_asked_anything_is_an_error():
    with pytest.raises(ValueError, match="no test of the battery could be asked: "):
        battery(gaussian_mechanism(0), seed=0, only={"buffers"})
    with pytest.raises(ValueError, match=r"level must be in \(0, 1\), got 1"):
        battery(gaussian_mechanism(0), seed=0, level=1.0)
    nothing = gaussian_mechanism(0, answers=claiming(events=None))
    with pytest.raises(ValueError, match="nothing is claimed"):
        battery(nothing, seed=0, only=CANARY)


def test_a_trainer_that_exits_has_not_passed():
    """With its own code, which may be 0, the command would end before there is any verdict."""

    def leaves(model, examples, task):
        raise SystemExit(0)

    with pytest.raises(
        ValueError, match="no test of the battery could be asked: failed: it asked for the end of the program"
    ):
        battery(leaves, seed=0, only=CANARY)


def test_a_claim_that_follows_the_data_is_none():
    """Else the run with the canary could say that anything is allowed, and others that nothing is."""
    claims = iter(range(1, 9))
    fickle = gaussian_mechanism(0, answers=lambda answer: claiming(events=None, epsilon=float(next(claims)))(answer))
    with pytest.raises(ValueError, match="failed: a trainer must claim the same in every run of a task"):
        battery(fickle, seed=0, only=CANARY)


def test_scenarios_are_pairs_that_differ_in_one_record():
    for scenario in scenarios(3):
        (without, labels), (present, all_labels) = scenario.sets.without, scenario.sets.present
        assert torch.equal(present[1:], without) and torch.equal(all_labels[1:], labels)
        if scenario.sets.blanked is not None:
            blanked, same = scenario.sets.blanked
            assert (blanked[0] == 0).all() and torch.equal(blanked[1:], without) and torch.equal(same, all_labels)
            assert (present[0] != 0).any()
    assert {test.scenario for test in TESTS} == {scenario.name for scenario in scenarios(3)}


def test_the_positions_of_a_record_cancel_in_float32_in_every_order_of_additions():
    scenario = next(one for one in scenarios(0) if one.name == "positions")
    inputs, labels = scenario.sets.present
    model = scenario.model()
    row = per_example_gradients(model, cross_entropy, Layout.of(model), inputs[:1], labels[:1])[0]
    assert torch.equal(row, 128 * scenario.task.clip_norm * scenario.direction)
    values, gates = inputs[0]
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        order = torch.randperm(len(values), generator=generator)
        a, s = values[order], -gates[order] / 2
        squares = ((a @ a.T) * (s @ s.T)).flatten()
        assert squares.abs().sum() > 2**40 and squares.sum() == squares.cumsum(0)[-1] == 0
        # Without rounding it is the squared norm.
        assert ((a.double() @ a.double().T) * (s.double() @ s.double().T)).sum() == 128**2


def test_the_canary_of_the_layers_fills_each_of_them():
    """Otherwise clipping layer by layer would not show."""
    scenario = next(one for one in scenarios(0) if one.name == "layers")
    inputs, labels = scenario.sets.present
    model = scenario.model()
    layers = [w.numel() for w in model.parameters()]
    layout = Layout.of(model)
    row = per_example_gradients(model, cross_entropy, layout, inputs[:1], labels[:1])[0]
    assert all(part.norm() > 2 * scenario.task.clip_norm for part in row.split(layers))
    torch.testing.assert_close(scenario.direction.norm(), torch.tensor(math.sqrt(len(layers))))
    blank = per_example_gradients(model, cross_entropy, layout, torch.zeros_like(inputs[:1]), labels[:1])
    assert (blank == 0).all()
