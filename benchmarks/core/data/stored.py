"""Examples as stored in a file, options for reading them, and accepted names of arrays and columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from numpy import ndarray

from .images import memory_bytes

INPUT_NAMES = ("inputs", "x", "images", "data", "image", "img", "features", "pixel_values", "pixels")
LABEL_NAMES = ("labels", "y", "label", "targets", "target")
ID_NAMES = ("ids", "id")

Axes = Literal["auto", "nchw", "nhwc", "nhw", "plain"]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Options for reading a source; unset options keep the file's layout.

    Attributes:
        axes: layout of stored inputs. "auto": of four axes, the one of length 1, 3 or 4 holds the channels; three axes
            of bytes are grey images. "nchw", "nhwc", "nhw" declare the layout; "plain" leaves the axes unchanged.
        shape: target shape of each flat input, as (1, 28, 28).
        resize: side of the square that images of a folder or encoded images are resized and cropped to, in pixels.
        channels: 1 or 3, to which such images are converted.
        labels: CSV file with columns file and label, for a folder of images; None: each sub-folder is a class.
        memory: largest memory that a source may take, bytes; None: a third of this machine's.
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
        """Raises ValueError if inputs would not fit into memory, before they are read.

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
class StoredExamples:
    """Examples of a source, in their stored number type.

    Attributes:
        inputs: [n, *shape], numbers.
        labels: [n], or one-hot rows.
        ids: [n]; None if the source has no ids.
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
"""Options that leave every source in its stored layout."""


def named(known: Sequence[str], present: Sequence[str], noun: str, source: str) -> str:
    """Finds the known name under which a source has an array or column.

    Raises:
        ValueError: it has none of them, or several.
    """
    matches = [name for name in present if name.lower() in known]
    if len(matches) != 1:
        names = ", ".join(present) or "nothing"
        raise ValueError(f"{source} must have {noun} under one of the names {', '.join(known)}, got {names}")
    return matches[0]


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.3g} GB"
