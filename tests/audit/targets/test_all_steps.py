"""All steps of a run, kept or taken once more, and several readers of one pass."""

from dataclasses import replace

import pytest
import torch

from leakbench.audit.targets.all_steps import AllSteps, in_lockstep
from leakbench.defenses.core import Step
from leakbench.defenses.dp_snip import dp_snip
from leakbench.defenses.dpsur import dpsur
from leakbench.defenses.rpdp import rpdp

from ...defenses import duties


def numbers(steps):
    return [step.step for step in steps]


class Counted:
    """Bare steps, and how often they were read and fetched."""

    def __init__(self, count=4):
        self.count, self.passes, self.fetched = count, 0, 0

    def __iter__(self):
        self.passes += 1
        for number in range(self.count):
            self.fetched += 1
            yield Step(number, torch.zeros(1), 1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    "defense", [rpdp(rank=5, noise_multiplier=1.0), dp_snip(noise_multiplier=1.0), dpsur(noise_multiplier=1.0)]
)
def test_a_run_has_as_many_steps_as_were_taken_whatever_was_kept(defense):
    whole, few = duties.trained(defense), duties.trained(defense, memory=0, always=[1])
    assert len(AllSteps(whole)) == len(AllSteps(few)) == duties.STEPS
    assert list(AllSteps(whole)) == whole.transcript.steps
    again = AllSteps(few, lambda: duties.begun(defense).retake(few))
    for _ in range(2):
        assert numbers(again) == list(range(duties.STEPS))
    with pytest.raises(ValueError, match="must be given all 6, got 1: what the others show outgrew the memory"):
        iter(AllSteps(few))


def test_readers_share_a_pass_where_a_pass_is_a_training():
    run = duties.trained(rpdp(rank=5, noise_multiplier=1.0))
    passes = []
    few = replace(run, transcript=replace(run.transcript, truncated=True))
    all_steps = AllSteps(few, lambda: passes.append(1) or iter(run.transcript.steps))
    readers = [numbers] * 3
    assert all_steps.read_by(readers) == [list(range(duties.STEPS))] * 3
    assert len(passes) == 1
    assert AllSteps(run).read_by(readers) == [list(range(duties.STEPS))] * 3


def test_readers_in_lockstep_all_get_every_step_and_none_is_ahead():
    source, ahead = Counted(), []

    def reader(steps):
        seen = []
        for step in steps:
            ahead.append(source.fetched - step.step)
            seen.append(step.step)
        return seen

    assert in_lockstep(source, [reader, reader, reader]) == [[0, 1, 2, 3]] * 3
    assert source.passes == 1 and source.fetched == 4 and set(ahead) == {1}


def test_readers_may_read_twice_or_not_at_all_or_stop_early():
    source = Counted()
    assert in_lockstep(source, [lambda steps: (numbers(steps), numbers(steps))] * 2) == [([0, 1, 2, 3],) * 2] * 2
    assert source.passes == 2
    assert in_lockstep(source, [lambda steps: "unread", numbers, lambda steps: next(iter(steps)).step]) == [
        "unread",
        [0, 1, 2, 3],
        0,
    ]
    assert in_lockstep(source, []) == []


def test_a_reader_that_fails_fails_all_and_leaves_nobody_waiting():
    def failing(steps):
        for step in steps:
            if step.step == 1:
                raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        in_lockstep(Counted(), [numbers, failing, numbers])


def test_of_readers_that_fail_the_first_is_raised_and_says_what_the_others_did():
    def failing(sentence):
        def read(steps):
            next(iter(steps))
            raise KeyError(sentence)

        return read

    with pytest.raises(KeyError) as caught:
        in_lockstep(Counted(), [failing("mine"), failing("yours")])
    # Which of the two wakes first after a step is the system's choice.
    other = {"mine": "yours", "yours": "mine"}[caught.value.args[0]]
    assert caught.value.__notes__ == [f"another reader failed, too: KeyError: '{other}'"]


def test_a_source_that_fails_is_an_error_of_every_reader():
    def source():
        yield from Counted(1)
        raise ValueError("cannot be taken once more")

    class Failing:
        __iter__ = staticmethod(source)

    with pytest.raises(ValueError, match="cannot be taken once more"):
        in_lockstep(Failing(), [numbers, numbers])


def test_readers_that_start_anew_at_different_steps_are_refused():
    def restless(steps):
        next(iter(steps))
        return numbers(steps)

    with pytest.raises(ValueError, match="must read the steps in the same way whomever it is asked about"):
        in_lockstep(Counted(), [numbers, restless])


def test_readers_of_two_passes_at_once_are_refused_and_never_get_another_step_than_they_asked_for():
    with pytest.raises(ValueError, match="one after another, got one that asks for step 1 of a pass while another"):
        in_lockstep(Counted(), [lambda steps: [(a.step, b.step) for a, b in zip(steps, steps, strict=True)]] * 2)
    # One that begins anew where it stopped early is no such reader.
    assert (
        in_lockstep(Counted(), [lambda steps: (next(iter(steps)).step, numbers(steps))] * 2) == [(0, [0, 1, 2, 3])] * 2
    )
