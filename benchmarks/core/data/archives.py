"""NumPy archives of inputs and classes, read without loading pickles, which can execute any program."""

import zipfile
import zlib
from collections.abc import Mapping, Sequence, Set
from pathlib import Path

import numpy as np

from .data_paths import refuse_pointer
from .images import reason


def read_archive(file: Path, wanted: Set[str]) -> dict[str, np.ndarray]:
    """Reads the arrays of these names; other arrays appear as empty arrays under their names.

    Raises:
        ValueError: the file is damaged, is no archive, or contains pickled objects.
    """
    refuse_pointer(file)
    try:
        with file.open("rb") as opened:  # opened here, because NumPy leaves a file open that it cannot read
            archive = np.load(opened, allow_pickle=False)
            if isinstance(archive, np.ndarray):
                raise ValueError("one array, not an archive of several")
            # Other arrays keep their names, for the error, and are not read because they may be large.
            return {name: archive[name] if name in wanted else np.empty(0) for name in archive.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(
            f"{file} must be a whole .npz file of plain numeric arrays, got one that cannot be read "
            f"({reason(error)}); write it with numpy.savez"
        ) from error


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


def class_array(file: Path, name: str, array: np.ndarray, examples: int, *, what: str = "image") -> np.ndarray:
    """Classes as int64 [n].

    Args:
        file: path, for errors.
        name: of the array.
        array: as stored.
        examples: number of examples.
        what: noun for an example, in errors.

    Raises:
        ValueError: the classes are no whole numbers, or their number is not that of the examples.
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
