"""Lock of a results folder for one run at a time; the operating system releases it when its holder dies."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from leakbench.leaderboard.records.files import WriteError

try:
    import fcntl
except ImportError:  # Windows has no such lock: concurrent runs in one folder are not prevented
    fcntl = None

NAME = ".lock"


class BusyError(RuntimeError):
    """Another run writes into the folder."""


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Holds the lock of a results folder, and writes the holder's process into it.

    Args:
        directory: created if absent.

    Raises:
        BusyError: another process holds it, which is named.
        NotADirectoryError: the path exists but is not a folder.
        WriteError: the folder is not writable.
    """
    if directory.exists() and not directory.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(directory))
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # Opened without truncating: until the lock is held, the text in the file names its holder. 0o666, less the
        # umask: all users with write access to a shared folder may lock it.
        handle = os.open(directory / NAME, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
    except OSError as error:
        raise WriteError(f"cannot write to {directory}: {error.strerror or error}; name another --out") from error
    try:
        if fcntl is not None:
            try:
                # flock, not the existence of a file: nothing has to be cleaned up after a kill.
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
        # Closing releases the lock. The file stays: between release and removal another run may have locked it.
        os.close(handle)
