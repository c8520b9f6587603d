"""Several input tensors as one batch: what is done to a batch is done to each tensor."""

import pytest
import torch
from torch import nn
from torch.func import grad, vmap

from leakbench.defenses.core import InputTensors
from leakbench.defenses.core.inputs import called, changed, form_of, joined, rebuilt, tensors_in
from leakbench.defenses.core.randomness.record_draws import entry_keys, record_keys

from ...parameters import subtests

WORDS, MASK = torch.arange(12).view(4, 3), torch.ones(4, 3, dtype=torch.bool)
NAMED = InputTensors.of({"words": WORDS, "mask": MASK})
BY_POSITION = InputTensors.of((WORDS, MASK))


class Called(nn.Module):
    def forward(self, words, mask):
        return words, mask


def same(inputs, words, mask):
    outputs = called(Called(), inputs)
    return torch.equal(outputs[0], words) and torch.equal(outputs[1], mask)


@subtests("inputs", [NAMED, BY_POSITION])
def test_what_is_done_to_a_batch_is_done_to_each_tensor(inputs):
    index = torch.tensor([2, 0])
    assert len(inputs) == 4
    assert same(inputs, WORDS, MASK)
    assert same(inputs[1:3], WORDS[1:3], MASK[1:3])
    assert same(inputs[index], WORDS[index], MASK[index])
    assert same(inputs[1].unsqueeze(0), WORDS[1:2], MASK[1:2])
    assert same(inputs.repeat_interleave(2, dim=0), *(v.repeat_interleave(2, dim=0) for v in (WORDS, MASK)))
    assert same(joined([inputs[:1], inputs[1:]]), WORDS, MASK)
    assert same(changed(inputs, lambda values: values + values), 2 * WORDS, MASK)
    assert [len(part) for part in inputs.split(3)] == [3, 1]
    assert same(joined(inputs.split(3)), WORDS, MASK)
    assert same(rebuilt(inputs, tensors_in(inputs)), WORDS, MASK)
    inputs.clone().tensors[0].zero_()
    assert same(inputs, WORDS, MASK)
    assert inputs.numel() == 24
    assert inputs.device == torch.device("cpu")
    assert inputs.is_cpu
    assert not inputs.is_cuda


def test_names_shapes_and_dtypes_are_the_form_and_the_number_of_examples_is_not():
    others = [
        BY_POSITION,
        InputTensors.of({"words": WORDS, "masks": MASK}),
        InputTensors.of({"words": WORDS, "mask": MASK[:, :2]}),
        InputTensors.of({"words": WORDS, "mask": MASK.long()}),
    ]
    assert form_of(NAMED) == form_of(NAMED[:2])
    assert all(form_of(other) != form_of(NAMED) for other in others)
    assert form_of(WORDS) == form_of(WORDS[:1]) != form_of(WORDS.float())


def test_vmap_maps_over_every_tensor():
    def value(weight, example):
        return weight * (example.tensors[0] * example.tensors[1]).sum()

    inputs = InputTensors.of((WORDS.float(), MASK.float()))
    assert torch.equal(vmap(grad(value), in_dims=(None, 0))(torch.tensor(2.0), inputs), WORDS.float().sum(1))


def test_devices_are_one_or_the_odd_one():
    there = InputTensors.of((WORDS, MASK.to("meta")))
    assert there.device == torch.device("meta")
    assert not there.is_cpu


@subtests(
    ("inputs", "names"),
    [(NAMED, ("mask", "words")), (BY_POSITION, ("words", "mask")), (InputTensors.of((WORDS,)), None)],
)
def test_arguments_have_the_names_of_the_signature(inputs, names):
    if names is None:
        with pytest.raises(ValueError, match=r"arguments of Called.forward, got 1 by position: missing .* 'mask'"):
            inputs.parameters_of(Called())
    else:
        assert inputs.parameters_of(Called()) == names


def test_arguments_of_a_signature_without_names_have_numbers():
    class Any(nn.Module):
        def forward(self, *inputs, **named):
            return inputs

    assert BY_POSITION.parameters_of(Any()) == ("0", "1")
    assert NAMED.parameters_of(Any()) == ("mask", "words")


def test_every_tensor_of_a_record_is_in_its_key():
    keys = record_keys(NAMED)
    assert len(set(keys.tolist())) == 4
    for place, tensor in enumerate(NAMED.tensors):
        for entry in range(3):
            moved = [values.clone() for values in NAMED.tensors]
            moved[place][1, entry] = 0 if tensor.dtype == torch.bool else 99
            moved_keys = record_keys(rebuilt(NAMED, moved))
            assert (moved_keys != keys).tolist() == [False, True, False, False]
    exchanged = record_keys(InputTensors.of((WORDS, WORDS + 1)))
    assert not set(exchanged.tolist()) & set(record_keys(InputTensors.of((WORDS + 1, WORDS))).tolist())


def test_keys_do_not_depend_on_the_order_of_a_dictionary_or_of_the_batch():
    targets, index = torch.arange(4), torch.tensor([3, 1])
    keys = entry_keys(NAMED, targets, 2, seed=1)
    other = InputTensors.of({"mask": MASK, "words": WORDS})
    assert torch.equal(entry_keys(other, targets, 2, seed=1), keys)
    assert torch.equal(entry_keys(NAMED[index], targets[index], 2, seed=1), keys.view(4, 2)[index].flatten())
