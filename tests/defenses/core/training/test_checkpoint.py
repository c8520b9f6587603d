"""A checkpoint is whole or refused, belongs to its run, runs no code, and is never lost by a refusal."""

import contextlib
import functools
import importlib.util
import os
import pickle
import re
import stat
import sys
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from leakbench.defenses.core import (
    CropAndFlip,
    Execution,
    GradientDifference,
    Ledger,
    Offset,
    Recording,
    StepPlan,
    from_os,
    partition,
    poisson,
    secure,
    seeded,
    shuffle,
    train,
)
from leakbench.defenses.core.training import checkpoint as disk
from leakbench.defenses.core.training import resuming
from leakbench.defenses.dp_sgd import dp_sgd
from leakbench.defenses.dpdr import dpdr

from ... import duties

DEFENSE = dp_sgd(noise_multiplier=1.0)


@pytest.fixture
def halfway(tmp_path):
    """The file of a run that was interrupted after three of six steps."""
    path = tmp_path / "run.checkpoint"
    with pytest.raises(KeyboardInterrupt):
        duties.trained(DEFENSE, checkpoint=path, progress=duties._Stop(3))
    return path


def refused(path, message, **settings):
    before = path.read_bytes()
    with pytest.raises(ValueError, match=message):
        duties.trained(settings.pop("defense", DEFENSE), checkpoint=path, **settings)
    assert path.read_bytes() == before  # nothing is lost


def smoothed(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets, reduction="none", label_smoothing=0.1)


@pytest.mark.parametrize(
    "settings",
    [
        {"defense": dp_sgd(noise_multiplier=1.1)},
        {"defense": dp_sgd(noise_multiplier=1.0, clip_norm=0.9)},
        {"sampling": poisson(0.4)},
        {"sampling": shuffle(0.5)},
        {"steps": 7},
        {"lr": 0.2},
        {"momentum": 0.1},
        {"optimizer": "adam", "momentum": 0.0},
        {"schedule": "linear"},
        {"average": 0.9},
        {"loss": smoothed},
        {"seed": 5},
        {"sampler_key": 5},
        {"noise": None},
        {"observer": "final"},
        {"public": None},
    ],
    ids=lambda s: next(iter(s)),
)
def test_a_checkpoint_of_another_run_is_refused_and_left_as_it_is(halfway, settings):
    refused(halfway, "belongs to another run .* delete it or name another file", **settings)


def test_other_data_or_another_model_is_another_run(halfway, monkeypatch):
    inputs, labels = duties.DATA
    changed = inputs.clone()
    changed[5, 2] += 1e-3
    for data in ((changed, labels), (inputs, labels.flip(0)), (inputs[:20], labels[:20])):
        with monkeypatch.context() as patch:
            patch.setattr(duties, "DATA", data)
            refused(halfway, "belongs to another run")
    monkeypatch.setattr(duties, "network", lambda: nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3)))
    refused(halfway, "belongs to another run")  # the same parameters, another function of them


def test_other_code_of_ours_is_another_version_and_the_refusal_says_so(halfway, monkeypatch):
    """A method's state may be another one by then: nothing else that the user knows of differs."""
    monkeypatch.setattr(resuming, "source_digest", lambda: "another")
    refused(halfway, r"settings or version of leakbench differ\)")


def by_closure(value):
    def loss(outputs, targets):
        return value * nn.functional.cross_entropy(outputs, targets, reduction="none")

    return loss


def with_default(outputs, targets, value=1.0):
    return value * nn.functional.cross_entropy(outputs, targets, reduction="none")


def rate(value):
    return lambda step, steps: value


def adam(value):
    return lambda parameters: torch.optim.Adam(parameters, betas=(0.9, value))


class Weighted:
    def __init__(self, value):
        self.value = value

    def __call__(self, outputs, targets):
        return self.value * nn.functional.cross_entropy(outputs, targets, reduction="none")


def weights(value):
    return nn.CrossEntropyLoss(weight=torch.tensor([1.0, 1.0, value]), reduction="none")


@pytest.mark.parametrize(
    ("setting", "make"),
    [
        ("loss", by_closure),
        ("loss", weights),
        ("loss", Weighted),
        ("loss", lambda value: functools.partial(with_default, value=value)),
        ("schedule", rate),
        ("optimizer", adam),
    ],
)
def test_a_function_of_another_content_is_another_run(tmp_path, setting, make):
    """Resumed, it would draw the same noise on another sum: the difference of the two releases has none."""
    path = tmp_path / "c"
    plain: dict[str, Any] = {"momentum": 0.0}
    with pytest.raises(KeyboardInterrupt):
        duties.trained(DEFENSE, checkpoint=path, progress=duties._Stop(3), **{setting: make(0.5)}, **plain)
    refused(path, "belongs to another run", **{setting: make(0.25)}, **plain)
    resumed = duties.trained(DEFENSE, checkpoint=path, **{setting: make(0.5)}, **plain)
    duties.check_same_run(resumed, duties.trained(DEFENSE, **{setting: make(0.5)}, **plain))


def test_another_augmentation_is_another_run(tmp_path):
    path = tmp_path / "c"
    with pytest.raises(KeyboardInterrupt):
        duties.trained(DEFENSE, duties.DRAWN, checkpoint=path, progress=duties._Stop(3))
    for other in (CropAndFlip(views=2, padding=0), CropAndFlip(views=3, padding=1), None):
        with pytest.raises(ValueError, match="belongs to another run"):
            duties.trained(DEFENSE, duties.DRAWN, checkpoint=path, augmentation=other)


def test_what_cannot_be_looked_into_is_refused_before_anything_is_released(tmp_path):
    def loss(outputs, targets, lock=threading.Lock()):  # noqa: B008  a thing that hides its content
        return nn.functional.cross_entropy(outputs, targets, reduction="none")

    with pytest.raises(ValueError, match=r"is of type _thread\.lock, into which nothing can look"):
        duties.trained(DEFENSE, loss=loss, checkpoint=tmp_path / "c")
    assert not (tmp_path / "c").exists()
    duties.trained(DEFENSE, loss=loss)  # without a checkpoint there is nothing to compare
    duties.trained(DEFENSE, loss=loss, checkpoint=tmp_path / "c", noise=from_os())  # nor noise that is drawn again


def test_a_refused_run_can_still_be_resumed(halfway):
    refused(halfway, "belongs to another run", lr=0.2)
    duties.check_same_run(duties.trained(DEFENSE, checkpoint=halfway), duties.trained(DEFENSE))


def fewer_steps(entry):
    return replace(entry, steps=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda saved: saved.update(entries=[]), "every step .*, got 0 charged of 3 taken, in a run of 6"),
        (lambda saved: saved.update(entries=[fewer_steps(saved["entries"][0])]), "got 1 charged of 3 taken"),
        (lambda saved: saved.update(step=500), "got 3 charged of 500 taken"),
        (lambda saved: saved.update(step=-3), "got 3 charged of -3 taken"),
        (lambda saved: saved.pop("entries"), "must hold a ledger's entries, got NoneType"),
        (lambda saved: saved.update(entries=[3]), "must hold a ledger's entries, got list"),
        (lambda saved: saved.pop("step"), "got 3 charged of None taken"),
    ],
)
def test_a_checkpoint_that_contradicts_itself_is_refused(halfway, change, message):
    """Its digest has no key, so that anybody can write one; a ledger that lacks steps is a claim that is too small."""
    saved = disk.load(halfway, fingerprint=fingerprint(halfway))
    change(saved)
    disk.save(saved, halfway)
    refused(halfway, message)


def test_a_finished_run_is_given_back_without_doing_it_again(halfway):
    whole = duties.trained(DEFENSE, checkpoint=halfway)
    steps = []
    again = duties.trained(DEFENSE, checkpoint=halfway, progress=lambda done, total: steps.append(done))
    assert steps == []
    duties.check_same_run(again, whole)
    assert again.engine == whole.engine


class OfPixels(nn.Linear):
    """Refuses small values, as made-up examples have, so that it cannot be checked."""

    def forward(self, input):
        if input.min() < 100:
            raise ValueError("pixels must be at least 100")
        return super().forward(input)


def test_a_finished_run_is_given_back_with_all_that_its_claim_says(tmp_path):
    def claim():
        recording = Recording(checkpoint=tmp_path / "run.checkpoint")
        data = (100 + duties.DATA[0].abs(), duties.DATA[1])
        settings = {"sampling": poisson(0.5), "recording": recording, "execution": Execution(unchecked=True)}
        return train(OfPixels(6, 3), data, DEFENSE, steps=2, **settings).claim(1e-5)

    first = claim()
    assert first.unverified == ("the model fails on made-up examples: pixels must be at least 100",)
    assert claim() == first


@pytest.mark.parametrize("source", [functools.partial(seeded, 1), from_os])
def test_noise_that_another_run_drew_from_the_same_source_meanwhile_is_not_drawn_again(tmp_path, source):
    path, noise = tmp_path / "run.checkpoint", source()
    with pytest.raises(KeyboardInterrupt):
        duties.trained(DEFENSE, checkpoint=path, noise=noise, progress=duties._Stop(3))
    # Of the same data, coins and almost the same parameters: what differs is the noise.
    other = duties.trained(DEFENSE, noise=noise, lr=1e-9)
    resumed = duties.trained(DEFENSE, checkpoint=path, noise=source())
    spread = {
        (one.step, two.step): float((one.noisy[0] - two.noisy[0]).std())
        for one in resumed.transcript.steps[3:]
        for two in other.transcript.steps
        if one.noisy and two.noisy
    }
    # Sums of clipped gradients lie closer together than that; the difference of two draws has a deviation of sqrt(2).
    # Of 43 numbers it has an error of 0.15, and of unseeded ones a smaller one than 0.6 comes once in a million runs.
    assert min(spread.values()) > 0.6, spread


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(cut=st.floats(0, 0.9999))
def test_a_torn_file_is_refused_wherever_it_is_torn(halfway, cut):
    whole = halfway.read_bytes()
    torn = halfway.with_name("torn")
    torn.write_bytes(whole[: int(cut * len(whole))])
    refused(torn, "must be a complete file of ours; delete it to start afresh")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(where=st.floats(0, 0.9999), bit=st.integers(0, 7))
def test_a_flipped_bit_is_noticed_wherever_it_is(halfway, where, bit):
    changed = bytearray(halfway.read_bytes())
    changed[int(where * len(changed))] ^= 1 << bit
    other = halfway.with_name("flipped")
    other.write_bytes(bytes(changed))
    refused(other, "must be (a complete file of ours|one of this version of leakbench)")


@pytest.mark.parametrize("content", [b"", b"hello world", b"PK\x03\x04" + bytes(100), pickle.dumps({"step": 1})])
def test_a_file_of_something_else_is_refused(tmp_path, content):
    path = tmp_path / "other"
    path.write_bytes(content)
    refused(path, "must be a complete file of ours; delete it to start afresh")


class Harmful:
    """Unpickled without care, makes a folder."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_checkpoint_runs_no_code(tmp_path):
    path, trace = tmp_path / "c", tmp_path / "trace"
    disk.save({"fingerprint": "x", "state": Harmful(trace)}, path)
    with pytest.raises(ValueError, match=r"must hold tensors, numbers and classes of leakbench\.defenses\.core only"):
        disk.load(path, fingerprint="x")
    assert not trace.exists()


OF_ITS_OWN = """
from dataclasses import dataclass
from leakbench.defenses.core import Block, Defense, Everything, Stateless, StepPlan, clip

@dataclass(frozen=True)
class Sign:
    scale: float

    def __call__(self, update):
        return self.scale * update.sign()

@dataclass(frozen=True, kw_only=True)
class Signs(Stateless):
    def plan(self, context):
        return StepPlan(Block(codec=Everything(context.dim), bound=clip(1.0)), post=Sign(0.1))

def signs():
    return Defense(Signs(), 1.0)
"""


@pytest.mark.parametrize(("name", "ours"), [("leakbench.defenses.signs_of_a_test", True), ("signs_of_a_test", False)])
def test_a_map_after_the_noise_may_stand_in_the_file_of_a_method_of_ours(name, ours, tmp_path, monkeypatch):
    (tmp_path / "signs.py").write_text(OF_ITS_OWN, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, tmp_path / "signs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    whole = duties.trained(module.signs())
    if ours:
        assert whole.unverified == ()
    else:
        assert {"unverified_method", "unverified_post"} <= set(whole.remarks)
    path = tmp_path / "run.checkpoint"
    with pytest.raises(KeyboardInterrupt):
        duties.trained(module.signs(), checkpoint=path, progress=duties._Stop(3))
    if ours:
        again = duties.trained(module.signs(), checkpoint=path)
        assert torch.equal(duties.parameters(again), duties.parameters(whole))
        # What a file may hold is decided by whose run it is: not of another method's.
        refused(path, rf"classes of leakbench\.defenses\.core only, got {re.escape(name)}\.Sign")
    else:
        refused(
            path, rf"classes of leakbench\.defenses\.core only, got {re.escape(name)}\.Sign", defense=module.signs()
        )


def test_a_crash_while_writing_leaves_the_old_file(halfway, monkeypatch):
    before = halfway.read_bytes()

    def fail(*args):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="no space left"):
        duties.trained(DEFENSE, checkpoint=halfway)
    assert halfway.read_bytes() == before
    assert [p.name for p in halfway.parent.iterdir()] == [halfway.name]


@pytest.mark.skipif(os.name == "nt", reason="folders cannot be opened")
def test_the_new_name_is_on_disk_before_the_run_goes_on(tmp_path, monkeypatch):
    """Otherwise a power cut restores the old file, which charges fewer steps than were taken since."""
    synced, sync = [], os.fsync

    def watched(handle):
        folder = stat.S_ISDIR(os.fstat(handle).st_mode)
        synced.append((folder, (tmp_path / "c").exists()))
        sync(handle)

    monkeypatch.setattr(os, "fsync", watched)
    disk.save({"fingerprint": "x"}, tmp_path / "c")
    assert synced == [(False, False), (True, True)]


def test_it_is_readable_by_its_owner_alone_because_it_holds_the_keys(halfway):
    assert stat.S_IMODE(halfway.stat().st_mode) == 0o600
    saved = disk.load(halfway, fingerprint=fingerprint(halfway))
    assert saved["sampler_key"] == 3
    assert saved["noise"] is not None


def fingerprint(path):
    with pytest.raises(ValueError, match="another run"):
        disk.load(path, fingerprint="")
    payload = path.read_bytes()[len(disk._MAGIC) + 32 :]
    at = payload.index(b"fingerprint")
    return payload[at:].split(b"X\x40\x00\x00\x00", 1)[1][:64].decode()


def test_folders_are_made(tmp_path):
    path = tmp_path / "a" / "b" / "c"
    duties.trained(DEFENSE, checkpoint=path)
    assert path.exists()


def test_everything_of_the_core_that_a_plan_or_a_state_holds_comes_back(tmp_path):
    plan = duties.history(dpdr(noise_multiplier=1.0))[1].plan
    ledger = Ledger(poisson(0.5))
    ledger.record(plan.at(1.0), step=0)
    extra = (GradientDifference(torch.ones(3)), Offset(torch.ones(3)))
    content = {
        "fingerprint": "x",
        "plan": plan,
        "entries": ledger.entries,
        "extra": extra,
        "state": {"a": (1, [2.0, None])},
    }
    disk.save(content, tmp_path / "c")
    back = disk.load(tmp_path / "c", fingerprint="x")
    assert isinstance(back["plan"], StepPlan)
    assert [b.share for b in back["plan"].blocks] == [b.share for b in plan.blocks]
    for a, b in zip(plan.blocks, back["plan"].blocks, strict=True):
        assert duties.same(a.codec.encode(torch.eye(duties.DIM)), b.codec.encode(torch.eye(duties.DIM)))
        assert a.bound == b.bound
    assert back["entries"] == ledger.entries
    assert back["state"] == {"a": (1, [2.0, None])}
    assert torch.equal(back["extra"][0].earlier, torch.ones(3))


def test_with_secure_noise_a_resumed_run_goes_on_with_fresh_noise(tmp_path):
    settings: dict[str, Any] = {"steps": 4, "seed": 1, "sampler_key": 2}
    path = tmp_path / "c"
    with pytest.raises(KeyboardInterrupt):
        duties.trained(DEFENSE, checkpoint=path, progress=duties._Stop(2), noise=secure(), **settings)
    run = duties.trained(DEFENSE, checkpoint=path, noise=secure(), **settings)
    assert run.noise == "secure"
    assert run.ledger.steps == len(run.transcript.steps) == 4
    # Who goes on twice from a copy of the file has two releases of a step, of which each ledger has only its own.
    once = "nobody else goes on from a copy of the run's checkpoint"
    assert any(sentence.startswith(once) for sentence in run.claim(1e-5).assumes)
    again = duties.trained(DEFENSE, checkpoint=path, noise=secure(), **settings)
    assert again.claim(1e-5) == run.claim(1e-5)
    whole = duties.trained(DEFENSE, noise=secure(), **settings)
    assert not any(sentence.startswith(once) for sentence in whole.claim(1e-5).assumes)


def test_a_resumed_run_with_another_lambda_is_another_run(tmp_path):
    path = tmp_path / "c"
    duties.interrupted(dp_sgd(noise_multiplier=1.0), path, after=2, schedule=lambda step, steps: 1.0)
    with pytest.raises(ValueError, match="belongs to another run"):
        duties.trained(dp_sgd(noise_multiplier=1.0), checkpoint=path, schedule=lambda step, steps: 0.5)


def test_a_checkpoint_of_another_version_is_refused_as_one(tmp_path):
    path = tmp_path / "old.checkpoint"
    path.write_bytes(b"leakbench checkpoint 2\n" + bytes(100))
    with pytest.raises(ValueError, match="must be one of this version of leakbench; delete it to start afresh"):
        disk.load(path, fingerprint="any")


class Peak(nn.Module):
    """Keeps the largest input that is beyond what made-up examples reach."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.peak: torch.Tensor
        self.register_buffer("peak", torch.zeros(()))

    def forward(self, inputs):
        with torch.no_grad():
            self.peak.copy_(torch.where(inputs.abs().amax() > 1e3, inputs.amax(), self.peak))
        return self.linear(inputs)


def test_what_a_pass_changed_before_an_interruption_is_never_taken_for_untouched(tmp_path):
    inputs, labels, sampling = torch.zeros(8, 4), torch.arange(8) % 2, partition(0.25)
    inputs[3, 0] = 4321.0
    key = next(key for key in range(100) if 3 in sampling.indices(1, 8, key))  # neither in the first step nor the last

    def run(progress=None):
        train(
            Peak(),
            (inputs, labels),
            DEFENSE,
            sampling=sampling,
            steps=4,
            seed=1,
            sampler_key=key,
            execution=Execution(engine="one_by_one"),
            recording=Recording(checkpoint=tmp_path / "run.checkpoint", checkpoint_every=2, progress=progress),
        )

    for progress in (duties._Stop(2), None):
        refused = pytest.raises(ValueError, match="must change trained parameters only, got another 'peak'")
        with refused, contextlib.suppress(KeyboardInterrupt):
            run(progress)
