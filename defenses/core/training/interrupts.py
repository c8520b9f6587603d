"""Control-C between two steps of a run that writes a checkpoint, instead of anywhere inside of one."""

from __future__ import annotations

import signal
import threading
from contextlib import AbstractContextManager
from types import FrameType


class HeldInterrupts(AbstractContextManager["HeldInterrupts"]):
    """Holds a first Control-C until `raise_held`; a second one interrupts at once.

    A step that is broken off is lost and charged, and so are all steps since the checkpoint was written; between two
    steps nothing is. Only where Python's own handler would raise `KeyboardInterrupt`: in the main thread, if nobody
    else handles the signal.
    """

    def __init__(self, *, wanted: bool = True) -> None:
        """Takes whether to hold interrupts at all."""
        self._wanted, self._holding, self._held = wanted, False, False

    def __enter__(self) -> HeldInterrupts:
        own = threading.current_thread() is threading.main_thread()
        if self._wanted and own and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._hold)
            self._holding = True
        return self

    def __exit__(self, *_: object) -> None:
        if self._holding:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._holding = False

    def raise_held(self) -> None:
        """Raises `KeyboardInterrupt` if one is held."""
        if self._held:
            self._held = False
            raise KeyboardInterrupt

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if self._held:
            signal.default_int_handler(number, frame)
        self._held = True
