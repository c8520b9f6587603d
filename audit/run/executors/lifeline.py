"""Workers end with the process that started them, whatever ended it: a kill, or the want of memory.

On Linux the kernel sees to it. Everywhere a thread waits for the pipe that the runner held open. Imported before
anything else of `audit`: what a worker imports takes seconds, in which its runner may already be killed.
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
"""Environment variable by which a worker knows, while it starts, the process that it ends with."""

_PR_SET_PDEATHSIG = 1  # of prctl(2)


@contextmanager
def children_end_with_us() -> Iterator[None]:
    """Processes of ours that are started meanwhile end with this one from their first moment."""
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
    """Where the kernel does not end a worker with its runner, a thread does; called by the worker when it is ready."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_after, args=(parent.sentinel,), daemon=True).start()


def tie() -> None:
    """On Linux, lets the kernel end this process with its runner, if it was started by one."""
    if multiprocessing.current_process().name == "MainProcess":
        return
    runner = os.environ.pop(RUNNER, None)  # a worker's own children are none of the runner's
    if runner is None or sys.platform != "linux":
        return
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(runner):  # it was gone before this was said
        os._exit(1)


def _end_after(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)


tie()
