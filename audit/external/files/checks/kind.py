"""Kind of a file, by its first bytes; its name may be misleading."""

import re

from .limits import WAY_OUT, FileRefused

SAFETENSORS = "safetensors"
ARCHIVE = "zip archive"

LEGACY = "pickle before PyTorch 1.6"

_LEGACY = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
"""Pickle of PyTorch's magic number, with which its format before 1.6 begins."""
_DOWNLOAD = "download the file itself again"
_FOREIGN = (
    (b"\x89HDF", "an HDF5 file, as Keras writes them", WAY_OUT),
    (b"GGUF", "a GGUF file of a language model", WAY_OUT),
    (b"\x93NUMPY", "a NumPy array", WAY_OUT),
    (b"\x1f\x8b", "compressed by gzip", "unpack it"),
    (b"\xfd7zXZ", "compressed by xz", "unpack it"),
    (b"7z\xbc\xaf", "a 7z archive", "unpack it"),
    (b"Rar!", "a RAR archive", "unpack it"),
    (b"\x7fELF", "a program", "name the file of the weights"),
    (b"MZ", "a program", "name the file of the weights"),
    (b"version https://git-lfs", "the pointer of Git LFS, not the file that it stands for", "run `git lfs pull`"),
)
# Pickle protocol 0 has no magic number: opcodes that begin such files of old `torch.save` or written by hand.
_BARE_PICKLE = re.compile(rb"c[\w.]+\r?\n[\w.]+\r?\n|\([dltc\x80SVIFN]|[IFVS][^\n]*\n[pq.\x94]|[\]}\)][pq.\x94]")


def kind_of(head: bytes, size: int) -> str:
    """Returns `SAFETENSORS`, `ARCHIVE` or `LEGACY`.

    Args:
        head: the first 512 bytes, or all of a shorter file.
        size: bytes of the file.

    Raises:
        FileRefused: any other kind, with its name and a remedy.
    """
    if size == 0:
        raise FileRefused(f"it is empty; {_DOWNLOAD}")
    if head.startswith(b"PK\x03\x04"):
        return ARCHIVE
    if head.startswith(_LEGACY):
        return LEGACY
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if text.startswith((b"<!doctype", b"<html", b"<head", b"<?xml", b"<body")):
        raise FileRefused(f"it is a web page, as a failed download leaves it; {_DOWNLOAD}")
    for magic, description, way_out in _FOREIGN:
        if head.startswith(magic):
            raise FileRefused(f"it is {description}; {way_out}")
    if head[257:262] == b"ustar":
        raise FileRefused(f"it is a tar archive; {WAY_OUT}")
    # The JSON header of safetensors follows 8 bytes of length.
    if head[8:9] == b"{":
        return SAFETENSORS
    if (head[0] == 0x80 and head[1:2] <= b"\x0a") or _BARE_PICKLE.match(head):
        raise FileRefused(f"it is a bare pickle, which can run any code when it is read; {WAY_OUT}")
    if head.startswith(b"PK"):
        raise FileRefused("it is a zip archive that does not begin with a file; it is empty or a part of one")
    if size < 8 or not any(head):
        raise FileRefused(f"it is no file of weights; {_DOWNLOAD}")
    raise FileRefused(f"its first bytes, {head[:8].hex(' ')}, are of no file of weights that is known; {WAY_OUT}")
