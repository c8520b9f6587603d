"""What a long piece of work is doing, told while it does it: the step of a transcript that an attack reads, say.

Work tells `stepping.tell`, which costs nothing where nobody listens. Who runs work listens by `told_to`: a worker
process hands the words to the process that started it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Listener = Callable[[str], None]

_EVERY = 1.0
"""Seconds between two words, for a reader who has eyes."""

_listener: Listener | None = None
_doing = ""
_last = 0.0


@contextmanager
def told_to(listener: Listener | None) -> Iterator[None]:
    """Passes what is told meanwhile to a listener, a second apart.

    Args:
        listener: takes words; None for nobody.
    """
    global _listener
    before, _listener = _listener, listener
    try:
        yield
    finally:
        _listener = before


@contextmanager
def doing(what: str) -> Iterator[None]:
    """Names the work whose steps are told meanwhile.

    Args:
        what: as "likelihood_ratio on dp_sgd, seed 0".
    """
    global _doing
    before, _doing = _doing, what
    try:
        yield
    finally:
        _doing = before


def tell(done: int, total: int, unit: str = "step") -> None:
    """Says which of how many steps has been reached; the first, the last and what comes between by the second.

    Args:
        done: counted from 1.
        total: of this work.
        unit: what is counted.
    """
    global _last
    now = time.monotonic()
    if _listener is not None and (now - _last >= _EVERY or done == total):
        _last = now
        _listener(f"{_doing + ': ' if _doing else ''}{unit} {done:,} of {total:,}")


def listen(listener: Listener) -> None:
    """Passes what is told to a listener for as long as this process lives, as a worker's is."""
    global _listener
    _listener = listener
