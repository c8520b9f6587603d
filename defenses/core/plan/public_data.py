"""Public data for methods: per-example gradients, choice of the examples to read, refusal of private examples.

Reading public data costs no privacy if they are disjoint from the private data and truly public. Examples that are also
private are found and refused; near copies, and private data passed as public, cannot be detected. `used` says whether
public data were read, so that the record of a run states whether its result depends on them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ..inputs import Inputs, InputTensors, changed, rebuilt, tensors_in
from ..randomness.keys import keyed
from ..randomness.record_draws import record_keys

_AT_ONCE = 2**24  # entries of the inputs hashed at a time, which limits memory

RowSizes = tuple[int, int, int, int, int]
"""(groups, height, width, input channels, output channels) of a convolution's weight gradient, as it is computed."""


@runtime_checkable
class PublicRows(Protocol):
    """A pool of public examples, with per-example gradients at the current parameters."""

    @property
    def size(self) -> int:
        """Number of examples."""
        ...

    def __call__(self, chosen: Int64[Tensor, " n"]) -> Float[Tensor, "n dim"]:
        """Returns per-example gradients of the examples at these positions."""
        ...


@runtime_checkable
class GradientBatch(Protocol):
    """Per-example gradients of a batch, some of which may be available as factors."""

    def columns(self, start: int, stop: int) -> Float[Tensor, "n span"]:
        """Returns the columns [start, stop) of all rows."""
        ...

    def made(self, start: int, stop: int) -> tuple[Tensor, RowSizes] | None:
        """Returns columns [start, stop) and sizes in the layout of computation; None if it is the weight's."""
        ...

    def outer(self, start: int, stop: int) -> tuple[Tensor, Tensor] | None:
        """Returns factors (s [n, out], x [n, in]) of gradients s xᵀ over [start, stop); None if unknown."""
        ...


@dataclass(frozen=True)
class Rows:
    """Per-example gradients as rows.

    Attributes:
        values: rows, in the order of the examples.
    """

    values: Float[Tensor, "n dim"]

    def columns(self, start: int, stop: int) -> Float[Tensor, "n span"]:
        """Returns the columns [start, stop) of the rows."""
        return self.values[:, start:stop]

    def made(self, start: int, stop: int) -> tuple[Tensor, RowSizes] | None:
        """Returns None: rows are in the parameters' layout."""
        return None

    def outer(self, start: int, stop: int) -> tuple[Tensor, Tensor] | None:
        """Returns None: rows have no factors."""
        return None


class PublicGradients:
    """Public examples of a run.

    Attributes:
        used: whether any example was read.
    """

    def __init__(
        self,
        rows: Callable[..., Tensor],
        inputs: Inputs,
        labels: Tensor,
        factored: Callable[..., GradientBatch] | None = None,
    ) -> None:
        """Takes the examples and the functions that compute their per-example gradients at the current parameters.

        Args:
            rows: function of inputs and labels that returns a row for each example.
            inputs: the examples.
            labels: their labels.
            factored: function that returns the same gradients, with factors if there are any; None to use the rows.
        """
        self._rows, self._inputs, self._labels = rows, inputs, labels
        self._factored = factored or (lambda x, y: Rows(rows(x, y).detach()))
        self.used = False

    @property
    def size(self) -> int:
        """Number of examples."""
        return len(self._inputs)

    def __call__(self, chosen: Int64[Tensor, " n"]) -> Float[Tensor, "n dim"]:
        """Returns per-example gradients of the examples at these positions."""
        self.used = True
        chosen = chosen.to(self._inputs.device)
        return self._rows(chosen_from(self._inputs, chosen), selected(self._labels, chosen)).detach()

    def batch(self, chosen: Int64[Tensor, " n"]) -> GradientBatch:
        """Returns the same gradients, with factors if there are any."""
        self.used = True
        chosen = chosen.to(self._inputs.device)
        return self._factored(chosen_from(self._inputs, chosen), selected(self._labels, chosen))


class ToyRows:
    """Synthetic gradients in place of public ones, for dry runs without data.

    Attributes:
        size: number of examples; by default more than any plan reads.
        used: whether any example was read.
    """

    def __init__(self, dim: int, *, seed: int = 0, size: int = 10**9) -> None:
        """Takes the length of a row, a seed of the rows, and their number."""
        self._dim, self._seed, self.size, self.used = dim, seed, size, False

    def __call__(self, chosen: Int64[Tensor, " n"]) -> Float[Tensor, "n dim"]:
        """Returns standard normal rows, a function of the seed and the first position."""
        self.used = True
        key = (int(chosen[0]) if len(chosen) else 0) + (self._seed << 32)
        return torch.randn(len(chosen), self._dim, generator=keyed(key))


def refuse_shared(private: Inputs, public: Inputs) -> None:
    """Raises `ValueError` if an input is in both the private and the public data, whatever the labels.

    Inputs are flattened, converted to the coarser of the two dtypes and compared by 64-bit hashes of their values. If
    an example has several tensors, all of them are compared together.

    Args:
        private: inputs [n, ...].
        public: inputs [m, ...].
    """
    _refuse_other_arguments(private, public)
    pairs = zip(tensors_in(private), tensors_in(public), strict=True)
    dtypes = [_coarser(mine.dtype, theirs.dtype) for mine, theirs in pairs]
    shared = torch.isin(_as_values(public, dtypes), _as_values(private, dtypes).to(public.device))
    if bool(shared.any()):
        raise ValueError(
            f"public examples must be none of the private ones, got {int(shared.sum())} of {len(public)} whose inputs "
            "are the same; leave them out of one of the two"
        )


def _refuse_other_arguments(private: Inputs, public: Inputs) -> None:
    mine, theirs = (
        ", ".join(values.places) if isinstance(values, InputTensors) else "one tensor" for values in (private, public)
    )
    if mine != theirs:
        raise ValueError(f"public inputs must be the same arguments as private ones, {mine}, got {theirs}")


def _coarser(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    floating = [dtype for dtype in (a, b) if dtype.is_floating_point]
    return min(floating, key=lambda dtype: dtype.itemsize, default=torch.promote_types(a, b))


def selected(values: Tensor, index: Int64[Tensor, " some"]) -> Tensor:
    """Selects entries of a data set and keeps its memory format."""
    # Indexing, which keeps strides, takes several times as long.
    plain = values.is_contiguous() and index.dtype == torch.int64 and index.dim() == 1
    return values.index_select(0, index) if plain else values[index]


def chosen_from(inputs: Inputs, index: Int64[Tensor, " some"]) -> Inputs:
    """Selects examples of a data set; see `selected`."""
    return changed(inputs, partial(selected, index=index))


def _as_values(inputs: Inputs, dtypes: Sequence[torch.dtype]) -> Int64[Tensor, " n"]:
    """Computes a hash of each input, the same for +0.0 and -0.0."""
    flat = changed(inputs, lambda values: values.reshape(len(values), math.prod(values.shape[1:])))
    at_once = max(1, _AT_ONCE // max(1, sum(values.shape[1] for values in tensors_in(flat))))

    def hashed(part: Inputs) -> Tensor:
        # Adding 0 turns -0.0 into 0.0 before the bits are hashed.
        values = [values.to(dtype) + 0 for values, dtype in zip(tensors_in(part), dtypes, strict=True)]
        return record_keys(rebuilt(part, values))

    return torch.cat([hashed(part) for part in flat.split(at_once)])


def draw(n: int, size: int, generator: torch.Generator) -> Int64[Tensor, " n"]:
    """Draws `n` distinct positions out of `size` uniformly; for a small `n` the pool is not permuted.

    Args:
        n: number of positions, at most `size`.
        size: size of the pool.
        generator: public generator.
    """
    if size < 16 * n:
        return torch.randperm(size, generator=generator)[:n]
    # Draws with replacement, then drops repeats: the first n distinct values are a uniform sample without replacement.
    positions = torch.zeros(0, dtype=torch.int64)
    while len(positions) < n:
        more = torch.cat([positions, torch.randint(size, (n,), generator=generator)])
        # Distinct values in the order drawn: `unique` sorts, and a cut of sorted values would favour small ones.
        values, where = more.unique(return_inverse=True)
        first = torch.full((len(values),), len(more)).scatter_reduce(0, where, torch.arange(len(more)), "amin")
        positions = more[first.sort().values]
    return positions[:n]


def disjoint(n: int, number: int, size: int, seed: int) -> Int64[Tensor, " n"]:
    """Returns block `number` of a pool cut into disjoint blocks of `n`, in an order given by the seed.

    Args:
        n: examples in a block.
        number: index of the block, from 0.
        size: size of the pool, at least n * (number + 1).
        seed: seed of the order.
    """
    start = n * number
    if size > 2**26:  # only `ToyRows` has so many, and their order is irrelevant
        return torch.arange(start, start + n)
    return _order(size, seed)[start : start + n]


@lru_cache(maxsize=2)
def _order(size: int, seed: int) -> Int64[Tensor, " size"]:
    return torch.randperm(size, generator=keyed(seed))
