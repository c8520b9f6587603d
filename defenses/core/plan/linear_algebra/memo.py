"""A result that outlives a step, as long as nobody writes into what it was computed from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from torch import Tensor

T = TypeVar("T")


class Memo(Generic[T]):
    """The last result of one computation."""

    def __init__(self) -> None:
        """Starts without any."""
        self._last: tuple[list[tuple[int, int]], Sequence[Tensor], T] | None = None

    def __reduce__(self) -> tuple[type[Memo[T]], tuple[()]]:
        """In files and copies without it."""
        return Memo, ()

    @property
    def empty(self) -> bool:
        """Whether nothing was computed yet."""
        return self._last is None

    def of(self, parts: Sequence[Tensor], compute: Callable[[], T]) -> T:
        """What `compute` gives: the last result where these are the same tensors, not written into since.

        Args:
            parts: all that the result is computed from.
            compute: the computation.
        """
        if any(part.is_inference() for part in parts):  # which do not count what is written
            return compute()
        state = [(id(part), part._version) for part in parts]
        if self._last is None or self._last[0] != state:
            # Held, so that no other tensor gets the identity of one.
            self._last = (state, tuple(parts), compute())
        return self._last[2]
