"""Memory that one batch leaves to the next.

What is freed in large pieces goes back to the operating system, which clears every page of it before it gives it out
again: rows that are kept for a sum would take as long to be given room as to be computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

Room = Callable[[nn.Module, int, Tensor], Tensor]
"""(for which layer, how many numbers, of which dtype and where) -> uninitialised [numbers], until the sums are done."""
# Batches differ in size; so much more is asked for than the first one needs.
_SPARE = 1 / 8


class Rooms:
    """Room by layer; what is lent out is nobody else's, on any thread, until it is given back."""

    def __init__(self) -> None:
        """Starts without any."""
        self._idle: dict[nn.Module, list[Tensor]] = {}

    @contextmanager
    def lend(self) -> Iterator[Room]:
        """Room for as long as the context lasts, after which its content is void."""
        lent: list[tuple[nn.Module, Tensor]] = []

        def room(layer: nn.Module, numbers: int, like: Tensor) -> Tensor:
            try:
                found = self._idle.setdefault(layer, []).pop()
            except IndexError:
                found = None
            if found is None or found.numel() < numbers or (found.dtype, found.device) != (like.dtype, like.device):
                found = like.new_empty(numbers + int(_SPARE * numbers))
            lent.append((layer, found))
            return found[:numbers]

        yield room
        for layer, tensor in lent:
            if tensor.device.type == "cpu":  # elsewhere PyTorch keeps what is freed by itself
                self._idle.setdefault(layer, []).append(tensor)

    def clear(self) -> None:
        """Gives all back to the system."""
        self._idle.clear()
