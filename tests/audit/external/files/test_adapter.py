"""Folders of LoRA adapters: merged into a base model that is there, and refused where the formula would be another."""

import json
import math

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional

from leakbench.audit.external.files import FileRefused, read_weights

from ....parameters import subtests

SETTINGS = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "target_modules": ["query"], "lora_dropout": 0.1}
COINS = torch.Generator().manual_seed(0)
BASE = {
    "body.query.weight": torch.randn(5, 3, generator=COINS),
    "body.query.bias": torch.randn(5, generator=COINS),
    "body.conv.weight": torch.randn(4, 3, 3, 3, generator=COINS),
    "words.weight": torch.randn(7, 3, generator=COINS),
    "head.weight": torch.randn(2, 5, generator=COINS),
}


def normal(*shape):
    return torch.randn(*shape, generator=COINS)


@pytest.fixture
def merged(tmp_path):
    """Writes a base model and an adapter of these tensors and settings, and reads them."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    base.mkdir()
    adapter.mkdir()
    save_file(BASE, base / "model.safetensors")

    def read(tensors, **settings):
        named = {f"base_model.model.{name}": tensor.contiguous() for name, tensor in tensors.items()}
        save_file(named, adapter / "adapter_model.safetensors")
        given = SETTINGS | {"base_model_name_or_path": str(base)} | settings
        (adapter / "adapter_config.json").write_text(json.dumps(given))
        return read_weights(adapter)

    return read


def query(a, b):
    return {"body.query.lora_A.weight": a, "body.query.lora_B.weight": b}


@subtests(
    ("settings", "rank", "scale"),
    [
        ({}, 2, 4.0),
        ({"lora_alpha": 3}, 2, 1.5),
        ({"use_rslora": True}, 2, 8 / math.sqrt(2)),
        ({"rank_pattern": {"query": 1}}, 1, 8.0),
        ({"rank_pattern": {"^body.query": 1}, "use_rslora": True}, 1, 8.0),
        ({"alpha_pattern": {"body.query": 16}}, 2, 8.0),
        ({"alpha_pattern": {"ery": 16, "conv": 1}}, 2, 4.0),
        ({"rank_pattern": {r".*\.(query|key)": 4}, "alpha_pattern": {r"body\.\w+": 2.0}}, 4, 0.5),
    ],
)
def test_what_is_merged_answers_as_the_layer_and_its_adapter(merged, settings, rank, scale):
    a, b, x = normal(rank, 3), normal(5, rank), normal(6, 3)
    found = merged(query(a, b), **settings)
    expected = functional.linear(x, BASE["body.query.weight"]) + scale * functional.linear(functional.linear(x, a), b)
    torch.testing.assert_close(functional.linear(x, found.tensors["body.query.weight"]), expected)
    others = [name for name in BASE if name != "body.query.weight"]
    assert all(torch.equal(found.tensors[name], BASE[name]) for name in others)
    assert found.kind == "LoRA (safetensors) on safetensors" and "LoRA of 1 layers was merged" in found.notes[-1]


def test_convolutions_embeddings_and_turned_weights(merged):
    a, b, x = normal(2, 3, 3, 3), normal(4, 2, 1, 1), normal(2, 3, 6, 6)
    found = merged({"body.conv.lora_A.weight": a, "body.conv.lora_B.weight": b}).tensors["body.conv.weight"]
    expected = functional.conv2d(x, BASE["body.conv.weight"]) + 4 * functional.conv2d(functional.conv2d(x, a), b)
    torch.testing.assert_close(functional.conv2d(x, found), expected, rtol=1e-4, atol=1e-4)
    a, b = normal(2, 7), normal(3, 2)
    found = merged({"words.lora_embedding_A": a, "words.lora_embedding_B": b}).tensors["words.weight"]
    torch.testing.assert_close(found, BASE["words.weight"] + 4 * (b @ a).T)
    a, b = normal(2, 5), normal(3, 2)  # of a weight [inputs, outputs]
    found = merged(query(a, b), fan_in_fan_out=True).tensors["body.query.weight"]
    torch.testing.assert_close(found, BASE["body.query.weight"] + 4 * (b @ a).T)


def test_what_was_trained_as_a_whole_takes_the_place_of_the_base_models(merged):
    head, bias = normal(9, 5), normal(5)
    tensors = query(normal(2, 3), normal(5, 2)) | {"head.weight": head, "body.query.base_layer.bias": bias}
    found = merged(tensors, modules_to_save=["head"], bias="lora_only")
    assert torch.equal(found.tensors["head.weight"], head) and torch.equal(found.tensors["body.query.bias"], bias)
    assert "2 tensors that it trained as a whole" in found.notes[-1]
    with pytest.raises(FileRefused, match=r"'base_model.model.head.weight' is none of LoRA's .*merge_and_unload"):
        merged(tensors)


def test_half_precision_is_merged_in_single(merged, tmp_path):
    save_file({name: tensor.half() for name, tensor in BASE.items()}, tmp_path / "base" / "model.safetensors")
    a, b = normal(2, 3), normal(5, 2)
    found = merged(query(a, b)).tensors["body.query.weight"]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, BASE["body.query.weight"].half().float() + 4 * b @ a)


@subtests(
    ("settings", "words"),
    [
        (
            {"base_model_name_or_path": "somebody/large"},
            "whose base model, 'somebody/large', is no local folder; merge",
        ),
        (
            {"base_model_name_or_path": None},
            "whose base model, None, is no local folder; merge it where it was trained",
        ),
        ({"peft_type": "IA3"}, "is a PEFT adapter of kind 'IA3', and LORA is read; merge"),
        ({"use_dora": True}, "sets 'use_dora', which is not read; merge"),
        ({"something_new": 3}, "sets 'something_new', which is not read"),
        ({"init_lora_weights": "pissa_niter_4"}, "which changes the base model; merge"),
        ({"r": 3}, r"must be of rank 3, as adapter_config.json says, got lora_A [2, 3] and lora_B [5, 2]"),
        ({"r": 0}, "must be whole numbers from 1"),
        ({"lora_alpha": "8"}, "must be positive numbers"),
        ({"fan_in_fan_out": True}, "do not fit the weight [5, 3]"),
        ({"alpha_pattern": {"(a+)+$": 2}}, "must have names of layers or short patterns, got '(a+)+$'"),
        ({"alpha_pattern": {"(a": 2}}, "must have patterns that can be read"),
    ],
)
def test_what_would_be_another_formula_is_refused(merged, settings, words):
    with pytest.raises(FileRefused) as caught:
        merged(query(normal(2, 3), normal(5, 2)), **settings)
    assert words in str(caught.value)


@subtests(
    ("tensors", "words"),
    [
        (
            {"body.key.lora_A.weight": normal(2, 3), "body.key.lora_B.weight": normal(5, 2)},
            "must have a floating-point",
        ),
        ({"body.query.lora_A.weight": normal(2, 3)}, "must have lora_A and lora_B, got A alone"),
        (query(normal(2, 3), normal(5, 2)) | {"body.query.lora_magnitude_vector": normal(5)}, "is none of LoRA's"),
        (query(normal(2, 3), normal(5, 2)) | {"body.query.lora_B.bias": normal(5)}, "is none of LoRA's"),
        (query(normal(2, 3), normal(5, 2)) | {"body.query.lora_A.default.weight": normal(2, 3)}, "has two of lora_A"),
        (query(normal(2, 4), normal(5, 2)), "do not fit the weight"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(merged, tensors, words):
    with pytest.raises(FileRefused) as caught:
        merged(tensors)
    assert words in str(caught.value) and "cannot read" in str(caught.value)


def test_the_adapter_of_an_adapter_and_pickles_are_not_read(merged, converted_here, tmp_path):
    merged(query(normal(2, 3), normal(5, 2)))
    second = tmp_path / "second"
    second.mkdir()
    settings = SETTINGS | {"base_model_name_or_path": str(tmp_path / "adapter")}
    (second / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(FileRefused, match="is an adapter itself"):
        read_weights(second)
    settings["base_model_name_or_path"] = "../base"  # from the adapter's own folder
    (second / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(FileRefused, match="No such file"):
        read_weights(second)
    torch.save({"base_model.model.head.weight": BASE["head.weight"]}, second / "adapter_model.bin")
    with pytest.raises(FileRefused, match="it is a pickle"):
        read_weights(second)
    assert torch.equal(read_weights(second, allow_pickle_tensors=True).tensors["head.weight"], BASE["head.weight"])
