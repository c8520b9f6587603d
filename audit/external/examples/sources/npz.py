"""NumPy archives (.npz) of plain numbers: reads headers first, then exactly the declared bytes, and never a pickle."""

from __future__ import annotations

import math
import zipfile
import zlib
from typing import IO

import numpy as np
from numpy import ndarray

from leakbench.benchmarks.core.data.images import reason

from .raw import ID_NAMES, INPUT_NAMES, LABEL_NAMES, RawExamples, Reading, checked, named

_MOST_MEMBERS = 1000
_AT_ONCE = 2**24
_SMALL = 256
"""Most bytes of a label or an id, enough for 64 letters."""


def read_npz(source: str, file: IO[bytes], reading: Reading) -> RawExamples:
    """Reads arrays `inputs`, `labels` and optionally `ids`, or the alternative names that the error lists.

    Raises:
        ValueError: a damaged archive, pickled objects, missing arrays, or more than fits into memory.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            if len(entries) > _MOST_MEMBERS:
                raise ValueError(f"{source} must have at most {_MOST_MEMBERS} arrays, got {len(entries)}")
            names = [entry.filename.removesuffix(".npy") for entry in entries]
            if len(set(names)) < len(names):
                raise ValueError(f"{source} must have each array once, got two of one name")
            of = dict(zip(names, entries, strict=True))
            x = named(INPUT_NAMES, names, "inputs", source)
            y = named(LABEL_NAMES, names, "labels", source)
            ids = next((name for name in names if name.lower() in ID_NAMES), None)
            inputs = _array(source, archive, x, of[x], reading, None)
            return checked(
                source,
                reading,
                inputs=inputs,
                labels=_array(source, archive, y, of[y], reading, len(inputs)),
                ids=None if ids is None else _array(source, archive, ids, of[ids], reading, len(inputs)),
            )
    except (OSError, EOFError, RuntimeError, NotImplementedError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(
            f"{source} must be a whole .npz file of plain arrays, got one that cannot be read ({reason(error)}); write "
            "it with numpy.savez"
        ) from error


def _array(
    source: str, archive: zipfile.ZipFile, name: str, entry: zipfile.ZipInfo, reading: Reading, examples: int | None
) -> ndarray:
    """Reads an array, of exactly the size that its header declares.

    Args:
        source: for errors.
        archive: open.
        name: of the array.
        entry: of the archive.
        reading: its memory limit.
        examples: required number of entries of a few bytes each; None for the array of inputs.
    """
    with archive.open(entry) as opened:
        try:
            version = np.lib.format.read_magic(opened)
            header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
            shape, fortran, dtype = header(opened)
        except (ValueError, KeyError) as error:
            raise ValueError(
                f"{name} of {source} must be a NumPy array, got another header ({reason(error)})"
            ) from error
        if dtype.hasobject:
            raise ValueError(
                f"{name} of {source} must be plain numbers, got pickled Python objects, which can run any program when "
                "they are read; save it as an array of numbers, rows of several lengths padded or cropped to one"
            )
        if dtype.names is not None or dtype.subdtype is not None or dtype.itemsize == 0:
            raise ValueError(f"{name} of {source} must be plain numbers, got {dtype}")
        if any(side < 0 for side in shape):
            raise ValueError(f"{name} of {source} must have a shape of whole numbers from 0, got {list(shape)}")
        values = math.prod(shape)
        if not shape:
            raise ValueError(f"{name} of {source} must be an array [examples, ...], got one {dtype}")
        if examples is None:
            reading.refuse_large(values, dtype.itemsize, source)
        elif shape[0] != examples or values * dtype.itemsize > examples * _SMALL:
            raise ValueError(
                f"{name} of {source} must have one small entry for each of {examples} inputs, got {dtype} of shape "
                f"{list(shape)}"
            )
        content, offset = np.empty(values * dtype.itemsize, dtype=np.uint8), 0
        while part := opened.read(min(_AT_ONCE, len(content) - offset)):
            content[offset : offset + len(part)] = np.frombuffer(part, dtype=np.uint8)
            offset += len(part)
        if offset < len(content) or opened.read(1):
            raise ValueError(f"{name} of {source} must be as long as its header says, {len(content)} bytes")
    array = content.view(dtype)
    # PyTorch needs the machine's byte order.
    return array.reshape(shape, order="F" if fortran else "C").astype(dtype.newbyteorder("="), copy=False)
