"""One file of weights, from its first byte to its last: which kind, which tensors, which hash."""

import hashlib
from dataclasses import dataclass, field
from typing import BinaryIO

from .kind import SAFETENSORS, kind_of
from .limits import MAX_BYTES, WAY_OUT, FileRefused
from .safetensors_header import read_header
from .stored import StoredTensor


@dataclass(frozen=True)
class Checked:
    """What a file was found to be.

    Attributes:
        kind: "safetensors".
        sha256: of all bytes, hexadecimal.
        bytes: how many there are.
        tensors: by the names that the file gives them.
    """

    kind: str
    sha256: str
    bytes: int
    tensors: dict[str, StoredTensor] = field(repr=False)


def check(file: BinaryIO) -> Checked:
    """Looks through an open file of weights.

    Args:
        file: seekable; left at its end.

    Raises:
        FileRefused: with the rule that it breaks, in one clause; whoever knows its path puts it before.
    """
    size = file.seek(0, 2)
    if size > MAX_BYTES:
        raise FileRefused(f"it may have at most {MAX_BYTES} bytes, got {size}")
    file.seek(0)
    kind = kind_of(file.read(512), size)
    if kind != SAFETENSORS:
        raise FileRefused(f"it is a {kind}; {WAY_OUT}")
    tensors = read_header(file, size)
    return Checked(kind, _sha256(file), size, tensors)


def _sha256(file: BinaryIO) -> str:
    digest = hashlib.sha256()
    file.seek(0)
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()
