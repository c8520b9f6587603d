"""Public data for methods: per-example gradients by position, drawn positions, and refusal of shared examples.

Reading public data costs no privacy, on two conditions: they are disjoint from the private data, and truly public.
Equal examples are found and refused; that near copies are, or that somebody's data are public, no code can check.
Whoever reads them leaves a mark here, so that a record can say that a result rests on them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ..randomness.keys import keyed
from ..randomness.record_draws import record_keys

_AT_ONCE = 2**24  # numbers that are copied at a time to be compared

RowSizes = tuple[int, int, int, int, int]
"""(groups, height, width, entering, leaving) of the row of a convolution's weight, as it is made."""


@runtime_checkable
class PublicRows(Protocol):
    """A pool of public examples, of which per-example gradients can be had at the current parameters."""

    @property
    def size(self) -> int:
        """Number of examples."""
        ...

    def __call__(self, chosen: Int64[Tensor, " n"]) -> Float[Tensor, "n dim"]:
        """Per-example gradients of the examples at these positions."""
        ...


@runtime_checkable
class GradientBatch(Protocol):
    """Per-example gradients of a batch, of which a part may be had as factors."""

    def columns(self, start: int, stop: int) -> Float[Tensor, "n span"]:
        """The part of all rows over the parameters in [start, stop)."""
        ...

    def made(self, start: int, stop: int) -> tuple[Tensor, RowSizes] | None:
        """Rows [n, span] over [start, stop) as they are made, and the sizes of that order; None if it is no other."""
        ...

    def outer(self, start: int, stop: int) -> tuple[Tensor, Tensor] | None:
        """Factors (s [n, out], x [n, in]) of gradients s xᵀ over [start, stop); None where they are not known."""
        ...


@dataclass(frozen=True)
class Rows:
    """Per-example gradients as rows.

    Attributes:
        values: one row an example.
    """

    values: Float[Tensor, "n dim"]

    def columns(self, start: int, stop: int) -> Float[Tensor, "n span"]:
        """A part of the rows."""
        return self.values[:, start:stop]

    def made(self, start: int, stop: int) -> tuple[Tensor, RowSizes] | None:
        """Rows have the parameters' order."""
        return None

    def outer(self, start: int, stop: int) -> tuple[Tensor, Tensor] | None:
        """Rows do not tell."""
        return None


class PublicGradients:
    """The public examples of a run.

    Attributes:
        used: whether anything was read.
    """

    def __init__(
        self,
        rows: Callable[[Tensor, Tensor], Tensor],
        inputs: Tensor,
        labels: Tensor,
        factored: Callable[[Tensor, Tensor], GradientBatch] | None = None,
    ) -> None:
        """Takes the examples, and what computes their per-example gradients at the parameters of the moment.

        Args:
            rows: one row an example.
            inputs: the examples.
            labels: of the examples.
            factored: the same gradients with the factors of those that have some; the rows where None.
        """
        self._rows, self._inputs, self._labels = rows, inputs, labels
        self._factored = factored or (lambda x, y: Rows(rows(x, y).detach()))
        self.used = False

    @property
    def size(self) -> int:
        """Number of examples."""
        return len(self._inputs)

    def __call__(self, chosen: Int64[Tensor, " n"]) -> Float[Tensor, "n dim"]:
        """Per-example gradients of the examples at these positions."""
        self.used = True
        chosen = chosen.to(self._inputs.device)
        return self._rows(selected(self._inputs, chosen), selected(self._labels, chosen)).detach()

    def batch(self, chosen: Int64[Tensor, " n"]) -> GradientBatch:
        """The same gradients, with the factors of those that have some."""
        self.used = True
        chosen = chosen.to(self._inputs.device)
        return self._factored(selected(self._inputs, chosen), selected(self._labels, chosen))


class ToyRows:
    """Made-up gradients in place of public ones, for dry runs without data: as many as a plan may ask for.

    Attributes:
        size: more than any plan reads.
        used: whether anything was read.
    """

    size = 10**9

    def __init__(self, dim: int, *, seed: int = 0) -> None:
        """Takes the length of a row, and a number by which other rows are made up."""
        self._dim, self._seed, self.used = dim, seed, False

    def __call__(self, chosen: Int64[Tensor, " n"]) -> Float[Tensor, "n dim"]:
        """Standard normal rows, a function of the first position."""
        self.used = True
        key = (int(chosen[0]) if len(chosen) else 0) + (self._seed << 32)
        return torch.randn(len(chosen), self._dim, generator=keyed(key))


def refuse_shared(private: Tensor, public: Tensor) -> None:
    """Raises `ValueError` where an input of the private data is one of the public data too, whatever the labels.

    Inputs are compared as values, in the coarser of the two dtypes and whatever their shape: a copy stays a copy.

    Args:
        private: inputs [n, ...].
        public: inputs [m, ...].
    """
    dtype = _coarser(private.dtype, public.dtype)
    found = torch.isin(_as_values(public, dtype), _as_values(private, dtype).to(public.device))
    if bool(found.any()):
        raise ValueError(
            f"public examples must be none of the private ones, got {int(found.sum())} of {len(public)} whose inputs "
            "are the same; leave them out of one of the two"
        )


def _coarser(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    floating = [dtype for dtype in (a, b) if dtype.is_floating_point]
    return min(floating, key=lambda dtype: dtype.itemsize, default=torch.promote_types(a, b))


def selected(values: Tensor, which: Int64[Tensor, " some"]) -> Tensor:
    """Some of a data set's entries, in the memory format that it has."""
    # Brackets, which keep strides, take several times as long.
    plain = values.is_contiguous() and which.dtype == torch.int64 and which.dim() == 1
    return values.index_select(0, which) if plain else values[which]


def _as_values(inputs: Tensor, dtype: torch.dtype) -> Int64[Tensor, " n"]:
    """A key for each input, the same for +0.0 and -0.0."""
    flat = inputs.reshape(len(inputs), math.prod(inputs.shape[1:]))
    at_once = max(1, _AT_ONCE // max(1, flat.shape[1]))
    # Adding 0 turns -0.0 into 0.0, whose bits are hashed.
    return torch.cat([record_keys(part.to(dtype) + 0) for part in flat.split(at_once)])


def draw(n: int, size: int, coins: torch.Generator) -> Int64[Tensor, " n"]:
    """`n` distinct positions out of `size`, uniformly at random; the pool is not permuted where `n` is small.

    Args:
        n: how many, at most `size`.
        size: of the pool.
        coins: public randomness.
    """
    if size < 16 * n:
        return torch.randperm(size, generator=coins)[:n]
    # Draws with replacement whose repeats are dropped: the first n distinct ones are a uniform sample without.
    found = torch.zeros(0, dtype=torch.int64)
    while len(found) < n:
        more = torch.cat([found, torch.randint(size, (n,), generator=coins)])
        # The first occurrence of each, in the order drawn: sorted, the later ones would be the larger.
        values, where = more.unique(return_inverse=True)
        first = torch.full((len(values),), len(more)).scatter_reduce(0, where, torch.arange(len(more)), "amin")
        found = more[first.sort().values]
    return found[:n]


def disjoint(n: int, number: int, size: int, seed: int) -> Int64[Tensor, " n"]:
    """Block `number` of a pool that is cut into disjoint blocks of `n` in an order that the seed decides.

    Args:
        n: examples a block.
        number: of the block, from 0.
        size: of the pool, at least n * (number + 1).
        seed: of the order.
    """
    start = n * number
    if size > 2**26:  # a toy's rows are alike, and nobody has so many examples in memory
        return torch.arange(start, start + n)
    return _order(size, seed)[start : start + n]


@lru_cache(maxsize=2)
def _order(size: int, seed: int) -> Int64[Tensor, " size"]:
    return torch.randperm(size, generator=keyed(seed))
