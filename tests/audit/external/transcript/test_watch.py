"""Watched trainings: the same bit for bit, with every update on disk; resumed, limited, refused."""

import json
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from leakbench import audit
from leakbench.audit.external.claim import StatedClaim
from leakbench.audit.external.transcript.claim import judge_transcript
from leakbench.audit.external.transcript.format import TranscriptRefused, read_transcript, step_file

from ....parameters import subtests
from .watched import BATCH, RECORDS, digits, perceptron, private_steps

STATED: dict[str, Any] = {"noise_multiplier": 1.0, "clip_norm": 1.0, "expected_batch": float(BATCH)}


def plain(folder, *, steps=3, model=None, optimizer=None, seed=1, close=True, **settings):
    """A plain loop that is watched, and its model."""
    model = model or perceptron()
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    watch = audit.watch(optimizer, folder, model=model, **{**STATED, **settings})
    private_steps(model, optimizer, digits(), sigma=1.0, steps=steps, seed=seed)
    if close:
        watch.close()
    return model, watch


def flat(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def test_a_watched_training_ends_in_the_same_parameters_bit_for_bit(tmp_path):
    alone = perceptron()
    private_steps(alone, torch.optim.SGD(alone.parameters(), lr=0.1), digits(), sigma=1.0, steps=3)
    model, _ = plain(tmp_path / "run")
    assert all(torch.equal(a, b) for a, b in zip(alone.parameters(), model.parameters(), strict=True))


def test_a_transcript_has_what_the_optimizer_got_and_the_parameters_before(tmp_path):
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    optimizer.register_step_pre_hook(
        lambda *_: seen.append((flat(model.parameters()), flat(p.grad for p in model.parameters())))
    )
    model, _ = plain(tmp_path / "run", model=model, optimizer=optimizer)
    there = read_transcript(tmp_path / "run")
    assert there.header.names == tuple(name for name, _ in model.named_parameters())
    assert (there.steps_taken, there.lost, there.remarks, len(there)) == (3, (), (), 3)
    for step, (before, gradient) in zip(there, seen, strict=True):
        assert torch.equal(step.released, gradient)
        assert step.parameters is not None and torch.equal(step.parameters, before)
        assert (step.noise_std, step.expected_batch, step.lr) == (1.0, BATCH, 0.1)
    last = list(there)[-1]
    assert last.after is not None and torch.equal(last.after, flat(model.parameters()))


def test_of_first_parameters_alone_the_others_follow_under_plain_sgd_and_not_under_momentum(tmp_path):
    plain(tmp_path / "every")
    plain(tmp_path / "first", parameters="first")
    for whole, first in zip(read_transcript(tmp_path / "every"), read_transcript(tmp_path / "first"), strict=True):
        assert whole.parameters is not None and first.parameters is not None
        assert torch.equal(whole.parameters, first.parameters) and first.derived == (first.step > 0)
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    plain(tmp_path / "momentum", model=model, optimizer=optimizer, parameters="first")
    assert [step.parameters is None for step in read_transcript(tmp_path / "momentum")] == [False, True, True]


def test_groups_frozen_parameters_and_absent_gradients_are_told_apart(tmp_path):
    model = perceptron()
    assert isinstance(model, nn.Sequential)
    first, last = model[1], model[3]
    assert isinstance(first, nn.Linear)
    first.bias.requires_grad_(False)
    optimizer = torch.optim.SGD([{"params": last.parameters(), "lr": 0.2}, {"params": first.parameters()}], lr=0.1)
    with audit.watch(optimizer, tmp_path / "run", model=model, **STATED):
        for name, parameter in model.named_parameters():
            parameter.grad = None if name in ("3.bias", "1.bias") else torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.step()  # without any gradient: no release
    there = read_transcript(tmp_path / "run")
    (step,) = there
    assert there.header.names == ("1.weight", "3.weight", "3.bias")
    assert step.absent == (2,) and step.lr is None
    assert torch.equal(step.released, torch.cat([torch.ones(16 * 64 + 160), torch.zeros(10)]))


def test_a_run_that_goes_on_continues_the_numbering_in_a_session_of_its_own(tmp_path):
    model, _ = plain(tmp_path / "run", steps=2)
    plain(tmp_path / "run", steps=2, model=model, seed=2)
    there = read_transcript(tmp_path / "run")
    assert [(step.step, step.session) for step in there] == [(0, 0), (1, 0), (2, 1), (3, 1)]
    assert there.steps_taken == 4


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"noise_multiplier": 2.0}, "noise_multiplier"),
        ({"clip_norm": 2.0}, "clip_norm"),
        ({"expected_batch": 16.0}, "expected_batch"),
        ({"parameters": "first"}, "parameters"),
        ({"clipping": "by_layer"}, "clipping"),
    ],
)
def test_another_header_is_refused_by_field(tmp_path, changed, field):
    plain(tmp_path / "run", steps=1)
    with pytest.raises(TranscriptRefused, match=f"^{field} of the transcript"):
        plain(tmp_path / "run", steps=1, **changed)


def test_a_last_file_that_was_cut_short_is_named_and_left_out_and_counted_after_a_resume(tmp_path):
    plain(tmp_path / "run", close=False)
    last = tmp_path / "run" / step_file(2)
    last.write_bytes(last.read_bytes()[:-100])
    there = read_transcript(tmp_path / "run")
    assert (there.numbers, there.lost, there.steps_counted) == ((0, 1), (2,), 3)
    assert "Steps 2 were cut short" in there.remarks[0] and "not closed" in there.remarks[1]
    plain(tmp_path / "run", steps=1)
    there = read_transcript(tmp_path / "run")
    assert (there.numbers, there.lost, there.steps_taken) == ((0, 1, 3), (2,), 4)
    assert [step.session for step in there] == [0, 0, 1]


def test_beyond_the_limit_of_disk_steps_are_counted_and_the_training_goes_on(tmp_path):
    with pytest.warns(UserWarning, match="steps from 2 on are counted and not written"):
        model, watch = plain(tmp_path / "run", steps=4, max_bytes=25_000)
    assert watch.stopped == 2
    there = read_transcript(tmp_path / "run")
    assert (len(there), there.steps_taken, there.steps_counted) == (2, 4, 4)
    assert "took 4 steps, of which 2 were written" in there.remarks[0]
    with pytest.raises(TranscriptRefused, match="stopped at its limit of disk"):
        plain(tmp_path / "run", model=model)


def test_what_cannot_be_read_as_a_released_gradient_is_refused(tmp_path):
    model = perceptron()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    with audit.watch(optimizer, tmp_path / "run", model=model, **STATED):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        with pytest.raises(ValueError, match="without a closure"):
            optimizer.step(lambda: 0.0)
        optimizer.grad_scale = torch.ones(())
        with pytest.raises(ValueError, match="GradScaler"):
            optimizer.step()
        del optimizer.grad_scale
        sparse = nn.Embedding(3, 2)
        optimizer.add_param_group({"params": sparse.parameters()})
        sparse.weight.grad = torch.zeros(3, 2)
        with pytest.raises(ValueError, match="must be those that it had"):
            optimizer.step()
    embedding = nn.Embedding(3, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
    with audit.watch(optimizer, tmp_path / "sparse", **STATED), pytest.raises(ValueError, match="must be dense"):
        optimizer.step()


@subtests(
    ("made", "settings", "message"),
    [
        (lambda p: torch.optim.LBFGS(p), {}, "got LBFGS"),
        (lambda p: torch.optim.SGD(p, lr=0.1), {"noise_multiplier": None}, "noise_multiplier must be given"),
        (lambda p: torch.optim.SGD(p, lr=0.1), {"clip_norm": 0.0}, "clip_norm must be a positive"),
        (lambda p: torch.optim.SGD(p, lr=0.1), {"expected_batch": float("nan")}, "expected_batch must be a positive"),
        (lambda p: torch.optim.SGD(p, lr=0.1), {"max_bytes": 0}, "max_bytes must be at least 1"),
        (lambda p: torch.optim.SGD(p, lr=0.1), {"model": nn.Linear(1, 1)}, "must hold the parameters of the optimizer"),
        (lambda p: "sgd", {}, "must be one of PyTorch or of Opacus"),
    ],
)
def test_arguments_are_refused_before_anything_is_written(tmp_path, made, settings, message):
    with pytest.raises(ValueError, match=message):
        audit.watch(made(perceptron().parameters()), tmp_path / "run", **{**STATED, **settings})
    assert not (tmp_path / "run").exists()


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(TranscriptRefused, match="must be empty or hold a transcript"):
        plain(tmp_path)


def of_opacus(folder, *, physical=None, steps=4, clipping="flat", bound: Any = 1.0, ghost=False, **settings):
    """A training by Opacus as its documentation has it, watched where there is a folder: model and optimizer."""
    pytest.importorskip("opacus", reason="opacus is of leakbench[engines]")
    from opacus import PrivacyEngine
    from opacus.utils.batch_memory_manager import BatchMemoryManager
    from torch.utils.data import DataLoader, TensorDataset

    model = perceptron()
    torch.manual_seed(3)
    data = DataLoader(TensorDataset(*digits()), batch_size=BATCH)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine: Any = PrivacyEngine()  # its answers are tuples of three or of four, by its arguments
        made = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=data,
            noise_multiplier=0.8,
            max_grad_norm=bound,
            clipping=clipping,
            **({"grad_sample_mode": "ghost", "criterion": nn.CrossEntropyLoss()} if ghost else {}),
            **settings,
        )
        wrapped, optimizer, loader = made[0], made[1], made[-1]
        loss: Any = made[2] if ghost else nn.functional.cross_entropy
        watch = None if folder is None else audit.watch(optimizer, folder, model=wrapped)
        taken = 0
        while taken < steps:
            with BatchMemoryManager(
                data_loader=loader, max_physical_batch_size=physical or RECORDS, optimizer=optimizer
            ) as batches:
                for inputs, labels in batches:
                    optimizer.zero_grad()
                    loss(wrapped(inputs), labels).backward()
                    optimizer.step()
                    taken += not optimizer._is_last_step_skipped
                    if taken == steps:
                        break
        if watch is not None:
            watch.close()
    return model, optimizer


@pytest.mark.peers
@pytest.mark.parametrize("physical", [None, 8])
def test_a_training_by_opacus_is_the_same_and_its_logical_steps_are_written(tmp_path, physical):
    alone, _ = of_opacus(None, physical=physical)
    model, optimizer = of_opacus(tmp_path / "run", physical=physical)
    assert all(torch.equal(a, b) for a, b in zip(alone.parameters(), model.parameters(), strict=True))
    there = read_transcript(tmp_path / "run")
    steps = list(there)
    assert len(steps) == 4 and there.header.names[0] == "1.weight" and there.header.clipping == "flat"
    assert {(s.noise_std, s.noise_multiplier, s.clip_norm, s.expected_batch) for s in steps} == {
        (0.8, 0.8, 1.0, float(optimizer.expected_batch_size))
    }
    assert steps[-1].after is not None and torch.equal(steps[-1].after, flat(model.parameters()))


@pytest.mark.peers
def test_adaptive_ghost_and_per_layer_clipping_of_opacus_are_written_as_they_are(tmp_path):
    adaptive: dict[str, Any] = {
        "target_unclipped_quantile": 0.5,
        "clipbound_learning_rate": 0.2,
        "max_clipbound": 10.0,
        "min_clipbound": 0.1,
        "unclipped_num_std": 2.0,
    }
    of_opacus(tmp_path / "adaptive", clipping="adaptive", **adaptive)
    there = read_transcript(tmp_path / "adaptive")
    assert there.header.clip_norm is None
    norms = [step.clip_norm for step in there]
    # The bound of the first step is the one that it had then, and not the one after it.
    assert norms[0] == 1.0 and len(set(norms)) == 4
    own = (0.8**-2 - 4.0**-2) ** -0.5
    assert [step.noise_std for step in there] == pytest.approx([own * norm for norm in norms if norm is not None])
    of_opacus(tmp_path / "layers", clipping="per_layer", bound=[0.5] * 4)
    there = read_transcript(tmp_path / "layers")
    assert (there.header.clipping, there.header.clip_norm) == ("by_layer", 1.0)
    alone, _ = of_opacus(None, ghost=True)
    model, _ = of_opacus(tmp_path / "ghost", ghost=True)
    assert torch.equal(flat(alone.parameters()), flat(model.parameters()))
    assert len(read_transcript(tmp_path / "ghost")) == 4


@pytest.mark.peers
def test_half_the_noise_that_opacus_was_asked_for_is_found_in_its_transcript(tmp_path, monkeypatch):
    optimizers = pytest.importorskip("opacus.optimizers.optimizer", reason="opacus is of leakbench[engines]")
    claim = StatedClaim(epsilon=50.0, sampling="poisson", sample_rate=1 / 7, noise_multiplier=0.8)
    model, _ = of_opacus(tmp_path / "right")
    given: dict[str, Any] = {"model": model, "members": digits()[0], "final": model.state_dict()}
    assert judge_transcript(read_transcript(tmp_path / "right"), claim, **given).word == "no violation found"
    whole = optimizers._generate_noise
    monkeypatch.setattr(
        optimizers, "_generate_noise", lambda std, reference, **others: whole(std / 2, reference, **others)
    )
    model, _ = of_opacus(tmp_path / "half")
    given = {"model": model, "members": digits()[0], "final": model.state_dict()}
    found = judge_transcript(read_transcript(tmp_path / "half"), claim, **given)
    assert found.word == "violation" and "times what is stated" in found.sentence and not found.problems


def test_two_that_watch_into_one_folder_are_told_apart(tmp_path):
    first, second = perceptron(), perceptron()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (first, second)]
    watches = [audit.watch(optimizer, tmp_path / "run", **STATED) for optimizer in optimizers]
    private_steps(first, optimizers[0], digits(), sigma=1.0, steps=1)
    with pytest.raises(TranscriptRefused, match="another process watches into this folder"):
        private_steps(second, optimizers[1], digits(), sigma=1.0, steps=1)
    for watch in watches:
        watch._handle.remove()


def test_the_header_is_plain_json(tmp_path):
    plain(tmp_path / "run", steps=1)
    header = json.loads((tmp_path / "run" / "header.json").read_text())
    assert header["format"] == "leakbench transcript" and header["shapes"][0] == [16, 64]
