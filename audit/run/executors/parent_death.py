"""Worker processes that end with the process that started them (the runner), even where that is killed outright.

On Linux the kernel sees to it (PR_SET_PDEATHSIG); on every system a thread of the worker waits for the pipe that the
runner holds open. Imported before anything else of `audit`: a worker imports for seconds, in which its runner may be
killed already.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait

RUNNER = "LEAKBENCH_RUNNER"
"""Environment variable with the runner's process id, for a worker that has only begun to import."""

_PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>; see prctl(2)


@contextmanager
def children_end_with_us() -> Iterator[None]:
    """Child processes that are started meanwhile end with this one from their first moment."""
    before = os.environ.get(RUNNER)
    os.environ[RUNNER] = str(os.getpid())
    try:
        yield
    finally:
        if before is None:
            del os.environ[RUNNER]
        else:
            os.environ[RUNNER] = before


def end_with_runner() -> None:
    """Starts the thread that ends a worker with its runner where the kernel does not; called by a ready worker."""
    # The sentinel becomes ready when the runner is gone, however it went.
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_after, args=(parent.sentinel,), daemon=True).start()


def tie() -> None:
    """Asks the kernel of Linux to end this process with its runner, if it was started by one."""
    # Importing `audit` in a program of the user's must not tie that to anything.
    if multiprocessing.current_process().name == "MainProcess":
        return
    runner = os.environ.pop(RUNNER, None)  # a worker's own children are none of the runner's
    if runner is None or sys.platform != "linux":
        return
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The runner was gone before the kernel was asked: a race that prctl cannot report.
    if os.getppid() != int(runner):
        os._exit(1)


def _end_after(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)  # not sys.exit, which ends a thread and leaves the process


tie()
