"""Atomic reading and writing of a run's files, their digests, and the refusal of symbolic links.

Records may come from third parties: a symbolic link among them could make the program read or overwrite any file. A
failed write is an error that names the path and a way out. Standard library only.
"""

import errno
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
    """SHA-256 in hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def read_bytes(path: Path, noun: str = "file") -> bytes:
    """Reads a regular file; symbolic links and pipes are refused.

    Args:
        path: of a regular file; a symbolic link is refused.
        noun: noun for the message, as "record".

    Raises:
        RecordError: the path is a link, a pipe (which would block) or a folder, or it cannot be read.
    """
    if path.is_symlink():
        raise RecordError(
            f"cannot read {noun} {path}: it is a symbolic link, and those are not followed; copy the file"
        )
    try:
        # The check above gives the clearer message; O_NOFOLLOW also holds if a link is put there in between.
        # O_NONBLOCK, because opening a pipe blocks until it has a writer.
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
        try:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise RecordError(f"cannot read {noun} {path}: it is no regular file; remove it and run again")
            # Closed once, below: a second close may hit a file that another thread opened under the same number.
            with os.fdopen(handle, "rb", closefd=False) as file:
                return file.read()
        finally:
            os.close(handle)
    except OSError as error:
        raise RecordError(f"cannot read {noun} {path}: {error.strerror or error}") from error


def refuse_special(path: Path) -> None:
    """Refuses a pipe, a socket or a device, whose reading waits for a writer or has no end; links are followed.

    A pipe that a shell opens for a command (`<(...)`, `/dev/stdin`) has a writer and is read.

    Raises:
        OSError: the path is none of regular file and folder.
    """
    opened_by_the_shell = path.is_fifo() and path.is_relative_to("/dev")
    if path.exists() and not (path.is_file() or path.is_dir() or opened_by_the_shell):
        raise OSError(errno.EINVAL, "it is no regular file; copy its content into one", str(path))


def write_bytes(path: Path, content: bytes) -> Path:
    """Writes a file whole or not at all; see `write_whole`.

    Args:
        path: of the file; its folder is created if absent.
        content: of the file.
    """
    return write_whole(path, lambda file: file.write(content))


def write_whole(path: Path, write: Callable[[BinaryIO], object]) -> Path:
    """Writes a file atomically: a reader sees the old file or the whole new file, even after a power cut.

    Args:
        path: of the file; its folder is created if absent.
        write: writes the content into the open file, so that it need not be in memory at once.

    Raises:
        WriteError: the disk is full, or the system reports another error; no partial file is left.
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
            # A file system may write the rename first, and a power cut would then leave an empty file.
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as error:
        raise WriteError(
            f"cannot write {path}: {error.strerror or error}; what was finished is kept: "
            "make room or mend the folder, and run the same command to go on"
        ) from error
    finally:
        with suppress(OSError):  # may fail too, as on a disk that became read-only; the error above is the one to show
            draft.unlink()
    return path


def refuse_links(*folders: Path) -> None:
    """Raises RecordError if a folder of a run is a symbolic link, through which writes and deletions would pass."""
    for folder in folders:
        if folder.is_symlink():
            raise RecordError(f"{folder} is a symbolic link, and those are not followed; name where it leads")


def sweep(folder: Path) -> None:
    """Removes leftovers of killed processes: drafts, and arrays whose record was never written.

    Args:
        folder: of a run, to which no other process writes. Files with other names stay.

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
