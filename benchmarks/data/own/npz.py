"""Arrays in a NumPy archive: images and classes, with or without a test part.

Arrays are called `x_train`, `y_train`, `x_test`, `y_test`, or `x` and `y`, or `images` and `labels`. Images are bytes,
or floats in [0, 1]: [n, height, width], [n, height, width, channels] or [n, channels, height, width]. The header of an
array is read first, then exactly the bytes that it declares. Pickled objects are refused and never loaded, because a
pickle can run any program.
"""

import math
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import IO

import numpy as np
import torch

from ...core.data.data_paths import existing, refuse_pointer, stamp
from ...core.data.dealing import LabelledImages
from ...core.data.images import reason, refuse_beyond_memory, refuse_too_large
from ...core.data.sizes import DEFAULT_SIZES, Sizes
from ...core.data.splits import Splits
from ...core.data.stored import ID_NAMES, INPUT_NAMES, LABEL_NAMES, Reading, StoredExamples, named

NAMES = (("x_train", "y_train"), ("x", "y"), ("images", "labels"), ("train_images", "train_labels"))
TEST_NAMES = (("x_test", "y_test"), ("test_images", "test_labels"))
STARTS = (b"PK\x03\x04", b"PK\x05\x06")
"""First bytes of an archive."""

_DAMAGE = (
    *(OSError, EOFError, zipfile.BadZipFile, zlib.error),
    *(RuntimeError, NotImplementedError),  # zipfile's, of encryption and of unknown compression
    MemoryError,  # a header may declare any size
)
_MOST_MEMBERS = 1000
_AT_ONCE = 2**24
_SMALL = 256
"""Largest size of a label or an id, bytes; NumPy stores 64 letters in as many."""


def npz(path: str, *, address: str, seed: int = 0, sizes: Sizes = DEFAULT_SIZES) -> Splits:
    """Your NumPy archive: arrays of images and classes, x and y, or x_train, y_train, x_test and y_test.

    Args:
        path: of the file.
        address: as the user wrote it, for errors.
        seed: decides which examples are members.
        sizes: of the pools; 40 %, 40 % and 20 % of the training part by default.

    Raises:
        ValueError: the file is damaged, or its arrays are not images and classes.
    """
    file = existing(path, noun="npz", file=True)
    dataset = _decoded(file, address, stamp([file]))
    about = f"NumPy arrays of one's own, {len(dataset.labels)} images"
    return dataset.deal(name=f"npz:{file.stem}", about=about, seed=seed, sizes=sizes)


@lru_cache(maxsize=2)
def _decoded(file: Path, address: str, state: int) -> LabelledImages:
    arrays = read_archive(file, {name for pair in (*NAMES, *TEST_NAMES) for name in pair}, address=address)
    x_name, y_name = array_pair(file, arrays, NAMES)
    parts = [(x_name, y_name)]
    if any(x in arrays for x, _ in TEST_NAMES):
        parts.append(array_pair(file, arrays, TEST_NAMES))
    images, labels = [], []
    for x_name, y_name in parts:
        images.append(_images(file, x_name, arrays[x_name]))
        labels.append(class_array(file, y_name, arrays[y_name], len(images[-1])))
    if any(part.shape[1:] != images[0].shape[1:] or part.dtype != images[0].dtype for part in images):
        shapes = " and ".join(
            f"{name} {part.dtype}{list(part.shape)}" for (name, _), part in zip(parts, images, strict=True)
        )
        raise ValueError(f"images of {file} must be alike in training and test, got {shapes}")
    total = sum(len(part) for part in images)
    refuse_too_large(total, total, int(np.prod(images[0].shape[1:])), address=address, resizable=False)
    return LabelledImages.renumbered(
        torch.from_numpy(np.concatenate(images)),
        torch.from_numpy(np.concatenate(labels)),
        train=len(images[0]),
        noun=address,
    )


def _images(file: Path, name: str, array: np.ndarray) -> np.ndarray:
    """Images as [n, channels, height, width], bytes or float32."""
    first, last = array.shape[1:2], array.shape[-1:]
    if array.ndim == 3:
        array = array[:, None]
    # Both or neither may be channels: [n, 3, 5, 3] is refused, because either reading is a guess.
    elif array.ndim != 4 or (first[0] in (1, 3)) == (last[0] in (1, 3)):
        raise ValueError(
            f"{name} of {file} must be [n, height, width], or have its 1 or 3 channels either second or last, got "
            f"shape {list(array.shape)}"
        )
    elif last[0] in (1, 3):
        array = array.transpose(0, 3, 1, 2)
    if 0 in array.shape:
        raise ValueError(f"{name} of {file} must hold images, got shape {list(array.shape)}")
    if array.dtype == np.uint8:
        return np.ascontiguousarray(array)
    if not np.issubdtype(array.dtype, np.floating):
        raise ValueError(f"{name} of {file} must be bytes (uint8) or floats in [0, 1], got {array.dtype}")
    low, high = float(array.min()), float(array.max())
    if not (low >= 0 and high <= 1):  # also catches NaN
        raise ValueError(
            f"{name} of {file} must be in [0, 1] where it is floats, got values from {low:g} to {high:g}; scale them, "
            "or store bytes"
        )
    return np.ascontiguousarray(array, dtype=np.float32)


def read_examples(source: str, file: IO[bytes], reading: Reading) -> StoredExamples:
    """Reads arrays `inputs`, `labels` and optionally `ids`, or the alternative names that the error lists.

    Raises:
        ValueError: a damaged archive, pickled objects, missing arrays, or more than fits into memory.
    """
    with _opened(source, file) as (archive, entries):
        x = named(INPUT_NAMES, list(entries), "inputs", source)
        y = named(LABEL_NAMES, list(entries), "labels", source)
        ids = next((name for name in entries if name.lower() in ID_NAMES), None)
        inputs = _array(source, archive, x, entries[x], reading)
        labels = _array(source, archive, y, entries[y], reading, len(inputs))
        names = None if ids is None else _array(source, archive, ids, entries[ids], reading, len(inputs))
    return StoredExamples(inputs=inputs, labels=labels, ids=names)


def read_archive(file: Path, names: Set[str], *, address: str) -> dict[str, np.ndarray]:
    """Reads the arrays of these names; other arrays appear as empty arrays under their names.

    Raises:
        ValueError: the file is damaged, is no archive, contains pickled objects, or exceeds the memory.
    """
    refuse_pointer(file)
    with file.open("rb") as opened, _opened(str(file), opened, ValueError) as (_, entries):
        needed = 2 * sum(entry.file_size for name, entry in entries.items() if name in names)  # stored, and dealt
        content = f"arrays {', '.join(name for name in entries if name in names)}"
    # Outside, because the file is whole; before any array is read, because a few bytes unpack to any number of zeros.
    refuse_beyond_memory(needed, content, "fewer or smaller examples", address=address)
    with file.open("rb") as opened, _opened(str(file), opened, ValueError) as (archive, entries):
        # Other arrays keep their names, for the error, and are not read because they may be large.
        return {
            name: _array(str(file), archive, name, entry) if name in names else np.empty(0)
            for name, entry in entries.items()
        }


@contextmanager
def _opened(
    source: str, file: IO[bytes], *errors: type[Exception]
) -> Iterator[tuple[zipfile.ZipFile, dict[str, zipfile.ZipInfo]]]:
    """Opens an archive, with its arrays by name; damage and the given errors become one sentence."""
    try:
        if file.read(6) == np.lib.format.MAGIC_PREFIX:
            raise ValueError("one array, not an archive of several")
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            if len(entries) > _MOST_MEMBERS:
                raise ValueError(f"{source} must have at most {_MOST_MEMBERS} arrays, got {len(entries)}")
            by_name = {entry.filename.removesuffix(".npy"): entry for entry in entries}
            if len(by_name) < len(entries):
                raise ValueError(f"{source} must have each array once, got two of one name")
            yield archive, by_name
    except (*_DAMAGE, *errors) as error:
        raise ValueError(
            f"{source} must be a whole .npz file of plain numeric arrays, got one that cannot be read "
            f"({reason(error)}); write it with numpy.savez"
        ) from error


def _array(
    source: str,
    archive: zipfile.ZipFile,
    name: str,
    entry: zipfile.ZipInfo,
    reading: Reading | None = None,
    examples: int | None = None,
) -> np.ndarray:
    """Reads an array, of exactly the size that its header declares.

    Args:
        source: for errors.
        archive: open.
        name: of the array.
        entry: of the archive.
        reading: its memory limit; None without one, for an array of any shape.
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
        if reading is not None and not shape:
            raise ValueError(f"{name} of {source} must be an array [examples, ...], got one {dtype}")
        if reading is not None and examples is None:
            reading.refuse_large(values, dtype.itemsize, source)
        if examples is not None and (shape[0] != examples or values * dtype.itemsize > examples * _SMALL):
            raise ValueError(
                f"{name} of {source} must have one small entry for each of {examples} inputs, got {dtype} of shape "
                f"{list(shape)}"
            )
        # Before memory is allocated: a header may declare any size.
        if values * dtype.itemsize > entry.file_size:
            raise ValueError(
                f"{name} of {source} must be as long as its header says, {values * dtype.itemsize} bytes, got at most "
                f"{entry.file_size}"
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


def array_pair(file: Path, arrays: Mapping[str, np.ndarray], names: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """Returns the first pair of names, of inputs and classes, whose arrays are both in the archive.

    Raises:
        ValueError: the archive has no such pair.
    """
    for x, y in names:
        if x in arrays and y in arrays:
            return x, y
    known = ", ".join(f"{x} and {y}" for x, y in names)
    raise ValueError(f"{file} must have arrays {known} (one pair of them), got {', '.join(arrays) or 'none'}")


def class_array(file: Path, name: str, array: np.ndarray, examples: int, *, noun: str = "image") -> np.ndarray:
    """Classes as int64 [n].

    Args:
        file: path, for errors.
        name: of the array.
        array: as stored.
        examples: number of examples.
        noun: noun for an example, in errors.

    Raises:
        ValueError: the classes are no whole numbers, or their number is not that of the examples.
    """
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(
            f"{name} of {file} must be one whole number an {noun}, got {array.dtype} of shape {list(array.shape)}"
        )
    if len(array) != examples:
        raise ValueError(f"{name} of {file} must have one class an {noun}, got {len(array)} for {examples} {noun}s")
    return array.astype(np.int64)
