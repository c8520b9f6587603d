"""Worker processes that end with their parent (the runner), even if the runner is killed.

On Linux the kernel ends them (PR_SET_PDEATHSIG). On every system a thread of the worker waits for the end of the parent
process. This module is imported before anything else of `audit`, because a worker imports for seconds, during which its
runner may be killed.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from contextlib import AbstractContextManager, suppress
from multiprocessing.connection import wait

from ...environment import environment_variable

RUNNER = "LEAKBENCH_RUNNER"
"""Environment variable with the runner's process id, for a worker that has only begun to import."""

_PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>; see prctl(2)


def children_end_with_us() -> AbstractContextManager[None]:
    """Child processes started within this context end with this process from their first moment."""
    return environment_variable(RUNNER, str(os.getpid()))


def end_with_runner() -> None:
    """Starts the thread that ends a worker with its runner on any system; called once the worker has imported."""
    # The sentinel becomes ready after any exit of the runner.
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_after, args=(parent.sentinel,), daemon=True).start()


def end_with_parent() -> None:
    """Asks the Linux kernel to end this process with its runner, if a runner started it."""
    # Importing `audit` in a user's program must have no such effect.
    if multiprocessing.current_process().name == "MainProcess":
        return
    runner = os.environ.pop(RUNNER, None)  # removed, so that children of the worker are not tied to the runner
    if runner is None or sys.platform != "linux":
        return
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # A runner that died before the request goes unnoticed by prctl; the worker then has another parent.
    if os.getppid() != int(runner):
        os._exit(1)


def _end_after(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)  # not sys.exit, which ends a thread and leaves the process


end_with_parent()
