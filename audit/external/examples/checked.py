"""Checks of an owner's examples, which all formats share: numbers, labels, ids, layout."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy import ndarray

from leakbench.benchmarks.core.data.stored import Axes, Reading, StoredExamples

REGRESSION = (
    "a regression is audited by its losses, without the model: leakbench audit scores FILE.csv, with the columns "
    "member (0 or 1) and loss"
)
"""Suggestion for targets that are not classes."""

_CHANNELS = (1, 3, 4)
_MOST_CLASSES = 2**24


def checked(source: str, raw: StoredExamples, reading: Reading) -> StoredExamples:
    """Returns examples after all checks of numbers, lengths, labels and ids; labels become int64 [n], from 0.

    Raises:
        ValueError: states the first broken rule.
    """
    inputs, labels, ids = raw.inputs, raw.labels, raw.ids
    if inputs.dtype.kind not in "uif":
        raise ValueError(f"inputs of {source} must be numbers, got {_kind(inputs)}")
    if inputs.ndim < 2 or 0 in inputs.shape:
        raise ValueError(f"inputs of {source} must be [examples, ...] and not empty, got shape {list(inputs.shape)}")
    if len(labels) != len(inputs) or (ids is not None and len(ids) != len(inputs)):
        counts = f"{len(inputs)} inputs, {len(labels)} labels" + ("" if ids is None else f" and {len(ids)} ids")
        raise ValueError(f"{source} must have one label and at most one id an input, got {counts}")
    _refuse_not_finite(source, inputs)
    classes = whole_labels(source, labels)
    placed, how = _placed(source, inputs, reading)
    if ids is not None:
        _refuse_repeated(source, ids)
    return replace(raw, inputs=placed, labels=classes, notes=(*raw.notes, *how))


def whole_labels(source: str, labels: ndarray) -> ndarray:
    """Converts labels, whole numbers of any type or one-hot rows, to int64 [n].

    Raises:
        ValueError: they are words, fractions, negative or too large to be classes.
    """
    if labels.dtype.kind not in "uifb":
        way_out = "number the classes from 0 in the order of the model's outputs"
        raise ValueError(f"labels of {source} must be whole numbers, got {_kind(labels)}; {way_out}")
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    elif labels.ndim == 2 and ((labels == 0) | (labels == 1)).all() and (labels.sum(axis=1) == 1).all():
        labels = labels.argmax(axis=1)  # one-hot
    if labels.ndim != 1:
        way_out = "; give the likeliest class of each" if labels.ndim == 2 and labels.dtype.kind == "f" else ""
        raise ValueError(f"labels of {source} must be one class an example, got shape {list(labels.shape)}{way_out}")
    if labels.dtype.kind == "f" and (cut := ~np.isfinite(labels) | (labels != np.floor(labels))).any():
        raise ValueError(
            f"labels of {source} must be classes, whole numbers from 0, got {labels[cut][0]}; {REGRESSION}"
        )
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= _MOST_CLASSES:
        way_out = "; write 0 for -1" if low == -1 and set(np.unique(labels)) <= {-1, 1} else ""
        raise ValueError(f"labels of {source} must be classes from 0, got {low if low < 0 else high}{way_out}")
    return labels.astype(np.int64)


def _refuse_repeated(source: str, ids: ndarray) -> None:
    if ids.ndim != 1 or ids.dtype.kind not in "uiUS":
        raise ValueError(f"ids of {source} must be whole numbers or words, one an example, got {_kind(ids)}")
    values, counts = np.unique(ids, return_counts=True)
    if len(values) < len(ids):
        raise ValueError(
            f"ids of {source} must be distinct, got {values[counts > 1][0]} twice; {len(ids) - len(values)} repeat"
        )


def _refuse_not_finite(source: str, inputs: ndarray) -> None:
    if inputs.dtype.kind != "f":
        return
    # In blocks: a mask of all inputs would take a quarter of their memory.
    blocks = np.array_split(inputs, min(len(inputs), 1 + inputs.size // 2**24))
    bad = np.concatenate([~np.isfinite(block.reshape(len(block), -1)).all(axis=1) for block in blocks])
    if bad.any():
        raise ValueError(
            f"inputs of {source} must be finite, got NaN or infinity in {int(bad.sum())} of {len(inputs)} examples, "
            f"first in number {int(bad.argmax())}"
        )


def _placed(source: str, inputs: ndarray, reading: Reading) -> tuple[ndarray, tuple[str, ...]]:
    """Returns inputs with channels first, and a sentence on any change."""
    if reading.shape is not None:
        if inputs[0].size != int(np.prod(reading.shape)):
            raise ValueError(
                f"shape of {source} must have as many values as an input, {inputs[0].size}, got {list(reading.shape)}"
            )
        return inputs.reshape(len(inputs), *reading.shape), ()
    axes, shape = reading.axes, list(inputs.shape)
    if axes == "auto":
        axes = _axes_of(source, inputs)
    if axes != "plain" and inputs.ndim != len(axes):
        raise ValueError(f"inputs of {source} must have {len(axes)} axes to be {axes}, got shape {shape}")
    if axes == "nhwc":
        note = (
            f"inputs of {source} are {shape}: channels are taken to be last, and were moved (else --reading axes=nchw)"
        )
        return np.moveaxis(inputs, -1, 1), (note,)
    if axes == "nhw":
        return inputs[:, None], (
            f"inputs of {source} are {shape}: taken as images of one channel (else --reading axes=plain)",
        )
    return inputs, ()


def _axes_of(source: str, inputs: ndarray) -> Axes:
    if inputs.ndim == 3 and inputs.dtype == np.uint8:
        return "nhw"
    if inputs.ndim != 4:
        return "plain"
    sides = inputs.shape[1], inputs.shape[-1]
    # Four channels are rarer than images four pixels wide.
    first, last = (side in _CHANNELS[:2] for side in sides)
    if not first and not last:
        first, last = (side in _CHANNELS for side in sides)
    if first and last:
        # Both readings are guesses, and a wrong one makes the model look like chance.
        raise ValueError(
            f"inputs of {source} must have 1, 3 or 4 channels either second or last, got shape {list(inputs.shape)}; "
            "say which by --reading axes=nchw or axes=nhwc"
        )
    return "nhwc" if last else "nchw"


def _kind(array: ndarray) -> str:
    kinds = {"U": "words", "S": "words", "O": "objects", "b": "truth values", "c": "complex numbers"}
    return kinds.get(array.dtype.kind, str(array.dtype)) + f" of shape {list(array.shape)}"
