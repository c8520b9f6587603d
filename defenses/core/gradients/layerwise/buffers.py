"""A memory pool for per-example rows that are kept between norm and sum, reused from batch to batch.

glibc unmaps large blocks when they are freed, and the operating system clears every page of a new block when it is
first touched. Faulting in the rows of a layer costs as much as the product that computes them, so their memory is
pooled.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from torch import Tensor, nn

Buffers = Callable[[nn.Module, int, Tensor], Tensor]
"""(layer, number of entries, tensor for dtype and device) -> uninitialised [entries], valid until the sums are done."""
# Poisson batches differ in size: a buffer is larger by this fraction, so that a somewhat larger batch fits it too.
_SPARE = 1 / 8


class BufferPool:
    """Buffers by layer; a lent buffer has a single user, on any thread, until it is returned."""

    def __init__(self) -> None:
        """Starts empty."""
        self._idle: dict[nn.Module, list[Tensor]] = {}

    def lend(self) -> AbstractContextManager[Buffers]:
        """Lends buffers for as long as the context lasts; afterwards the next batch overwrites their content."""
        return _Loan(self._idle)

    def clear(self) -> None:
        """Frees all idle buffers."""
        self._idle.clear()


class _Loan(AbstractContextManager[Buffers]):
    """A class, because a generator takes twice as long, which is noticeable in a small network's step."""

    __slots__ = ("_idle", "_lent")

    def __init__(self, idle: dict[nn.Module, list[Tensor]]) -> None:
        self._idle = idle
        self._lent: list[tuple[nn.Module, Tensor]] = []

    def __enter__(self) -> Buffers:
        return self

    def __call__(self, layer: nn.Module, numbers: int, like: Tensor) -> Tensor:
        try:
            # Popped and caught, without a check before: list.pop is atomic, and two threads may run the same model.
            buffer = self._idle.setdefault(layer, []).pop()
        except IndexError:
            buffer = None
        if buffer is None or buffer.numel() < numbers or buffer.dtype != like.dtype or not _on_one_device(buffer, like):
            buffer = like.new_empty(numbers + int(_SPARE * numbers))
        self._lent.append((layer, buffer))
        return buffer[:numbers]

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        if failed is None:
            for layer, tensor in self._lent:
                if tensor.is_cpu:  # on other devices PyTorch's own allocator keeps freed memory
                    self._idle.setdefault(layer, []).append(tensor)


def _on_one_device(tensor: Tensor, other: Tensor) -> bool:
    """Returns whether both are on the same device; comparing devices takes several times as long as `is_cpu`."""
    return (tensor.is_cpu and other.is_cpu) or tensor.device == other.device
