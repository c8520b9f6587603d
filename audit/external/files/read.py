"""Reading of a weights file: checked, copied to a private folder, checked again, and loaded.

The copy is loaded, and the copy is checked: a file that is exchanged between the checks only causes an error. The first
check avoids copying files that are refused.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from dataclasses import dataclass, field, replace
from io import BufferedIOBase
from pathlib import Path
from typing import Any

from .checks import Checked, FileRefused, check
from .checks.file import PICKLE_ARCHIVE, PICKLE_LEGACY
from .checks.kind import SAFETENSORS
from .checks.limits import WAY_OUT, shown
from .restricted import converted
from .unwrap import without_wrappers

_PICKLES = (PICKLE_ARCHIVE, PICKLE_LEGACY)


@dataclass(frozen=True)
class StateFile:
    """Tensors of a weights file.

    Attributes:
        tensors: by name, on the CPU, all finite; owned by the caller. (Any: PyTorch is imported lazily, so that the
            checks run without it.)
        kind: "safetensors", "torch.save" or "torch.save before 1.6".
        sha256: of the file, hexadecimal.
        bytes: of the file.
        notes: a sentence on each thing that was unwrapped or left out.
    """

    tensors: dict[str, Any] = field(repr=False)
    kind: str
    sha256: str
    bytes: int
    notes: tuple[str, ...] = ()


def read_tensors(path: str | Path, *, allow_pickle_tensors: bool = False) -> StateFile:
    """Reads a file of weights; executes nothing in it.

    Args:
        path: of safetensors, or of a `torch.save` file, old or new; symbolic links are followed.
        allow_pickle_tensors: whether a `torch.save` file, which is a pickle, may be read by PyTorch's restricted loader
            in a process of its own, after its instructions were checked. Never tried otherwise.

    Raises:
        FileRefused: a file that is not read, in one sentence.
    """
    state = read_as_stored(path, allow_pickle_tensors=allow_pickle_tensors)
    tensors, notes = without_wrappers(state.tensors)
    return replace(state, tensors=tensors, notes=(*state.notes, *notes))


def read_as_stored(path: str | Path, *, allow_pickle_tensors: bool = False) -> StateFile:
    """Reads a file of weights like `read_tensors`, but keeps the prefixes of wrappers in its names."""
    path = Path(path)
    try:
        with _opened(path) as file, tempfile.TemporaryDirectory(prefix="leakbench-") as folder:
            checked = check(file)
            if checked.kind in _PICKLES and not allow_pickle_tensors:
                raise FileRefused(
                    "it is a pickle, which is read only where you allow it, by allow_pickle_tensors=True "
                    f"(--allow-pickle-tensors), or {WAY_OUT}"
                )
            # The copy has no extension, because PyTorch's loader chooses formats by extension.
            copy = Path(folder) / "copy"
            with copy.open("xb") as target:
                file.seek(0)
                shutil.copyfileobj(file, target, 1 << 20)
            with copy.open("rb") as again:
                if check(again) != checked:
                    raise FileRefused("it changed while it was read; wait until whoever writes it is done")
            tensors = (_read_pickle if checked.kind in _PICKLES else _read_safetensors)(copy, checked)
    except FileRefused as error:
        raise FileRefused(f"cannot read {path}: {error}") from None
    except (OSError, ValueError) as error:  # an impossible path is a ValueError
        raise FileRefused(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    return StateFile(tensors, checked.kind, checked.sha256, checked.bytes, checked.notes)


def _opened(path: Path) -> BufferedIOBase:
    if "\0" in str(path):  # Python's message differs between versions
        raise FileRefused("its path has a null byte, which no file's path can have")
    # O_NONBLOCK, because opening a pipe would wait for a writer.
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise FileRefused("it is no regular file; name the file of the weights")
    return os.fdopen(handle, "rb")


def _read_pickle(path: Path, checked: Checked) -> dict[str, Any]:
    """Returns tensors of a checked archive, by way of safetensors that a process of its own writes."""
    safe = path.with_name("converted")
    converted(path, safe, checked)
    with safe.open("rb") as file:
        again = check(file)
    if again.kind != SAFETENSORS or again.tensors != checked.tensors:
        raise FileRefused("PyTorch's restricted loader finds other tensors in it than its pickle describes")
    tensors = _read_safetensors(safe, again)
    return {name: tensors[name] for name in checked.tensors}


def _read_safetensors(path: Path, checked: Checked) -> dict[str, Any]:
    """Returns tensors of a checked file; its reader must find the same tensors as the check."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(path)
    except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise FileRefused(f"the reader of safetensors refuses it: {shown(str(error))}") from None
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if shapes != {name: tensor.shape for name, tensor in checked.tensors.items()}:
        raise FileRefused("the reader of safetensors finds other tensors in it than its header has")
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            broken = int((~tensor.isfinite()).sum())
            raise FileRefused(
                f"{broken} of {tensor.numel()} entries of {shown(name)} are NaN or infinite: its training diverged, or "
                "the file is damaged"
            )
    # Copies, since the mapped file is about to be deleted.
    return {name: tensors[name].clone() for name in checked.tensors}
