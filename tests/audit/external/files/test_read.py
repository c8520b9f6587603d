"""Honest files: every kind is read as it was written, and the report says what was done on the way."""

import hashlib

import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import nn

from audit.external.files import FileRefused, read_tensors
from audit.external.models import filled

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


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_entries_that_are_no_numbers_are_refused_by_name(tmp_path, value):
    save_file({"good": torch.ones(3), "bad": torch.tensor([1.0, value, value])}, tmp_path / "a")
    with pytest.raises(FileRefused, match="2 of 3 entries of 'bad' are NaN or infinite"):
        read_tensors(tmp_path / "a")


def test_a_file_that_is_not_there_is_one_sentence(tmp_path):
    with pytest.raises(FileRefused, match="No such file"):
        read_tensors(tmp_path / "nowhere")
