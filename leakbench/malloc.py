"""Settings of glibc's allocator that keep memory freed by PyTorch on a CPU for the next training step.

glibc returns large blocks to the operating system as soon as they are freed, and the system clears every page of a new
block on first touch. A training step frees its activations and allocates as much again, so it may spend more time on
page faults than on arithmetic; how much depends on the earlier allocations of the process.
"""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress

KEPT_BYTES = 2**30
"""Largest amount of freed memory that a process keeps at the end of its heap, bytes."""

_FROM_HEAP = 2**25  # largest block taken from the heap, bytes: glibc's maximum
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # as in malloc.h
_VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Keeps up to `KEPT_BYTES` of freed memory for the next step; irreversible, so only for leakbench's own processes.

    Steps on batches of 256 images then take up to a third less time (`benchmarks/README.md` has figures), and their
    time no longer depends on earlier allocations of the process; small batches gain little.

    Returns:
        True if the limits were set: needs glibc, and an environment that does not set them itself.
    """
    if sys.platform != "linux" or any(os.environ.get(name) for name in _VARIABLES):
        return False
    with suppress(OSError, AttributeError):  # another C library lacks the function
        library = ctypes.CDLL(None)
        return bool(library.mallopt(_MMAP_THRESHOLD, _FROM_HEAP) and library.mallopt(_TRIM_THRESHOLD, KEPT_BYTES))
    return False


def give_memory_back() -> None:
    """Returns freed memory to the operating system, including the gaps in the heap.

    Without it, twelve trainings on 10,000 digits leave a worker with twice the memory it needs, and more with each.
    """
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
