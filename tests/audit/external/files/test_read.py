"""Honest files: every kind is read as it was written, and the report says what was done on the way."""

import hashlib
import io
import subprocess
from collections import OrderedDict

import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import nn

from leakbench.audit.external.files import FileRefused, read, read_tensors, restricted
from leakbench.audit.external.files.checks import check
from leakbench.audit.external.model.network import filled

from ....parameters import subtests

STATE = {
    "conv.weight": torch.arange(24.0).reshape(2, 3, 2, 2),
    "half": torch.tensor([0.5, -1.5], dtype=torch.float16),
    "brain": torch.tensor([[0.25], [3.0]], dtype=torch.bfloat16),
    "double": torch.tensor(1.0, dtype=torch.float64),
    "counter": torch.tensor(7),
    "mask": torch.tensor([True, False]),
    "none": torch.zeros(0, 4),
}


def equal(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_safetensors_come_back_whole_under_any_name(tmp_path):
    path = tmp_path / "weights.pt"
    save_file(STATE, path, metadata={"format": "pt"})
    state = read_tensors(path)
    equal(state.tensors, STATE)
    assert (state.kind, state.bytes, state.notes) == ("safetensors", path.stat().st_size, ())
    assert state.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_saved_model_with_tied_weights_fills_its_like(tmp_path):
    def tied():
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model[1].weight = model[0].weight
        return model

    model, path = tied(), tmp_path / "model.safetensors"
    save_model(model, str(path))
    again = filled(tied(), read_tensors(path).tensors)
    assert torch.equal(again(torch.ones(1, 3)), model(torch.ones(1, 3)))


def test_a_link_to_a_file_is_followed_and_the_tensors_outlast_the_file(tmp_path):
    path, link = tmp_path / "a", tmp_path / "b"
    save_file(STATE, path)
    link.symlink_to(path)
    state = read_tensors(link)
    path.write_bytes(bytes(path.stat().st_size))
    equal(state.tensors, STATE)


def test_prefixes_come_off_and_the_notes_say_so(tmp_path):
    save_file({f"_orig_mod.module.{name}": tensor for name, tensor in STATE.items()}, tmp_path / "a")
    state = read_tensors(tmp_path / "a")
    equal(state.tensors, STATE)
    assert [("'_orig_mod.'" in note, "'module.'" in note) for note in state.notes] == [(True, False), (False, True)]


@subtests("value", [float("nan"), float("inf")])
def test_entries_that_are_no_numbers_are_refused_by_name(tmp_path, value):
    save_file({"good": torch.ones(3), "bad": torch.tensor([1.0, value, value])}, tmp_path / "a")
    with pytest.raises(FileRefused, match="2 of 3 entries of 'bad' are NaN or infinite"):
        read_tensors(tmp_path / "a")


def test_a_path_that_cannot_be_is_one_sentence(tmp_path):
    with pytest.raises(FileRefused, match="null byte"):
        read_tensors(f"{tmp_path}/a\0b")


def test_a_file_that_is_not_there_is_one_sentence(tmp_path):
    with pytest.raises(FileRefused, match="No such file"):
        read_tensors(tmp_path / "nowhere")


BASE = torch.arange(12.0).reshape(3, 4)
SHARED = {
    "whole": BASE,
    "view": BASE[1:, 1:3],
    "turned": BASE.T,
    "expanded": BASE[0, :1].expand(5),
    "parameter": nn.Parameter(BASE[0]),
    "kept": nn.Parameter(torch.ones(2), requires_grad=False),
}


def saved(what, **settings):
    file = io.BytesIO()
    torch.save(what, file, **settings)
    file.seek(0)
    return file


def trained():
    """What a trainer leaves: weights, the state of an optimizer and of a schedule, numbers."""
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 1, 4, 4)).sum().backward()
    optimizer.step()
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5])
    everything = {**model.state_dict(), **SHARED, **STATE}
    return model, {
        "epoch": 3,
        "state_dict": OrderedDict((f"module.{name}", tensor) for name, tensor in everything.items()),
        "optimizer": optimizer.state_dict(),
        "schedule": {key: value for key, value in schedule.state_dict().items() if not key.startswith("_")},
        "best": (0.5, None, True, b"bytes", "text"),
        "loss": torch.tensor(0.25),
    }


@subtests(
    "what",
    [
        STATE,
        SHARED,
        OrderedDict(STATE),
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)).state_dict(),
        nn.TransformerEncoderLayer(8, 2, 8).state_dict(),
    ],
)
def test_what_the_check_says_of_an_archive_is_what_was_saved(what):
    found = check(saved(what))
    assert found.kind == "torch.save"
    assert {name: tensor.shape for name, tensor in found.tensors.items()} == {
        n: tuple(t.shape) for n, t in what.items()
    }
    assert list(found.tensors) == list(what)


@pytest.mark.long
def test_a_trainers_archive_is_read_where_it_is_allowed(tmp_path):
    model, what = trained()
    path = tmp_path / "checkpoint.safetensors"
    path.write_bytes(saved(what).getvalue())
    with pytest.raises(FileRefused, match=r"allow_pickle_tensors=True \(--allow-pickle-tensors\)"):
        read_tensors(path)
    state = read_tensors(path, allow_pickle_tensors=True)
    expected = {**model.state_dict(), **SHARED, **STATE}
    equal(state.tensors, expected)
    assert list(state.tensors) == list(expected)
    assert (state.kind, state.sha256) == ("torch.save", hashlib.sha256(path.read_bytes()).hexdigest())
    under, prefix = state.notes
    assert "'state_dict'" in under
    assert "'epoch', 'optimizer', 'schedule', 'best', 'loss'" in under
    assert "'module.'" in prefix
    # Views and shared storages come apart.
    state.tensors["whole"].zero_()
    assert torch.equal(state.tensors["turned"], BASE.T)
    assert not state.tensors["parameter"].requires_grad
    inputs = torch.rand(2, 1, 4, 4)
    own = {name: tensor for name, tensor in state.tensors.items() if name in model.state_dict()}
    again = filled(nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)), own)
    assert torch.equal(again(inputs), model.eval()(inputs))


def test_a_dictionary_that_holds_itself_has_an_end():
    itself: dict = {"x": torch.ones(2)}
    itself["model"] = itself
    assert list(check(saved(itself)).tensors) == ["x"]


def test_entries_that_are_no_tensors_are_left_out_and_said():
    found = check(saved({"a": torch.ones(2), "b": 3, "c": None}))
    assert list(found.tensors) == ["a"]
    assert found.notes == ("Entries that are no tensors were left out: 'b', 'c'.",)


def test_the_loader_gets_limits_and_nothing_else(tmp_path, monkeypatch):
    path, calls = tmp_path / "checkpoint.pt", []
    path.write_bytes(saved(STATE).getvalue())
    start = subprocess.Popen

    def instead(command, **settings):
        calls.append((command, settings))
        text = "import sys; sys.exit('Traceback\\nUnpicklingError: no \\x1b[2J')"
        return start([command[0], "-I", "-c", text], **settings)

    monkeypatch.setenv("TOKEN", "secret")
    monkeypatch.setattr(restricted.subprocess, "Popen", instead)
    with pytest.raises(FileRefused, match=r"restricted loader refuses it: 'UnpicklingError: no \\x1b\[2J'"):
        read_tensors(path, allow_pickle_tensors=True)
    ((command, settings),) = calls
    assert "-I" in command
    assert settings["env"].keys() == {"HOME", "TMPDIR", "LANG", "OMP_NUM_THREADS"}
    assert settings["stdin"] == settings["stdout"] == subprocess.DEVNULL
    assert settings["start_new_session"]


@pytest.mark.parametrize(("limit", "sentence"), [("SECONDS", "took more than 0"), ("_IMPORT_BYTES", "refuses it")])
def test_a_loader_beyond_its_limits_is_ended(tmp_path, monkeypatch, limit, sentence):
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(saved(STATE).getvalue())
    monkeypatch.setattr(restricted, limit, 0.01 if limit == "SECONDS" else 100 << 20)
    with pytest.raises(FileRefused, match=sentence):
        read_tensors(path, allow_pickle_tensors=True)


def test_a_loader_that_hands_over_something_else_is_not_believed(tmp_path, monkeypatch):
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(saved({"a": torch.ones(3)}).getvalue())
    for lie in ({"a": torch.ones(4)}, {"a": torch.ones(3, dtype=torch.float64)}, {"b": torch.ones(3)}):
        monkeypatch.setattr(read, "converted", lambda source, target, checked, lie=lie: save_file(lie, target))
        with pytest.raises(FileRefused, match="finds other tensors in it than its pickle describes"):
            read_tensors(path, allow_pickle_tensors=True)


def test_entries_of_a_pickle_that_are_no_numbers_are_refused_by_name(tmp_path, monkeypatch):
    what, path = {"a": torch.tensor([1.0, float("nan")])}, tmp_path / "checkpoint.pt"
    path.write_bytes(saved(what).getvalue())
    monkeypatch.setattr(read, "converted", lambda source, target, checked: save_file(what, target))
    with pytest.raises(FileRefused, match="1 of 2 entries of 'a' are NaN or infinite"):
        read_tensors(path, allow_pickle_tensors=True)
