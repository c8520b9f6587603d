"""Files of a run: read and written whole, by digest, and never through a symbolic link.

Records may come from others, and a link among them would read, or overwrite, whatever it points at. What cannot be
written is one error that names the path and says how to go on. Standard library only.
"""

import hashlib
import os
import re
import secrets
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from .validation import RecordError


class WriteError(OSError):
    """A file could not be written, as on a full disk; the message has the path and the way out."""


def digest_of_bytes(content: bytes) -> str:
    """SHA-256, hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def read_bytes(path: Path, what: str = "file") -> bytes:
    """Content of a regular file; symbolic links and pipes are refused.

    Args:
        path: of a regular file; a symbolic link is refused.
        what: noun for the message, as "record".

    Raises:
        RecordError: a link, a pipe (which would block), a folder, or it cannot be read.
    """
    if path.is_symlink():
        raise RecordError(
            f"cannot read {what} {path}: it is a symbolic link, and those are not followed; copy the file"
        )
    try:
        # The check above is for the sentence; this one cannot be raced.
        # O_NONBLOCK, because opening a pipe waits until somebody writes to it.
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
        try:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise RecordError(f"cannot read {what} {path}: it is no regular file; remove it and run again")
            # Closed once, below: a second close may hit a file that another thread opened under the same number.
            with os.fdopen(handle, "rb", closefd=False) as file:
                return file.read()
        finally:
            os.close(handle)
    except OSError as error:
        raise RecordError(f"cannot read {what} {path}: {error.strerror or error}") from error


def write_bytes(path: Path, content: bytes) -> Path:
    """Writes a file whole or not at all; see `write_whole`.

    Args:
        path: its folder is made when absent.
        content: of the file.
    """
    return write_whole(path, lambda file: file.write(content))


def write_whole(path: Path, write: Callable[[BinaryIO], object]) -> Path:
    """Writes a file so that a reader sees the old one or the whole new one, even after a power cut.

    Args:
        path: its folder is made when absent.
        write: puts the content into the open file, which need not be in memory as one.

    Raises:
        WriteError: the disk is full, or whatever else the system says; nothing of it is left behind.
        RecordError: a symbolic link is in its place.
    """
    if path.is_symlink():
        raise RecordError(f"cannot write {path}: a symbolic link is in its place; remove it")
    # Not `tempfile`: its files are private to the user, and results are often shared by a group.
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Exclusive creation follows no link, should somebody have guessed the draft's name.
        with draft.open("xb") as file:
            write(file)
            file.flush()
            # Before the rename, which a file system may write first: a power cut would leave an empty file.
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as error:
        raise WriteError(
            f"cannot write {path}: {error.strerror or error}; what was finished is kept: "
            "make room or mend the folder, and run the same command to go on"
        ) from error
    finally:
        with suppress(OSError):  # on a disk that became read-only, say: the error to show is the one above
            draft.unlink()
    return path


def refuse_links(*folders: Path) -> None:
    """Raises RecordError where a folder of a run is a symbolic link, which would be written through and swept."""
    for folder in folders:
        if folder.is_symlink():
            raise RecordError(f"{folder} is a symbolic link, and those are not followed; name where it leads")


def sweep(folder: Path) -> None:
    """Removes what killed processes left behind: drafts, and arrays whose record was never written.

    Args:
        folder: of a run; nobody else may be writing to it. Files that are not named as ours stay.

    Raises:
        WriteError: the folder cannot be written to.
    """
    drafts = list(folder.glob(".*.tmp"))
    arrays = [path for path in folder.glob("*.parquet") if re.fullmatch(r"[0-9a-f]{16,128}", path.stem)]
    for path in [*drafts, *(path for path in arrays if not path.with_suffix(".json").exists())]:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise WriteError(
                f"cannot remove {path}: {error.strerror or error}; mend the folder, and run the same command to go on"
            ) from error
