"""Examples as stored in a file, and the checks that all formats share: labels, ids, size, layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy import ndarray

from leakbench.benchmarks.core.data.images import memory_bytes

INPUT_NAMES = ("inputs", "x", "images", "data", "image", "img", "features", "pixel_values", "pixels")
LABEL_NAMES = ("labels", "y", "label", "targets", "target")
ID_NAMES = ("ids", "id")

Axes = Literal["auto", "nchw", "nhwc", "nhw", "plain"]

REGRESSION = (
    "a regression is audited by its losses, without the model: leakbench audit scores FILE.csv, with the columns "
    "member (0 or 1) and loss"
)
"""Suggestion for targets that are not classes."""

_CHANNELS = (1, 3, 4)
_MOST_CLASSES = 2**24


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Options for reading a source; unset options keep the file's layout.

    Attributes:
        axes: of stored inputs. "auto": of four axes, channels are the axis of 1, 3 or 4; three axes of bytes are grey
            images. "nchw", "nhwc", "nhw" declare the layout; "plain" leaves the axes unchanged.
        shape: target shape of each flat input, as (1, 28, 28).
        resize: side of the square that images of a folder or encoded images are resized and cropped to, in pixels.
        channels: 1 or 3, that such images are converted to.
        labels: file of labels (file,label) for a folder of images; None: a sub-folder is a class.
        memory: bytes that a source may take; None: a third of this machine's.
    """

    axes: Axes = "auto"
    shape: tuple[int, ...] | None = None
    resize: int | None = None
    channels: int | None = None
    labels: str | None = None
    memory: int | None = None

    def __post_init__(self) -> None:
        if self.axes not in get_args(Axes):
            raise ValueError(f"axes must be one of {', '.join(get_args(Axes))}, got {self.axes!r}")
        if self.shape is not None and (not self.shape or any(side < 1 for side in self.shape)):
            raise ValueError(f"shape must be whole numbers from 1, as 1,28,28, got {list(self.shape)}")
        if self.resize is not None and not 1 <= self.resize <= 4096:
            raise ValueError(f"resize must be a side in [1, 4096] pixels, got {self.resize}")
        if self.channels not in (None, 1, 3):
            raise ValueError(f"channels must be 1 or 3, got {self.channels}")
        if self.memory is not None and self.memory < 1:
            raise ValueError(f"memory must be at least 1 byte, got {self.memory}")

    @classmethod
    def parse(cls, text: str) -> Reading:
        """Parses "axes=nhwc,shape=1x28x28,resize=32,channels=3,labels=FILE", each once in any order; empty: as stored.

        Raises:
            ValueError: an unknown or repeated key, or an invalid value.
        """
        options: dict[str, Any] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            key, _, value = part.partition("=")
            if key not in ("axes", "shape", "resize", "channels", "labels") or key in options or not value:
                raise ValueError(f"--reading must be axes=..,shape=..,resize=..,channels=..,labels=.., got {part!r}")
            if key in ("axes", "labels"):
                options[key] = value
                continue
            sides = value.split("x")
            if not all(side.isdecimal() for side in sides) or (key != "shape" and len(sides) > 1):
                raise ValueError(
                    f"{key} of --reading must be a whole number, of shape several as 1x28x28, got {value!r}"
                )
            options[key] = tuple(map(int, sides)) if key == "shape" else int(value)
        return cls(**options)

    def refuse_large(self, values: int, size: int, source: str) -> None:
        """Raises before inputs are read that would not fit into memory.

        Args:
            values: numbers of all inputs.
            size: stored bytes of a number.
            source: for the error.
        """
        limit = memory_bytes() // 3 if self.memory is None else self.memory
        needed = 2 * values * (size + 4)  # as stored and as float32, each with a temporary copy
        if needed > limit:
            raise ValueError(
                f"inputs of {source} must fit into {_gigabytes(limit)}, got {values} numbers that take "
                f"{_gigabytes(needed)}; audit a random part of them"
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class RawExamples:
    """Examples of a source, checked, in their stored number type.

    Attributes:
        inputs: [n, *shape], numbers.
        labels: int64 [n], from 0.
        ids: [n], whole numbers or words, distinct; None if the source has no ids.
        class_names: by class number, if the source has names.
        notes: sentences on the changes made.
        columns: names of an input's values, if each has its own column; None if they are unnamed.
    """

    inputs: ndarray
    labels: ndarray
    ids: ndarray | None = None
    class_names: tuple[str, ...] | None = None
    notes: tuple[str, ...] = ()
    columns: tuple[str, ...] | None = None


AS_IS = Reading()
"""Every source as it is stored."""


def named(known: Sequence[str], names: Sequence[str], what: str, source: str) -> str:
    """Finds the known name under which a source has an array or column.

    Raises:
        ValueError: it has none of them, or several.
    """
    matches = [name for name in names if name.lower() in known]
    if len(matches) != 1:
        got = ", ".join(names) or "nothing"
        raise ValueError(f"{source} must have {what} under one of the names {', '.join(known)}, got {got}")
    return matches[0]


def checked(
    source: str,
    reading: Reading,
    *,
    inputs: ndarray,
    labels: ndarray,
    ids: ndarray | None = None,
    class_names: tuple[str, ...] | None = None,
    notes: tuple[str, ...] = (),
) -> RawExamples:
    """Returns examples after all checks of numbers, lengths, labels and ids.

    Raises:
        ValueError: states the first broken rule.
    """
    if inputs.dtype.kind not in "uif":
        raise ValueError(f"inputs of {source} must be numbers, got {_kind(inputs)}")
    if inputs.ndim < 2 or 0 in inputs.shape:
        raise ValueError(f"inputs of {source} must be [examples, ...] and not empty, got shape {list(inputs.shape)}")
    if len(labels) != len(inputs) or (ids is not None and len(ids) != len(inputs)):
        got = f"{len(inputs)} inputs, {len(labels)} labels" + ("" if ids is None else f" and {len(ids)} ids")
        raise ValueError(f"{source} must have one label and at most one id an input, got {got}")
    _refuse_not_finite(source, inputs)
    classes = whole_labels(source, labels)
    placed, how = _placed(source, inputs, reading)
    return RawExamples(
        inputs=placed,
        labels=classes,
        ids=None if ids is None else distinct(source, ids),
        class_names=class_names,
        notes=(*notes, *how),
    )


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


def distinct(source: str, ids: ndarray) -> ndarray:
    """Returns ids unchanged after their checks.

    Raises:
        ValueError: they are neither whole numbers nor words, or repeat.
    """
    if ids.ndim != 1 or ids.dtype.kind not in "uiUS":
        raise ValueError(f"ids of {source} must be whole numbers or words, one an example, got {_kind(ids)}")
    values, counts = np.unique(ids, return_counts=True)
    if len(values) < len(ids):
        raise ValueError(
            f"ids of {source} must be distinct, got {values[counts > 1][0]} twice; {len(ids) - len(values)} repeat"
        )
    return ids


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


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.3g} GB"
