"""NumPy archives of inputs and classes, read without ever loading a pickle, which can run any program."""

import zipfile
import zlib
from collections.abc import Mapping, Sequence, Set
from pathlib import Path

import numpy as np

from .data_paths import refuse_pointer
from .images import reason


def read_archive(file: Path, wanted: Set[str]) -> dict[str, np.ndarray]:
    """The arrays of these names; of others the names alone, each with an empty array.

    Raises:
        ValueError: if the file is damaged, no archive, or has pickled objects among them.
    """
    refuse_pointer(file)
    try:
        with file.open("rb") as opened:  # by us, because NumPy does not close what it cannot read
            archive = np.load(opened, allow_pickle=False)
            if isinstance(archive, np.ndarray):
                raise ValueError("one array, not an archive of several")
            # Other arrays keep their names, for the error, and are not read: they may be large.
            return {name: archive[name] if name in wanted else np.empty(0) for name in archive.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(
            f"{file} must be a whole .npz file of plain numeric arrays, got one that cannot be read "
            f"({reason(error)}); write it with numpy.savez"
        ) from error


def array_pair(file: Path, arrays: Mapping[str, np.ndarray], names: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """The first pair of names, of inputs and classes, that an archive has both of.

    Raises:
        ValueError: if it has none.
    """
    for x, y in names:
        if x in arrays and y in arrays:
            return x, y
    known = ", ".join(f"{x} and {y}" for x, y in names)
    raise ValueError(f"{file} must have arrays {known} (one pair of them), got {', '.join(arrays) or 'none'}")


def class_array(file: Path, name: str, array: np.ndarray, examples: int, *, what: str = "image") -> np.ndarray:
    """Classes as [n], whole numbers of 64 bits.

    Args:
        file: for errors.
        name: of the array.
        array: as it was stored.
        examples: how many there are.
        what: an example is called in errors.

    Raises:
        ValueError: if they are no whole numbers, or not one an example.
    """
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(
            f"{name} of {file} must be one whole number an {what}, got {array.dtype} of shape {list(array.shape)}"
        )
    if len(array) != examples:
        raise ValueError(f"{name} of {file} must have one class an {what}, got {len(array)} for {examples} {what}s")
    return array.astype(np.int64)
