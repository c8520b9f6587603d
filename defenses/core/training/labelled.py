"""Labelled examples as input and label tensors, from a pair of tensors or from a map-style dataset."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from ..gradients.reference import Loss, PerExampleMean, cross_entropy

LabelledData = Sequence[Any] | Dataset[Any] | DataLoader[Any]
"""(inputs [n, ...], labels [n]) as tensors or arrays, or a map-style dataset of such pairs; loaders are refused."""


_INPUTS = ("inputs", "x", "images", "data", "image", "img", "features", "pixel_values", "pixels")
_LABELS = ("labels", "y", "label", "targets", "target")


def as_tensors(data: LabelledData, argument: str, device: torch.device | str | None) -> tuple[Tensor, Tensor]:
    """Returns inputs [n, ...] and labels [n]; a dataset is read into memory once, arrays become tensors.

    Rows may be pairs, or dictionaries of an input and a label under common names.

    Args:
        data: private or public examples.
        argument: name of the argument in errors.
        device: target device; None to keep the data on its own.

    Raises:
        ValueError: for no examples, lengths that differ, rows of another form or of several shapes, a data loader, or a
            dataset of unknown length.
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
            f"{argument} must be (inputs, labels), got {form}; put several inputs or targets into one tensor"
        )
    inputs, labels = (_tensor(part, argument) for part in pair)
    if inputs.dim() == 0 or labels.dim() == 0 or len(inputs) != len(labels) or len(inputs) == 0:
        sizes = ", ".join(str(len(part)) if part.dim() else "a number" for part in (inputs, labels))
        raise ValueError(f"{argument} must be (inputs, labels) of one length above 0, got {sizes}")
    device = inputs.device if device is None else device
    return inputs.to(device), labels.to(device)


def _pair(row: Any, number: int, argument: str) -> tuple[Any, Any]:
    """Returns a row as an input and a label."""
    if isinstance(row, Mapping):
        inputs, labels = ([key for key in row if str(key).lower() in names] for names in (_INPUTS, _LABELS))
        if len(row) == 2 and len(inputs) == len(labels) == 1:
            return row[inputs[0]], row[labels[0]]
        form = f"a dictionary of {', '.join(map(str, row))}"
    elif isinstance(row, tuple | list) and len(row) == 2:
        return row[0], row[1]
    else:
        form = f"{len(row)} values" if isinstance(row, tuple | list) else type(row).__name__
    raise ValueError(f"rows of {argument} must be (input, label), got {form} in row {number}; wrap the dataset")


def _of_rows(rows: Sequence[tuple[Any, Any]], argument: str) -> tuple[Tensor, Tensor] | tuple[()]:
    if not rows:
        return ()
    parts = []
    for column, part in enumerate(("inputs", "labels")):
        tensors = [_tensor(row[column], argument) for row in rows]
        first = tensors[0].shape
        if (misshapen := next((i for i, tensor in enumerate(tensors) if tensor.shape != first), None)) is not None:
            raise ValueError(
                f"{part} of {argument} must be of one shape, got {list(first)} in row 0 and "
                f"{list(tensors[misshapen].shape)} in row {misshapen}; pad or crop them"
            )
        parts.append(torch.stack(tensors))
    return parts[0], parts[1]


def _tensor(values: Any, argument: str) -> Tensor:
    try:
        return torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError, LookupError) as error:  # LookupError: a pandas table
        why = " ".join(str(error).split())
        raise ValueError(
            f"{argument} must hold tensors, arrays or numbers, got {type(values).__name__} ({why}); convert them, "
            "images by torchvision.transforms.ToTensor()"
        ) from None


def fitting(inputs: Tensor, labels: Tensor, model: nn.Module, loss: Loss, argument: str) -> tuple[Tensor, Tensor]:
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
        ValueError: for labels that are no class numbers of the model.
    """
    own = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    if inputs.is_floating_point() and inputs.dtype != own:
        inputs = inputs.to(own)
    inner = loss.inner if isinstance(loss, PerExampleMean) else loss
    if inner is not cross_entropy and not isinstance(inner, nn.CrossEntropyLoss | nn.NLLLoss):
        return inputs, labels
    if labels.dim() == 1 and labels.is_floating_point():
        if not bool((labels == labels.round()).all()):
            raise ValueError(
                f"labels of {argument} must be class numbers, got {float(labels[labels != labels.round()][0]):g}"
            )
        labels = labels.long()
    of_one = labels.dim() == 2 and labels.shape[1] > 1 and not labels.is_floating_point()
    if of_one and bool(((labels == 0) | (labels == 1)).all() and (labels.sum(1) == 1).all()):
        labels = labels.argmax(1)
    if labels.dim() != 1 or labels.is_floating_point():
        return inputs, labels
    labels = labels.long()
    ignored = getattr(inner, "ignore_index", -100)
    counted = labels[labels != ignored]
    width = _width(model, inputs)
    if width and len(counted) and not 0 <= int(counted.min()) <= int(counted.max()) < width:
        least, most = int(counted.min()), int(counted.max())
        way_out = "; subtract 1" if (least, most) == (1, width) else ""
        raise ValueError(
            f"labels of {argument} must be class numbers from 0 to {width - 1}, as the model answers, got {least} to "
            f"{most}{way_out}"
        )
    return inputs, labels


def _width(model: nn.Module, inputs: Tensor) -> int:
    """Returns the number of classes of a model's output; 0 if it is unknown."""
    try:
        with torch.no_grad(), torch.random.fork_rng([inputs.device] if inputs.is_cuda else []):
            # Zeros of the shape, in a copy: uses no example's values, and leaves no state in the model.
            outputs = copy.deepcopy(model).eval()(torch.zeros_like(inputs[:1]))
    except Exception:  # whatever a user's model raises; the checks of the run report it
        return 0
    return int(outputs.shape[1]) if isinstance(outputs, Tensor) and outputs.dim() == 2 else 0
