"""Random directions that share no coordinate: a count sketch, whose products with a row take one pass over it.

Coordinates of a span are dealt out to k directions in turn, as cards are, and each gets a random sign; a direction is
the sum of its coordinates over the root of their number. So directions are orthonormal as they stand, a product with
all of them reads a row once, and a draw takes as many coins as there are coordinates. k dense directions take k times
as much of all three.

Which coordinates meet is fixed up to the turn at which the deal begins, and no hash as in the source: with independent
signs the expectation of V Vᵀ is (k / d) times the identity either way.

Source: Charikar, Chen & Farach-Colton, "Finding frequent items in data streams", ICALP 2002; as random projections: Li,
Hastie & Church, "Very sparse random projections", KDD 2006.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

_MOST_OFF = 1e-4  # as elsewhere of a basis (`codec.py`)


@dataclass(frozen=True, eq=False)
class SketchDirections:
    """Sums of coordinates that are `rank` apart, each with a factor.

    Attributes:
        factors: [span] of each coordinate, its sign over the root of the number of coordinates that it is added to.
        rank: number of directions.
        turn: coordinate i is dealt out as number (i + turn) modulo the span.
    """

    factors: Float[Tensor, " span"] = field(repr=False)
    rank: int
    turn: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= len(self.factors):
            raise ValueError(f"rank must be between 1 and {len(self.factors)}, the coordinates, got {self.rank}")
        if not 0 <= self.turn < len(self.factors):
            raise ValueError(f"turn must be between 0 and {len(self.factors) - 1}, got {self.turn}")
        # Longer directions would lengthen the rounding of a row at a right angle to them (`rounding.py`).
        error = float((self.of_rows(self.factors.detach().unsqueeze(0)) - 1).abs().max())
        if not error < _MOST_OFF:  # NaN is refused too
            raise ValueError(f"factors must make directions of length 1, got squared ones that are off by {error:.1e}")

    @classmethod
    def drawn(cls, span: int, rank: int, coins: torch.Generator) -> SketchDirections:
        """Random signs and a random turn.

        Args:
            span: number of coordinates.
            rank: number of directions, at most as many.
            coins: public, on the CPU.
        """
        signs = 2.0 * torch.randint(0, 2, (span,), generator=coins) - 1.0
        turn = int(torch.randint(0, span, (), generator=coins))
        each, more = divmod(span, rank)
        places = _dealt(span, rank, turn)
        return cls(signs / (each + (places < more)).sqrt(), rank, turn)

    def __reduce__(self) -> tuple[Any, ...]:
        """In files and copies without what follows from the rest."""
        return SketchDirections, (self.factors, self.rank, self.turn)

    @property
    def basis(self) -> Float[Tensor, "span k"]:
        """The directions themselves, one a column; as elsewhere the transpose of a contiguous matrix."""
        dense = self.factors.new_zeros(self.rank, len(self.factors))
        return dense.scatter_(0, self._places.unsqueeze(0), self.factors.unsqueeze(0)).T

    @cached_property
    def _places(self) -> Int64[Tensor, " span"]:
        return _dealt(len(self.factors), self.rank, self.turn).to(self.factors.device)

    def of_rows(self, rows: Float[Tensor, "rows some"], first: int = 0) -> Float[Tensor, "rows k"]:
        """Coefficients of rows that are zero but for some neighbouring coordinates; differentiable.

        Args:
            rows: those coordinates.
            first: the first one's number in the span.
        """
        span, width = len(self.factors), rows.shape[1]
        scaled = rows * self.factors[first : first + width].to(rows)
        found = scaled.new_zeros(len(rows), self.rank)
        # Where the deal begins anew in between, in two runs.
        begin = (span - self.turn - first) % span
        for some, number in ((scaled[:, :begin], first + self.turn), (scaled[:, begin:], first + begin + self.turn)):
            found = found + _added_up(some, number % span % self.rank, self.rank)
        return found

    def combined(self, coefficients: Float[Tensor, "rows k"]) -> Float[Tensor, "rows span"]:
        """The combinations of directions that have these coefficients."""
        return coefficients[:, self._places.to(coefficients.device)] * self.factors.to(coefficients)


def _dealt(span: int, rank: int, turn: int) -> Int64[Tensor, " span"]:
    """Which direction each coordinate belongs to."""
    return (torch.arange(span) + turn) % span % rank


def _added_up(values: Float[Tensor, "rows some"], first: int, rank: int) -> Float[Tensor, "rows k"]:
    """Sums of every `rank`-th number, of which the first one belongs to a given direction."""
    found = values.new_zeros(len(values), rank)
    head = min((rank - first) % rank, values.shape[1])
    found[:, first : first + head] += values[:, :head]
    whole = (values.shape[1] - head) // rank * rank
    if whole:
        found += values[:, head : head + whole].unflatten(1, (-1, rank)).sum(dim=1)
    rest = values[:, head + whole :]
    found[:, : rest.shape[1]] += rest
    return found
