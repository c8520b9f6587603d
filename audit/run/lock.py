"""One run at a time in a folder: a lock that the operating system takes back when its holder dies, however it dies."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from leaderboard.records.files import WriteError

try:
    import fcntl
except ImportError:  # a system without it has no such lock, and two runs there are the user's affair
    fcntl = None

NAME = ".lock"


class BusyError(RuntimeError):
    """Another run writes into the folder."""


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Holds the folder of a run.

    Args:
        directory: made when absent.

    Raises:
        BusyError: another process holds it, which is named.
        NotADirectoryError: something else than a folder is there.
        WriteError: the folder cannot be written to.
    """
    if directory.exists() and not directory.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(directory))
    try:
        directory.mkdir(parents=True, exist_ok=True)
        handle = os.open(directory / NAME, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
    except OSError as error:
        raise WriteError(f"cannot write to {directory}: {error.strerror or error}; name another --out") from error
    try:
        if fcntl is not None:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                holder = os.read(handle, 100).decode(errors="replace").strip() or "a process"
                raise BusyError(
                    f"another run writes into {directory} ({holder}); wait for it, or name another --out"
                ) from None
        host = os.uname().nodename if hasattr(os, "uname") else "this host"
        try:
            os.ftruncate(handle, 0)
            os.write(handle, f"process {os.getpid()} on {host}".encode())
        except OSError as error:
            raise WriteError(
                f"cannot write {directory / NAME}: {error.strerror or error}; make room, or name another --out"
            ) from error
        yield
    finally:
        os.close(handle)  # and with it the lock; the file stays, because who removes it may remove another's
