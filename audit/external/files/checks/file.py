"""Check of a weights file from its first byte to its last: kind, tensors, hash."""

import hashlib
from dataclasses import dataclass, field
from io import BufferedIOBase

from .archive import content, read_archive
from .kind import LEGACY, SAFETENSORS, kind_of
from .legacy import read_legacy
from .limits import MAX_BYTES, FileRefused
from .pickled import MAX_PICKLE_BYTES, tensors_in
from .safetensors_header import read_header
from .state import find_state
from .stored import StoredTensor

PICKLE_ARCHIVE = "torch.save"
"""Kind of an archive of pickled tensors."""
PICKLE_LEGACY = "torch.save before 1.6"
"""Kind of pickled tensors without an archive."""


@dataclass(frozen=True)
class Checked:
    """Result of checking a file.

    Attributes:
        kind: "safetensors", "torch.save" or "torch.save before 1.6".
        sha256: of all bytes, hexadecimal.
        bytes: size of the file.
        tensors: by their names in the file.
        path: keys of the dictionaries that lead to them, from the outermost.
        notes: a sentence on each thing that was unwrapped or left out.
    """

    kind: str
    sha256: str
    bytes: int
    tensors: dict[str, StoredTensor] = field(repr=False)
    path: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def check(file: BufferedIOBase) -> Checked:
    """Checks an open file of weights.

    Args:
        file: seekable; left at its end.

    Raises:
        FileRefused: names the broken rule, in a clause that the caller puts after the path.
    """
    size = file.seek(0, 2)
    if size > MAX_BYTES:
        raise FileRefused(f"it may have at most {MAX_BYTES} bytes, got {size}")
    file.seek(0)
    kind = kind_of(file.read(512), size)
    if kind == SAFETENSORS:
        tensors = read_header(file, size)
        return Checked(kind, _sha256(file), size, tensors)
    if kind == LEGACY:
        path, tensors, notes = find_state(read_legacy(file, size))
        return Checked(PICKLE_LEGACY, _sha256(file), size, tensors, path, notes)
    entries = read_archive(file, size)
    storages = {name.removeprefix("data/"): entry.bytes for name, entry in entries.items() if name.startswith("data/")}
    saved = tensors_in(content(file, entries["data.pkl"], at_most=MAX_PICKLE_BYTES), storages, size)
    path, tensors, notes = find_state(saved)
    return Checked(PICKLE_ARCHIVE, _sha256(file), size, tensors, path, notes)


def _sha256(file: BufferedIOBase) -> str:
    digest = hashlib.sha256()
    file.seek(0)
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()
