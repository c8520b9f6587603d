"""Each observer's view, and what is in none of them."""

import dataclasses

import torch

from defenses.core import Step, Transcript
from defenses.dpdr import dpdr

from .. import duties


def seen(observer):
    return duties.trained(dpdr(noise_multiplier=1.0), observer=observer)


def test_the_final_observer_sees_no_step():
    assert seen("final").transcript.steps == []


def test_the_observer_of_iterates_sees_models_and_no_releases():
    full, bare = seen("updates").transcript, seen("iterates").transcript
    assert len(bare.steps) == duties.STEPS
    for a, b in zip(full.steps, bare.steps, strict=True):
        assert torch.equal(a.parameters, b.parameters)
        assert b.plan is None
        assert b.noisy is None


def test_the_observer_of_updates_sees_every_block_as_it_was_released():
    transcript = seen("updates").transcript
    assert [step.step for step in transcript.steps] == list(range(duties.STEPS))
    assert torch.equal(transcript.steps[0].parameters, duties.LAYOUT.read(duties.network()))
    for step in transcript.steps:
        assert step.plan and step.noisy
        assert [v.numel() for v in step.noisy] == [b.codec.size for b in step.plan.blocks]
        assert step.noise_multiplier == 1.0


def test_observers_change_nothing_about_the_run():
    parameters = [duties.parameters(seen(observer)) for observer in ("final", "iterates", "updates")]
    assert torch.equal(parameters[0], parameters[1])
    assert torch.equal(parameters[0], parameters[2])


def test_a_step_does_not_say_who_took_part_or_what_the_sums_were():
    assert {field.name for field in dataclasses.fields(Step)} == {
        "step",
        "parameters",
        "noise_multiplier",
        "divisor",
        "sample_rate",
        "plan",
        "noisy",
    }
    assert {field.name for field in dataclasses.fields(Transcript)} == {"observer", "layout", "steps"}


def test_later_steps_do_not_change_what_was_seen():
    short, long = duties.trained(dpdr(noise_multiplier=1.0), steps=5), seen("updates")
    for a, b in zip(short.transcript.steps, long.transcript.steps, strict=False):
        assert torch.equal(a.parameters, b.parameters)
        assert duties.same(a.noisy, b.noisy)
