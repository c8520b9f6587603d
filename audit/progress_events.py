"""Progress messages of long computations, such as the step of a transcript that an attack is reading.

A computation calls `tell`, which costs nothing without a listener. Its caller registers a listener by `with_listener`;
a worker process forwards the messages to its parent process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Listener = Callable[[str], None]

_EVERY = 1.0
"""Least seconds between two messages, so that they can be read."""

_listener: Listener | None = None
_activity = ""
_last = 0.0


@contextmanager
def with_listener(listener: Listener | None) -> Iterator[None]:
    """Passes the progress messages of a `with` block to a listener, a second apart or more.

    Args:
        listener: takes messages; None for no listener.
    """
    global _listener
    before, _listener = _listener, listener
    try:
        yield
    finally:
        _listener = before


@contextmanager
def named_activity(activity: str) -> Iterator[None]:
    """Names the computation whose progress is reported within a `with` block.

    Args:
        activity: its name, such as "likelihood_ratio on dp_sgd, seed 0".
    """
    global _activity
    before, _activity = _activity, activity
    try:
        yield
    finally:
        _activity = before


def tell(done: int, total: int, unit: str = "step") -> None:
    """Reports progress to the listener, at most once a second, and always at the last step.

    Args:
        done: number of steps done.
        total: number of steps of the computation.
        unit: noun for a step.
    """
    global _last
    now = time.monotonic()
    if _listener is not None and (now - _last >= _EVERY or done == total):
        _last = now
        _listener(f"{_activity + ': ' if _activity else ''}{unit} {done:,} of {total:,}")


def listen(listener: Listener) -> None:
    """Passes progress messages to a listener for the lifetime of this process, as in a worker."""
    global _listener
    _listener = listener
