"""Labelled examples as input and label tensors, from a pair of inputs and labels or from a map-style dataset."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from ..gradients.reference import Loss, PerExampleLoss, cross_entropy, fits_tokens, scores_of, token_cross_entropy
from ..inputs import Inputs, InputTensors, SameInputs, called, changed, tensors_in

LabelledData = Sequence[Any] | Dataset[Any] | DataLoader[Any]
"""(inputs, labels) as tensors or arrays, or a map-style dataset of such pairs; loaders are refused.

Inputs are [n, ...], or several such tensors: a dictionary by the keywords of the model's arguments, or a tuple or list
by position. Labels are [n], or [n, positions] for a loss by token.
"""


_INPUTS = ("inputs", "x", "images", "data", "image", "img", "features", "pixel_values", "pixels")
_LABELS = ("labels", "y", "label", "targets", "target")


def as_tensors(data: LabelledData, argument: str, device: torch.device | str | None) -> tuple[Tensor, Tensor]:
    """Returns inputs [n, ...] and labels [n] as `as_examples`, for code that needs one input tensor.

    Raises:
        ValueError: for several input tensors, and as `as_examples`.
    """
    inputs, labels = as_examples(data, argument, device)
    if not isinstance(inputs, Tensor):
        raise ValueError(
            f"inputs of {argument} must be one tensor here, got {len(inputs.tensors)}; several are for training alone"
        )
    return inputs, labels


def as_examples(data: LabelledData, argument: str, device: torch.device | str | None) -> tuple[Inputs, Tensor]:
    """Returns inputs and labels; a dataset is read into memory once, arrays become tensors.

    Rows may be pairs, or dictionaries of a label under a common name and an input under a common name, or several
    inputs by the keywords of the model's arguments.

    Args:
        data: private or public examples.
        argument: name of the argument in errors.
        device: target device; None to keep the data on its own.

    Raises:
        ValueError: for no examples, lengths that differ, rows of another form or of several shapes, a data loader, a
            dataset of unknown length, or NaN in one of several inputs.
    """
    dataset: Any = data
    if isinstance(dataset, DataLoader):
        raise ValueError(
            f"{argument} must be a dataset or tensors, got a DataLoader: the claim's own sampler draws batches, "
            "so pass its .dataset"
        )
    if isinstance(dataset, TensorDataset):
        pair: Sequence[Any] = dataset.tensors
    elif isinstance(dataset, Dataset):
        if not hasattr(dataset, "__len__"):
            raise ValueError(f"{argument} must have a length, got {type(dataset).__name__}; sampling needs to know it")
        pair = _of_rows([_pair(dataset[i], i, argument) for i in range(len(dataset))], argument)  # pyright: ignore[reportArgumentType]  checked above
    else:
        pair = dataset
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        form = f"{len(pair)} parts" if isinstance(pair, tuple | list) else type(pair).__name__
        raise ValueError(
            f"{argument} must be (inputs, labels), got {form}; put several targets into one tensor, and several inputs "
            "into a dictionary or a tuple in the place of the inputs"
        )
    inputs, labels = _inputs(pair[0], argument), _tensor(pair[1], argument)
    parts = (*tensors_in(inputs), labels)
    lengths = [len(part) if part.dim() else 0 for part in parts]
    if len(set(lengths)) > 1 or 0 in lengths:
        sizes = [str(len(part)) if part.dim() else "a number" for part in parts]
        if not isinstance(inputs, Tensor):
            sizes = [f"{place} of {size}" for place, size in zip((*inputs.places, "labels"), sizes, strict=True)]
        raise ValueError(f"{argument} must be (inputs, labels) of one length above 0, got {', '.join(sizes)}")
    device = inputs.device if device is None else device
    return inputs.to(device), labels.to(device)


def _inputs(values: Any, argument: str) -> Inputs:
    """Returns one tensor, or several from a dictionary, or from a tuple or list of tensors with dimensions."""
    if isinstance(values, Mapping):
        if not values or not all(isinstance(key, str) for key in values):
            keys = next((repr(key) for key in values if not isinstance(key, str)), "no entry")
            raise ValueError(
                f"inputs of {argument} must have the names of the model's arguments as their keys, got {keys}"
            )
        inputs = InputTensors.of({key: _tensor(entry, f"{key} of {argument}") for key, entry in values.items()})
    elif _are_several(values):
        inputs = InputTensors.of([_tensor(entry, f"input {i} of {argument}") for i, entry in enumerate(values)])
    else:
        return _tensor(values, argument)
    for place, tensor in zip(inputs.places, inputs.tensors, strict=True):
        if tensor.is_floating_point() and tensor.isnan().any():
            row = int(tensor.isnan().nonzero()[0, 0]) if tensor.dim() else 0
            raise ValueError(f"{place} of {argument} must not be NaN, got NaN in row {row}")
    return inputs


def _are_several(values: Any) -> bool:
    """Returns whether values are inputs by position; a sequence of numbers, also as tensors, is one input."""
    sequence = isinstance(values, tuple | list)
    return sequence and any(isinstance(entry, Tensor) and entry.dim() for entry in values)


def _pair(row: Any, number: int, argument: str) -> tuple[Any, Any]:
    """Returns a row as an input and a label."""
    if isinstance(row, Mapping):
        inputs, labels = ([key for key in row if str(key).lower() in names] for names in (_INPUTS, _LABELS))
        if len(row) == 2 and len(inputs) == len(labels) == 1:
            return row[inputs[0]], row[labels[0]]
        if len(row) > 2 and len(labels) == 1:
            return {key: value for key, value in row.items() if key != labels[0]}, row[labels[0]]
        form = f"a dictionary of {', '.join(map(str, row))}"
    elif isinstance(row, tuple | list) and len(row) == 2:
        return row[0], row[1]
    else:
        form = f"{len(row)} values" if isinstance(row, tuple | list) else type(row).__name__
    raise ValueError(f"rows of {argument} must be (input, label), got {form} in row {number}; wrap the dataset")


def _of_rows(rows: Sequence[tuple[Any, Any]], argument: str) -> tuple[Any, Tensor] | tuple[()]:
    if not rows:
        return ()
    inputs, labels = [row[0] for row in rows], _stacked([row[1] for row in rows], "labels", argument)
    first = inputs[0]
    if not isinstance(first, Mapping) and not _are_several(first):
        return _stacked(inputs, "inputs", argument), labels
    keys = list(first) if isinstance(first, Mapping) else list(range(len(first)))
    for number, entry in enumerate(inputs):
        own = set(entry) if isinstance(entry, Mapping) else set(range(len(entry))) if _are_several(entry) else {"one"}
        if own != set(keys):
            raise ValueError(
                f"inputs of {argument} must be {', '.join(map(str, keys))} in every row, got "
                f"{', '.join(sorted(map(str, own)))} in row {number}"
            )
    columns = [_stacked([entry[key] for entry in inputs], str(key), argument) for key in keys]
    return dict(zip(keys, columns, strict=True)) if isinstance(first, Mapping) else tuple(columns), labels


def _stacked(values: Sequence[Any], part: str, argument: str) -> Tensor:
    tensors = [_tensor(entry, argument) for entry in values]
    first = tensors[0].shape
    if (misshapen := next((i for i, tensor in enumerate(tensors) if tensor.shape != first), None)) is not None:
        raise ValueError(
            f"{part} of {argument} must be of one shape, got {list(first)} in row 0 and "
            f"{list(tensors[misshapen].shape)} in row {misshapen}; pad or crop them"
        )
    return torch.stack(tensors)


def _tensor(values: Any, argument: str) -> Tensor:
    try:
        return torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError, LookupError) as error:  # LookupError: a pandas table
        why = " ".join(str(error).split())
        raise ValueError(
            f"{argument} must hold tensors, arrays or numbers, got {type(values).__name__} ({why}); convert them, "
            "images by torchvision.transforms.ToTensor()"
        ) from None


def fitting(
    inputs: SameInputs, labels: Tensor, model: nn.Module, loss: Loss, argument: str
) -> tuple[SameInputs, Tensor]:
    """Returns examples in the dtypes that a model and its loss take, if the conversion is unambiguous.

    Inputs in another precision than the model's are converted. For the cross-entropy of class numbers, so are labels
    given as integer-valued floats or as one-hot integers.

    Args:
        inputs: inputs of the examples.
        labels: labels of the examples.
        model: gives the precision and the number of classes.
        loss: per-example.
        argument: name of the argument in errors.

    Raises:
        ValueError: for inputs that are no arguments of the model, or labels that are no class numbers of it.
    """
    own = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)

    def converted(values: Tensor) -> Tensor:
        return values.to(own) if values.is_floating_point() and values.dtype != own else values

    inputs = changed(inputs, converted)
    if not isinstance(inputs, Tensor):
        inputs.parameters_of(model)
    inner = loss.inner if isinstance(loss, PerExampleLoss) else loss
    settings = inner.keywords if isinstance(inner, partial) else vars(inner) if isinstance(inner, nn.Module) else {}
    inner = inner.func if isinstance(inner, partial) else inner
    if inner not in (cross_entropy, token_cross_entropy) and not isinstance(inner, nn.CrossEntropyLoss | nn.NLLLoss):
        return inputs, labels
    if labels.dim() == 1 and labels.is_floating_point():
        if not bool((labels == labels.round()).all()):
            raise ValueError(
                f"labels of {argument} must be class numbers, got {float(labels[labels != labels.round()][0]):g}"
            )
        labels = labels.long()
    if labels.is_floating_point():
        return inputs, labels
    scores = _shape_of_scores(model, inputs)
    by_token = fits_tokens(scores, torch.Size((1, *labels.shape[1:])))
    of_one = labels.dim() == 2 and labels.shape[1] > 1 and not by_token
    if of_one and bool(((labels == 0) | (labels == 1)).all() and (labels.sum(1) == 1).all()):
        labels = labels.argmax(1)
    if labels.dim() != 1 and not by_token:
        return inputs, labels
    labels = labels.long()
    counted = labels[labels != settings.get("ignore_index", -100)]
    width = scores[-1] if by_token else scores[1] if len(scores) == 2 else 0
    if width and len(counted) and not 0 <= int(counted.min()) <= int(counted.max()) < width:
        least, most = int(counted.min()), int(counted.max())
        way_out = "; subtract 1" if (least, most) == (1, width) else ""
        raise ValueError(
            f"labels of {argument} must be class numbers from 0 to {width - 1}, as the model answers, got {least} to "
            f"{most}{way_out}"
        )
    return inputs, labels


def _shape_of_scores(model: nn.Module, inputs: Inputs) -> torch.Size:
    """Returns the shape of a model's scores of one example; empty if it is unknown."""
    try:
        with torch.no_grad(), torch.random.fork_rng([inputs.device] if inputs.is_cuda else []):
            # Zeros of the shape, in a copy: uses no example's values, and leaves no state in the model.
            outputs = called(copy.deepcopy(model).eval(), changed(inputs[:1], torch.zeros_like))
            return scores_of(outputs).shape
    except Exception:  # whatever a user's model raises; the checks of the run report it
        return torch.Size()
