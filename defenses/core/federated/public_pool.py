"""Public examples of a federated run: gradients at the current network, and a batch shared by a round's clients.

All clients read the same public examples at the global model, because public randomness and the number of the step are
the same for all. Their gradients are therefore computed once a round, and so is a basis that follows from them.
"""

from __future__ import annotations

from collections.abc import Callable

from jaxtyping import Float, Int64
from torch import Tensor

from ..plan.public_data import GradientBatch, PublicGradients


class SharedPublic:
    """A pool whose last batch at the global model is kept for the round.

    Attributes:
        used: whether any example was read.
    """

    def __init__(self, pool: PublicGradients, at_global_model: Callable[[], int | None]) -> None:
        """Takes the pool.

        Args:
            pool: gradients at the network's current parameters.
            at_global_model: returns the round whose global model the network has; None elsewhere.
        """
        self._pool, self._round = pool, at_global_model
        self._kept: tuple[int, Tensor, GradientBatch] | None = None

    @property
    def used(self) -> bool:
        """True if any example was read."""
        return self._pool.used

    def mark_used(self) -> None:
        """Notes that examples were read before the run was resumed."""
        self._pool.used = True

    @property
    def size(self) -> int:
        """Number of examples."""
        return self._pool.size

    def __call__(self, chosen: Int64[Tensor, " n"]) -> Float[Tensor, "n dim"]:
        """Returns per-example gradients of the examples at these positions."""
        return self._pool(chosen)

    def batch(self, chosen: Int64[Tensor, " n"]) -> GradientBatch:
        """Returns the same gradients, with factors if there are any: the same object to all clients of a round."""
        number = self._round()
        if number is None:
            return self._pool.batch(chosen)
        kept = self._kept
        if kept is not None and kept[0] == number and kept[1].equal(chosen):
            return kept[2]
        self._kept = number, chosen, self._pool.batch(chosen)
        return self._kept[2]
