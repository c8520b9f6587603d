"""Per-example gradients of a parameter in factored form: a layer's inputs and output gradients, not their products.

A plan needs squared norms, weighted sums and coefficients along a basis, which follow from the factors; whole rows
[rows, size] are the fallback. Each kind of layer has a `FactoredGradient`, which computes each in the cheapest way that
its factors allow.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ...kernels.bound_factors import FactorKernel, NormTable
from ...kernels.weighted_rows import SumTable
from ...plan.bound import row_norms
from ...plan.linear_algebra.lengths import lengths
from ...plan.linear_algebra.products import product
from ..numerics.device_memory import total_memory

# A chunk of rows and its factors should stay in the cache of a CPU; a GPU needs large launches.
_CHUNK_BYTES = {"cpu": 4 * 2**20, "cuda": 256 * 2**20}
# Part of a GPU's memory that a chunk takes if that is more: a single launch for a layer, as a rule.
_CHUNK_SHARE = 1 / 32
TOGETHER = 512
"""Most examples that one float32 sum adds: the error n² / 2^24 of a bound (`added_in_parts`) is then 1/64."""
_LEAST_TOGETHER = 16  # examples, from which on a layer's kernel runs longer than its call takes
# A float32 Gram product of t terms is off by about t * eps of the sum of the terms' sizes; a factor for safety.
_ROUNDING = 4.0


@dataclass(frozen=True)
class Squares:
    """Squared norms with a bound on their rounding error.

    Attributes:
        value: squared L2 norm of each example's gradient, float64.
        rounding: bound on its rounding error, float64; None for an error in the last few digits.
    """

    value: Float[Tensor, " *rows"]
    rounding: Float[Tensor, " *rows"] | None = None

    @classmethod
    def exact(cls, value: Tensor) -> Squares:
        """Returns sums of squares, which do not cancel."""
        return cls(value.double())

    @property
    def slack(self) -> Float[Tensor, " *rows"]:
        """Bound on the rounding error, zero for an error in the last few digits."""
        return torch.zeros_like(self.value) if self.rounding is None else self.rounding

    def __add__(self, other: Squares) -> Squares:
        value = self.value + other.value
        if self.rounding is None or other.rounding is None:
            return Squares(value, self.rounding if other.rounding is None else other.rounding)
        return Squares(value, self.rounding + other.rounding)


def gram_squares(products: Float[Tensor, "rows t t"], others: Float[Tensor, "rows t t"], dtype: torch.dtype) -> Squares:
    """Squared norms of sum_t s_t x_tᵀ from inner products <x_t, x_u> and <s_t, s_u> in float64; overwrites `products`.

    Float64, because in float32 the rounding error of long sums of similar numbers is many times the slack of
    `cancelling`, and a product of numbers below 1e-22 underflows.

    Args:
        products: inner products of the first factor.
        others: inner products of the second factor.
        dtype: dtype of the factors, and of the weighted sum.
    """
    diagonal = products.diagonal(dim1=1, dim2=2) * others.diagonal(dim1=1, dim2=2)
    value = products.mul_(others).flatten(1).sum(dim=1)
    return cancelling(value, diagonal.sum(dim=1), products.shape[1], dtype)


def gram(values: Float[Tensor, "rows t width"]) -> Float[Tensor, "rows t t"]:
    """Inner products between positions, in float64."""
    wide = values.double()
    return torch.bmm(wide, wide.mT)


def cancelling(value: Tensor, diagonal: Tensor, terms: int, dtype: torch.dtype) -> Squares:
    """Squared norms |sum_t s_t x_tᵀ|² = sum_tu <x_t, x_u> <s_t, s_u>, whose terms may largely cancel.

    Args:
        value: that sum, of each example.
        diagonal: sum_t |x_t|² |s_t|².
        terms: number of positions t.
        dtype: dtype of the factors, whose inner products are in float64.
    """
    # Cauchy-Schwarz: the terms' sizes sum to at most t times the diagonal's sum.
    slack = diagonal.double() * (terms * _ROUNDING * torch.finfo(dtype).eps)
    # Terms cancel: hence the slack, and no root of a negative.
    return Squares(value.double().clamp(min=0), slack if terms > 1 else torch.zeros_like(slack))


def recomputed(value: Tensor, inputs: Tensor, signals: Tensor, overlap: int = 1) -> Squares:
    """Squared norms of discarded rows, with slack for a weighted sum that is computed differently.

    That sum is one product over the batch. It rounds differently from the measured rows, so an example's share in it
    can exceed its bound by the slack.

    Args:
        value: squared norms of the rows [rows].
        inputs: the layer's inputs, by example [rows, ...].
        signals: output gradients by example and position [rows, positions, out].
        overlap: maximum number of positions that an input number takes part in.
    """
    # Rounding errors of independent signs: a few eps of the root of sum_t |x_t|² |s_t|², bounded by factors. In
    # float64, where no norm of a float32 overflows and no square of a float32 underflows.
    strongest = torch.linalg.vector_norm(signals, dim=2, dtype=torch.float64).amax(dim=1)
    # Convolution: each input number is in up to `overlap` patches, so sum_t |x_t|² <= overlap * |inputs|².
    size = torch.linalg.vector_norm(inputs.flatten(1), dim=1, dtype=torch.float64)
    error = _ROUNDING * torch.finfo(signals.dtype).eps * strongest * size * overlap**0.5
    slack = error * (2 * value.double().sqrt() + error)
    # Sums of a few of these numbers must stay in the format.
    edge = torch.finfo(signals.dtype).max / 64
    return Squares(value.double(), torch.where((strongest > edge) | (size > edge), torch.inf, slack))


def added_in_parts(examples: int, like: Tensor, sum_of: Callable[[slice], Tensor]) -> Tensor:
    """Sums over examples; partial sums from float32 kernels are added up in float64.

    If n gradients of a bound's length are added sequentially, each is rounded to a last digit of the preceding
    sum. Without the first gradient all later ones are rounded differently, by up to n² / 2^24 of the bound: for 65,536
    chosen examples it was 49 bounds. In parts of m it is n m / 2^24. This holds for kernels that add up an example's
    positions first; for a kernel that adds all positions sequentially it is larger by the number of positions.

    Args:
        examples: number of examples.
        like: tensor of the sum's dtype.
        sum_of: computes the sum over some of them.
    """
    if like.dtype == torch.float64 or examples <= TOGETHER:
        return sum_of(slice(0, examples))
    step = max(_LEAST_TOGETHER, TOGETHER**2 // examples)
    total = sum_of(slice(0, step)).double()
    for start in range(step, examples, step):
        total += sum_of(slice(start, min(start + step, examples)))
    return total.to(like.dtype)


def added_products(
    signals: Float[Tensor, "places a"], weights: Float[Tensor, " places"], inputs: Float[Tensor, "places b"], terms: int
) -> Float[Tensor, "a b"]:
    """Sums outer products times weights; many of them in float64, for the reason given in `added_in_parts`.

    Args:
        signals: left factors.
        weights: weights of the products.
        inputs: right factors.
        terms: number of products of an example.
    """
    places = len(signals)
    if signals.dtype == torch.float64 or places * (places // terms) <= TOGETHER**2:
        return (signals * weights.unsqueeze(1)).T @ inputs
    if not signals.is_cpu:  # most GPUs have few units for float64
        return added_in_parts(
            places, signals, lambda part: (signals[part] * weights[part].unsqueeze(1)).T @ inputs[part]
        )
    total = signals.new_zeros(signals.shape[1], inputs.shape[1], dtype=torch.float64)
    for part in parts(places, 8 * (signals.shape[1] + inputs.shape[1]), signals):
        scaled = signals[part].double() * weights[part].double().unsqueeze(1)
        total.addmm_(scaled.T, inputs[part].double())
    return total.to(signals.dtype)


def squared_lengths(
    rows: Float[Tensor, "rows size"], mask: Bool[Tensor, " size"] | None = None
) -> Float[Tensor, " rows"]:
    """Squared norms in float64; rows that the kernel cannot read are squared in their own dtype, which may overflow.

    Args:
        rows: rows of some examples.
        mask: mask of a row; a number outside of it counts only if it is not finite.
    """
    table = NormTable(len(rows), rows)
    if rows.numel() and table.add(table.rows(rows, mask)) and (measured := table.factors()) is not None:
        return measured.squares
    return lengths(rows if mask is None else rows * mask).square()


BasisPiece = tuple[int, Tensor]
"""Start of a piece of a basis within a row, and its rows there [span, k]."""


def products_with(rows: Float[Tensor, "rows size"], pieces: Sequence[BasisPiece]) -> list[Float[Tensor, "rows _"]]:
    """Inner products of rows with the columns of each piece; entries outside of a piece count as zero."""
    return [product(rows[:, start : start + len(basis)], basis) for start, basis in pieces]


class FactoredGradient:
    """Gradients of a parameter, or of several that are computed together, for a batch of examples.

    Attributes:
        examples: number of rows.
        size: length of a row.
        like: any tensor of the term, for its dtype and device.
        scratch: temporary numbers per row that is formed.
    """

    examples: int
    size: int
    like: Tensor
    scratch: int

    def rows(self, index: slice | Int[Tensor, " some"]) -> Float[Tensor, "some size"]:
        """Returns the gradients of some examples, a row each."""
        raise NotImplementedError

    def weighted(self, factors: Float[Tensor, " rows"]) -> Tensor:
        """Returns the sum of all gradients times their factors: `size` numbers, flat or in the parameter's shape."""
        raise NotImplementedError

    def weighted_into(self, place: Float[Tensor, " size"], factors: Float[Tensor, " rows"]) -> None:
        """Writes `weighted` to a contiguous place."""
        values = self.weighted(factors)
        place.view(values.shape).copy_(values)

    def without(self, bad: Bool[Tensor, " rows"]) -> FactoredGradient:
        """Returns a copy with zeros for some examples, whatever their content (0 times infinity is not 0)."""
        raise NotImplementedError

    def enter(self, norms: NormTable, mask: Bool[Tensor, " size"] | bool) -> bool:
        """Enters the parts of the norms in a table; returns False if they are not rows, and the norm needs `squares`.

        Args:
            norms: the table.
            mask: coordinates of the norms; True for all, False for none, whose entries must only be finite.
        """
        return False

    def enter_sum(self, sums: SumTable, start: int) -> bool:
        """Enters rows for a weighted sum in a table; returns False if there are none, or another way is faster.

        Args:
            sums: the table.
            start: beginning of their part in the vector of sums.
        """
        return False

    def largest(self) -> Float[Tensor, " rows"]:
        """Upper bound of each row's largest absolute entry, in float64; infinite or NaN if a factor is not finite."""
        return torch.cat([rows.abs().amax(dim=1).double() for _, rows in self.chunks()])

    def squares(self) -> Squares:
        """Squared norms."""
        return self._measured_rows()

    def masked_squares(self, mask: Bool[Tensor, " size"]) -> Squares:
        """Squared norms of the masked rows."""
        return self._measured_rows(mask)

    def along(self, pieces: Sequence[BasisPiece]) -> tuple[list[Float[Tensor, "rows _"]], Float[Tensor, " rows"]]:
        """Inner products with the columns of each piece of a basis, and norms; rows are formed once for all pieces."""
        by_chunk = [(products_with(rows, pieces), row_norms(rows)) for _, rows in self.chunks(wide=True)]
        products, norms = zip(*by_chunk, strict=True)
        return [torch.cat(each) for each in zip(*products, strict=True)], torch.cat(norms)

    def inner(self, direction: Float[Tensor, " size"]) -> Float[Tensor, " rows"]:
        """Inner products with a direction, in float64."""
        products = [rows @ direction for _, rows in self.chunks(wide=True)]
        return torch.cat(products).double()

    def norms(self) -> Float[Tensor, " rows"]:
        """Norms in float64, up to the last few digits even if `squares` cancels."""
        return torch.cat([row_norms(rows) for _, rows in self.chunks()])

    def chunks(self, *, wide: bool = False) -> Iterator[tuple[slice, Tensor]]:
        """Yields all rows, a few examples at a time.

        Args:
            wide: chunks for matrix products, which are slow on few rows, rather than chunks that stay in the cache.
        """
        each = (self.size + self.scratch) * self.like.element_size()
        for part in parts(self.examples, each, self.like, wide=wide):
            yield part, self.rows(part)

    def _measured_rows(self, mask: Bool[Tensor, " size"] | None = None) -> Squares:
        return Squares.exact(torch.cat([squared_lengths(rows, mask) for _, rows in self.chunks()]))


def parts(examples: int, each: int, like: Tensor, *, wide: bool = False) -> Iterator[slice]:
    """Yields slices of examples whose rows fit a chunk.

    Args:
        examples: number of examples.
        each: bytes per example.
        like: tensor on the device.
        wide: chunks of sixteen times as many bytes on a CPU, of four times as many on a GPU.
    """
    if like.is_cuda:
        limit = max(_CHUNK_BYTES["cuda"], int(_CHUNK_SHARE * total_memory(like.device))) * (4 if wide else 1)
    else:
        limit = _CHUNK_BYTES.get(like.device.type, _CHUNK_BYTES["cuda"]) * (16 if wide else 1)
    step = max(1, min(examples, limit // max(1, each)))
    for start in range(0, examples, step):
        yield slice(start, min(start + step, examples))


class GradientRows(FactoredGradient):
    """Materialised gradients: of biases and normalisation layers, and of weights if they are worth keeping."""

    def __init__(self, values: Float[Tensor, "rows size"], measured: Float[Tensor, " rows"] | None = None) -> None:
        """Takes the rows, and their `squared_lengths` if already measured."""
        self.values = self.like = values
        self.examples, self.size = values.shape
        self.scratch, self._measured = 0, measured

    def rows(self, index: slice | Tensor) -> Tensor:
        """Returns the rows of some examples."""
        return self.values[index]

    def weighted(self, factors: Tensor) -> Tensor:
        """Sums by a few matrix-vector products."""
        return added_in_parts(self.examples, self.like, lambda part: factors[part] @ self.values[part])

    def enter(self, norms: NormTable, mask: Bool[Tensor, " size"] | bool) -> bool:
        """Enters the rows, and the masked rows."""
        under = -1 if isinstance(mask, bool) else norms.rows(self.values, mask)
        return norms.add(self.side(norms), counts=mask is not False, under=under)

    def side(self, norms: NormTable) -> int | None:
        """Returns the rows as a side of a table, or their squared norms if already measured."""
        return norms.rows(self.values) if self._measured is None else norms.squares(self._measured)

    def enter_sum(self, sums: SumTable, start: int) -> bool:
        """Enters the rows."""
        return sums.add(self.values, start)

    def without(self, bad: Tensor) -> GradientRows:
        """Returns a copy with zero rows for some examples."""
        return GradientRows(torch.where(bad.unsqueeze(1), 0.0, self.values))

    def squares(self) -> Squares:
        """Squared norms, in a single pass over the rows."""
        return Squares.exact(self._squared)

    def largest(self) -> Tensor:
        """Returns the norms, which bound the entries."""
        # Infinite if a square overflows: such a row is then inspected entry by entry (`BatchGradients._finite`).
        return self._squared.sqrt()

    def along(self, pieces: Sequence[BasisPiece]) -> tuple[list[Tensor], Tensor]:
        """A product for each piece, and a single pass for the norms."""
        return products_with(self.values, pieces), self.norms()

    def inner(self, direction: Tensor) -> Tensor:
        """Inner products by a matrix-vector product."""
        return (self.values @ direction).double()

    def norms(self) -> Tensor:
        """Norms in a single pass over the rows."""
        norms = self._squared.sqrt()
        # In float64 no square of a float32 overflows or vanishes.
        return norms if FactorKernel.usable(self.values) else row_norms(self.values, norms)

    @cached_property
    def _squared(self) -> Tensor:
        # Cached: the bound, the remainder outside of a subspace and the check for finite values share this pass.
        return squared_lengths(self.values) if self._measured is None else self._measured


class Lookup(FactoredGradient):
    """Gradients of an embedding: each example adds its signals to the vocabulary entries that it looked up."""

    def __init__(
        self, entries: Int[Tensor, "rows t"], signals: Float[Tensor, "rows t width"], *, vocabulary: int
    ) -> None:
        """Takes vocabulary indices and the loss's gradient at the looked-up vectors."""
        self.entries, self.signals, self.vocabulary = entries, signals, vocabulary
        self.like, self.examples, self.size = signals, len(signals), vocabulary * signals.shape[2]
        self.scratch = signals[0].numel()

    def rows(self, index: slice | Tensor) -> Tensor:
        """Each example's signals, summed by vocabulary entry."""
        entries, signals = self.entries[index], self.signals[index]
        count, width = len(entries), signals.shape[2]
        # A single scatter into a table for all examples: entry v of example n is at row n * vocabulary + v.
        offset = torch.arange(count, device=entries.device).unsqueeze(1) * self.vocabulary
        rows = signals.new_zeros(count * self.vocabulary, width)
        return rows.index_add_(0, (entries + offset).flatten(), signals.flatten(0, 1)).view(count, self.size)

    def weighted(self, factors: Tensor) -> Tensor:
        """A single scatter for all examples, in float64."""
        scaled = (self.signals.double() * factors.view(-1, 1, 1)).flatten(0, 1)
        total = scaled.new_zeros(self.vocabulary, self.signals.shape[2])
        return total.index_add_(0, self.entries.flatten(), scaled).flatten().to(self.like.dtype)

    def without(self, bad: Tensor) -> Lookup:
        """Returns a copy with zero signals for some examples."""
        return Lookup(self.entries, torch.where(bad.view(-1, 1, 1), 0.0, self.signals), vocabulary=self.vocabulary)

    def inner(self, direction: Tensor) -> Tensor:
        """Inner products of each position's signal with the direction's entry that it looked up."""
        looked_up = direction.view(self.vocabulary, -1)[self.entries]
        return (looked_up * self.signals).sum(dim=(1, 2), dtype=torch.float64)

    def largest(self) -> Tensor:
        """Returns the sum of the signals' absolute values."""
        return self.signals.abs().sum(dim=(1, 2)).double()

    def squares(self) -> Squares:
        """Squared norms from inner products between positions: no row of the vocabulary's length is formed."""
        part_squares = []
        each = 3 * self.entries.shape[1] ** 2 * 8
        for part in parts(self.examples, each, self.like):
            entries, signals = self.entries[part], self.signals[part]
            # sum_tu [entry_t = entry_u] <s_t, s_u>: the Gram formula of a linear layer whose inputs are one-hot.
            same = (entries.unsqueeze(1) == entries.unsqueeze(2)).double()
            part_squares.append(gram_squares(gram(signals), same, signals.dtype))
        return joined(part_squares)


class FromRows(FactoredGradient):
    """Gradients that are computed from other gradients, which may largely cancel.

    Rounding in a weighted sum of cancelling terms may exceed the result. Norms are therefore computed from rows, and so
    is the weighted sum once a norm was needed.
    """

    _bounded: bool = False

    def squares(self) -> Squares:
        """Squared norms of rows."""
        self._bounded = True
        return super().squares()

    def masked_squares(self, mask: Bool[Tensor, " size"]) -> Squares:
        """Squared norms of masked rows."""
        self._bounded = True
        return super().masked_squares(mask)

    def weighted(self, factors: Tensor) -> Tensor:
        """Weighted sum of rows; computed from their terms if no norm was taken."""
        if not self._bounded:
            return self._at_once(factors)
        total = self.like.new_zeros(self.size, dtype=torch.float64)
        for part, rows in self.chunks():
            total += GradientRows(rows).weighted(factors[part])
        return total.to(self.like.dtype)

    def without(self, bad: Tensor) -> FromRows:
        """Returns a copy with zeros for some examples."""
        good = self._rest(bad)
        good._bounded = self._bounded
        return good

    def _at_once(self, factors: Tensor) -> Tensor:
        raise NotImplementedError

    def _rest(self, bad: Tensor) -> FromRows:
        raise NotImplementedError


class Summed(FromRows):
    """Gradients of a parameter that is used several times: their sum, whose norm is computed from rows.

    The norms of the uses do not determine the norm of their sum; its cross terms would need every pair of uses.
    """

    def __init__(self, terms: Sequence[FactoredGradient]) -> None:
        """Takes a term for each use."""
        self.terms = tuple(terms)
        self.like, self.examples, self.size = terms[0].like, terms[0].examples, terms[0].size
        self.scratch = sum(term.size + term.scratch for term in terms)

    def rows(self, index: slice | Tensor) -> Tensor:
        """Sums of the uses' rows."""
        return torch.stack([term.rows(index) for term in self.terms]).sum(dim=0)

    def _at_once(self, factors: Tensor) -> Tensor:
        """Sums of the uses' weighted sums."""
        return torch.stack([term.weighted(factors).reshape(-1) for term in self.terms]).sum(dim=0)

    def inner(self, direction: Tensor) -> Tensor:
        """Sums of the uses' inner products."""
        return torch.stack([term.inner(direction) for term in self.terms]).sum(dim=0)

    def largest(self) -> Tensor:
        """Sums of the uses' bounds."""
        return torch.stack([term.largest() for term in self.terms]).sum(dim=0)

    def _rest(self, bad: Tensor) -> Summed:
        """Zeros in every use."""
        return Summed([term.without(bad) for term in self.terms])


class Mapped(FromRows):
    """Gradients of the parameters that a weight is computed from (weight norm, standardisation), by the chain rule."""

    def __init__(self, base: FactoredGradient, pull: Callable[[Tensor], Tensor], size: int) -> None:
        """Takes the gradients of the weight, and the transposed Jacobian of the parametrisation.

        Args:
            base: gradients of the weight itself.
            pull: vector-Jacobian product, from vectors of `base`'s size to vectors of this term's; works under vmap.
            size: length of this term's rows.
        """
        self.base, self.pull, self.size = base, pull, size
        self.like, self.examples, self.scratch = base.like, base.examples, base.scratch + 2 * base.size

    def rows(self, index: slice | Tensor) -> Tensor:
        """Maps every row by the transposed Jacobian."""
        with warnings.catch_warnings():
            # Weight norm has no batching rule of its own: torch falls back to a loop, and warns of it.
            warnings.filterwarnings("ignore", "There is a performance drop because we have not yet", UserWarning)
            return torch.vmap(self.pull)(self.base.rows(index))

    def _at_once(self, factors: Tensor) -> Tensor:
        """Pulls the weighted sum back once, because the chain rule is linear."""
        return self.pull(self.base.weighted(factors).reshape(-1))

    def _rest(self, bad: Tensor) -> Mapped:
        """Zeros for the weight's gradients, which the chain rule maps to zero."""
        return Mapped(self.base.without(bad), self.pull, self.size)


def joined(squares: Sequence[Squares]) -> Squares:
    """Concatenates squares of consecutive chunks."""
    return Squares(torch.cat([s.value for s in squares]), torch.cat([s.slack for s in squares]))


def product_size(inputs: Tensor, signals: Tensor) -> Float[Tensor, " rows"]:
    """Upper bound of the largest entry of a product of factors: |x| |s| by Cauchy-Schwarz, in float64."""
    first, second = (lengths(values.flatten(1)) for values in (inputs, signals))
    return first * second
