"""Random directions with disjoint coordinates: a count sketch, whose products with a row take a single pass over it.

The coordinates of a span are assigned to k directions cyclically, each with a random sign; a direction is the signed
sum of its coordinates over the root of their number. Directions are therefore orthonormal by construction, a product
with all of them reads a row once, and a draw takes as many random bits as coordinates. k dense directions need k times
as many operations and random numbers, and an orthonormalisation.

Deviation: coordinates are assigned cyclically from a random offset, not by a hash function as in the source; with
independent signs, the expectation of V Vᵀ is (k / d) times the identity either way.

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

_MOST_OFF = 1e-4  # as for other bases (`codec.py`)


@dataclass(frozen=True, eq=False)
class SketchDirections:
    """Directions that are signed, scaled sums of every `rank`-th coordinate.

    Attributes:
        factors: factor of each coordinate [span], its sign over the root of the number of coordinates in its direction.
        rank: number of directions.
        turn: offset of the assignment; coordinate i belongs to direction ((i + turn) modulo span) modulo rank.
    """

    factors: Float[Tensor, " span"] = field(repr=False)
    rank: int
    turn: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= len(self.factors):
            raise ValueError(f"rank must be between 1 and {len(self.factors)}, the coordinates, got {self.rank}")
        if not 0 <= self.turn < len(self.factors):
            raise ValueError(f"turn must be between 0 and {len(self.factors) - 1}, got {self.turn}")
        # Longer directions would amplify the rounding of a row orthogonal to them (`rounding.py`).
        error = float((self.of_rows(self.factors.detach().unsqueeze(0)) - 1).abs().max())
        if not error < _MOST_OFF:  # NaN is refused too
            raise ValueError(f"factors must make directions of length 1, got squared ones that are off by {error:.1e}")

    @classmethod
    def drawn(cls, span: int, rank: int, generator: torch.Generator) -> SketchDirections:
        """Draws random signs and a random offset.

        Args:
            span: number of coordinates.
            rank: number of directions, at most `span`.
            generator: public generator, on the CPU.
        """
        signs = 2.0 * torch.randint(0, 2, (span,), generator=generator) - 1.0
        turn = int(torch.randint(0, span, (), generator=generator))
        each, more = divmod(span, rank)
        places = _dealt(span, rank, turn)
        return cls(signs / (each + (places < more)).sqrt(), rank, turn)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles without the cached indices."""
        return SketchDirections, (self.factors, self.rank, self.turn)

    @property
    def basis(self) -> Float[Tensor, "span k"]:
        """The directions as columns; like other bases, the transpose of a contiguous matrix."""
        dense = self.factors.new_zeros(self.rank, len(self.factors))
        return dense.scatter_(0, self._places.unsqueeze(0), self.factors.unsqueeze(0)).T

    @cached_property
    def _places(self) -> Int64[Tensor, " span"]:
        return _dealt(len(self.factors), self.rank, self.turn).to(self.factors.device)

    def of_rows(self, rows: Float[Tensor, "rows some"], first: int = 0) -> Float[Tensor, "rows k"]:
        """Computes coefficients of rows that are zero outside a range of coordinates; differentiable.

        Args:
            rows: values of the rows in the range.
            first: index of the first coordinate of the range, counted in the span.
        """
        span, width = len(self.factors), rows.shape[1]
        scaled = rows * self.factors[first : first + width].to(rows)
        coefficients = scaled.new_zeros(len(rows), self.rank)
        # Two parts, before and after the coordinate at which the offset wraps around.
        begin = (span - self.turn - first) % span
        for columns, number in ((scaled[:, :begin], first + self.turn), (scaled[:, begin:], first + begin + self.turn)):
            coefficients = coefficients + _added_up(columns, number % span % self.rank, self.rank)
        return coefficients

    def combined(self, coefficients: Float[Tensor, "rows k"]) -> Float[Tensor, "rows span"]:
        """Returns the combinations of directions with these coefficients."""
        return coefficients[:, self._places.to(coefficients.device)] * self.factors.to(coefficients)


def _dealt(span: int, rank: int, turn: int) -> Int64[Tensor, " span"]:
    """Direction of each coordinate."""
    return (torch.arange(span) + turn) % span % rank


def _added_up(values: Float[Tensor, "rows some"], first: int, rank: int) -> Float[Tensor, "rows k"]:
    """Sums the values of each direction; the first value belongs to direction `first`, the next to the next."""
    sums = values.new_zeros(len(values), rank)
    head = min((rank - first) % rank, values.shape[1])
    sums[:, first : first + head] += values[:, :head]
    whole = (values.shape[1] - head) // rank * rank
    if whole:
        sums += values[:, head : head + whole].unflatten(1, (-1, rank)).sum(dim=1)
    remainder = values[:, head + whole :]
    sums[:, : remainder.shape[1]] += remainder
    return sums
