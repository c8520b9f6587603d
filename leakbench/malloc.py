"""What a process does with memory that PyTorch frees on a CPU, where the C library is GNU's.

That library gives large blocks back to the system as soon as they are freed, and the system clears every page of a new
one when it is first touched. A training step frees its activations and asks for as many again, so that it may spend
more time on pages than on numbers, and how much depends on what the process happened to free before.
"""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress

KEPT_BYTES = 2**30
"""Of freed memory, how much a process keeps at most at the end of its heap."""

_FROM_HEAP = 2**25  # blocks up to so many bytes are of the heap: the most that the library allows
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # as in malloc.h
_VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Keeps what is freed for the next step, up to `KEPT_BYTES`; for processes of one's own: it cannot be undone.

    Steps on batches of 256 images take up to a third less time (`benchmarks/README.md` has figures), and about the
    same whatever the process did before; small batches gain little.

    Returns:
        Whether it was done: not under another C library, and not where the environment sets these limits itself.
    """
    if sys.platform != "linux" or any(os.environ.get(name) for name in _VARIABLES):
        return False
    with suppress(OSError, AttributeError):  # another C library has no such function
        library = ctypes.CDLL(None)
        return bool(library.mallopt(_MMAP_THRESHOLD, _FROM_HEAP) and library.mallopt(_TRIM_THRESHOLD, KEPT_BYTES))
    return False


def give_memory_back() -> None:
    """Returns to the system what was freed, the gaps in the heap included.

    Twelve trainings on 10,000 digits leave a worker with twice the memory that it needs otherwise, and more with each.
    """
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
