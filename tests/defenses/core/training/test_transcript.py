"""Each observer's view, and what is in none of them."""

import dataclasses

import torch

from leakbench.defenses.core import Step, Subspace, Transcript
from leakbench.defenses.core.training.transcript import storages
from leakbench.defenses.dpdr import dpdr
from leakbench.defenses.rpdp import rpdp

from ... import duties


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
        "expected_batch",
        "sample_rate",
        "plan",
        "noisy",
        "verdict",
        "one_off",  # its place among them, which is public
    }
    about_itself = {"observer", "layout", "steps", "one_offs", "always", "only", "memory", "truncated"}
    assert {field.name for field in dataclasses.fields(Transcript)} == about_itself | {"_taken", "_counted"}


def test_later_steps_do_not_change_what_was_seen():
    short, long = duties.trained(dpdr(noise_multiplier=1.0), steps=5), seen("updates")
    for a, b in zip(short.transcript.steps, long.transcript.steps, strict=False):
        assert torch.equal(a.parameters, b.parameters)
        assert duties.same(a.noisy, b.noisy)


def test_what_outgrows_its_memory_is_not_kept_but_for_the_steps_asked_for_by_number():
    whole = duties.trained(dpdr(noise_multiplier=1.0)).transcript
    sizes = [sum(storages(step).values()) for step in whole.steps]
    assert min(sizes) >= 4 * 2 * duties.DIM  # parameters and a release, float32
    others = sum(sizes) - sizes[1] - sizes[5]  # what is always kept takes nothing from them
    for memory, kept, truncated in ((others, list(range(6)), False), (others - 1, [0, 1, 2, 3, 5], True)):
        cut = duties.trained(dpdr(noise_multiplier=1.0), memory=memory, always=[1, 5]).transcript
        assert ([step.step for step in cut.steps], cut.truncated) == (kept, truncated)
    none = duties.trained(dpdr(noise_multiplier=1.0), memory=0).transcript
    assert (none.steps, none.truncated) == ([], True)


def test_masks_and_bases_count_as_memory_and_what_is_shared_counts_once():
    step = duties.trained(dpdr(noise_multiplier=1.0)).transcript.steps[2]
    assert step.plan and step.noisy
    bases = step.plan.blocks[1].codec
    assert isinstance(bases, Subspace)
    shared = sum(
        basis.untyped_storage().nbytes() for basis in {b.untyped_storage().data_ptr(): b for b in bases.bases}.values()
    )
    others = 4 * (step.parameters.numel() + sum(part.numel() for part in step.noisy))
    assert sum(storages(step).values()) == others + shared


def test_a_basis_that_steps_share_is_counted_in_the_first_of_them(tmp_path):
    defense = rpdp(rank=5, interval=3, noise_multiplier=1.0)
    steps = duties.trained(defense).transcript.steps
    every = {place: size for step in steps for place, size in storages(step).items()}
    assert sum(every.values()) < sum(sum(storages(step).values()) for step in steps)
    for memory, truncated in ((sum(every.values()), False), (sum(every.values()) - 1, True)):
        assert duties.trained(defense, memory=memory).transcript.truncated is truncated
        resumed = duties.interrupted(defense, tmp_path / f"{truncated}", after=2, memory=memory)
        assert resumed.transcript.truncated is truncated


def test_a_resumed_run_goes_on_counting(tmp_path):
    defense = dpdr(noise_multiplier=1.0)
    memory = sum(storages(duties.trained(defense).transcript.steps[0]).values())
    settings = {"memory": memory, "always": [5]}
    whole = duties.trained(defense, **settings).transcript
    resumed = duties.interrupted(defense, tmp_path / "c", after=1, **settings).transcript
    assert whole.truncated and resumed.truncated
    assert [step.step for step in resumed.steps] == [step.step for step in whole.steps] == [0, 5]


def test_steps_that_nobody_asked_for_are_not_missing():
    chosen = duties.trained(dpdr(noise_multiplier=1.0), only=[0, 3], always=[5]).transcript
    assert ([step.step for step in chosen.steps], chosen.truncated) == ([0, 3, 5], False)
