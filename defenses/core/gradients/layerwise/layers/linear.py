"""Gradients of a linear layer: an outer product per example, or a sum of them over a sequence.

Norms without the product: |s xᵀ|² = |s|²|x|² (Goodfellow, "Efficient Per-Example Gradient Computations", 2015), and
under a mask M that all examples share |M ∘ (s xᵀ)|² = (s∘s)ᵀ M (x∘x).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from ....kernels.bound_factors import NormTable
from ....kernels.product_norms import ProductKernel
from ....kernels.row_products import RowProducts
from ....kernels.weighted_rows import SumTable
from ....plan.linear_algebra.products import outer_products, product
from ...numerics.full_precision import product_precision, reduced
from ..cost import Shape, Strategy, cheapest
from ..factors import (
    TOGETHER,
    BasisPiece,
    FactoredGradient,
    GradientRows,
    Squares,
    Summed,
    added_products,
    gram,
    gram_squares,
    joined,
    parts,
    product_size,
    recomputed,
    squared_lengths,
)
from .compiled_rows import product_flops, product_squares
from .convolution_settings import Geometry

_MANY = 16  # directions, from which on a kernel that forms outer products in the cache beats two products
# A sum of squares is trusted if it is at least this many times the largest amount that underflow may have removed.
_CERTAIN = 1e6
# Outputs multiplied with a mask at a time: MKL adds sequentially, and for similar numbers float32 loses 1e-5 of a sum
# of a thousand, 1e-3 of a sum of a hundred thousand.
_STRIP = 256


class Outer(FactoredGradient):
    """Gradients of a weight that each example uses once: s xᵀ."""

    def __init__(
        self, inputs: Float[Tensor, "rows in"], signals: Float[Tensor, "rows out"], bias: GradientRows | None = None
    ) -> None:
        """Takes the layer's input and the loss's gradient at its output, which is also the rows of the bias."""
        self.inputs, self.signals = inputs, signals
        self._sides = GradientRows(inputs), bias or GradientRows(signals)
        self.like, self.examples = signals, signals.shape[0]
        self.size, self.scratch = signals.shape[1] * inputs.shape[1], 0

    def rows(self, index: slice | Tensor) -> Tensor:
        """Outer products, [out, in] flattened."""
        return (self.signals[index].unsqueeze(2) * self.inputs[index].unsqueeze(1)).flatten(1)

    def weighted(self, factors: Tensor) -> Tensor:
        """Weighted sum by a single product over the batch."""
        return added_products(self.signals, factors, self.inputs, 1).flatten()

    def weighted_into(self, place: Float[Tensor, " size"], factors: Tensor) -> None:
        """Writes the weighted sum in place, by a single product."""
        if self.examples > TOGETHER:
            return super().weighted_into(place, factors)
        scaled = self.signals * factors.unsqueeze(1)
        torch.mm(scaled.T, self.inputs, out=place.view(self.signals.shape[1], self.inputs.shape[1]))

    def enter(self, norms: NormTable, mask: Bool[Tensor, " size"] | bool) -> bool:
        """Enters both factors and, if a mask keeps a part of the product, its weights of the inputs' squares."""
        first, second = (side.side(norms) for side in self._sides)
        if isinstance(mask, bool):
            return norms.add(first, second, counts=mask)
        out, entering = self.signals.shape[1], self.inputs.shape[1]
        if out > _STRIP:
            return norms.add(first, second, under=norms.squares(self.masked_squares(mask).value))
        weights = self.signals.square() @ mask.view(out, entering).to(self.like)
        return norms.add(first, second, under=norms.weighted(self.inputs, weights))

    def enter_sum(self, sums: SumTable, start: int) -> bool:
        """Enters both factors."""
        return sums.outer(self.signals, self.inputs, start)

    def without(self, bad: Tensor) -> Outer:
        """Returns a copy with zeros in both factors."""
        gone = bad.unsqueeze(1)
        return Outer(torch.where(gone, 0.0, self.inputs), torch.where(gone, 0.0, self.signals))

    def largest(self) -> Tensor:
        """Upper bound from the factors' norms."""
        return product_size(self.inputs, self.signals)

    def norms(self) -> Tensor:
        """Norms |s| |x|, each in float64, where no square of a float32 overflows."""
        first, second = self._sides
        return first.norms() * second.norms()

    def squares(self) -> Squares:
        """Squares of the norms, in which nothing cancels."""
        value = self.norms().square()
        return Squares(value, self._vanished() if self.like.dtype == torch.float64 else None)

    def masked_squares(self, mask: Bool[Tensor, " size"]) -> Squares:
        """(s∘s)ᵀ M (x∘x): a product with the mask, no gradient is formed."""
        out, entering = self.signals.shape[1], self.inputs.shape[1]
        kept = mask.view(out, entering)
        if self.like.device.type != "cpu":  # waiting for a result on a GPU takes longer than float64
            return Squares.exact(_masked(self.signals, self.inputs, kept, torch.float64))
        squares, lost = _masked(self.signals, self.inputs, kept, self.like.dtype), self._vanished()
        if self.like.dtype == torch.float64:
            return Squares(squares, lost)
        doubtful = ~((squares >= _CERTAIN * lost) & (squares <= torch.finfo(self.like.dtype).max))
        if bool(doubtful.any()):
            squares[doubtful] = _masked(self.signals[doubtful], self.inputs[doubtful], kept, torch.float64)
        return Squares.exact(squares)

    def _vanished(self) -> Float[Tensor, " rows"]:
        """Upper bound of what underflow may have removed from the squared norms."""
        x, s = (side.norms().square() for side in self._sides)
        out, entering = self.signals.shape[1], self.inputs.shape[1]
        return torch.finfo(self.like.dtype).tiny * (out * x + entering * (s + -(-out // _STRIP)))

    def inner(self, direction: Float[Tensor, " size"]) -> Float[Tensor, " rows"]:
        """sᵀ U x: inputs through the direction in the weight's place, times the signals."""
        through = self.inputs @ direction.view(self.signals.shape[1], self.inputs.shape[1]).T
        return (through * self.signals).sum(dim=1, dtype=torch.float64)

    def along(self, pieces: Sequence[BasisPiece]) -> tuple[list[Tensor], Tensor]:
        """sᵀ B_k x for every direction: a product with all directions, then a product with the signals."""
        return [self._products(start, basis) for start, basis in pieces], self.norms()

    def _products(self, start: int, basis: Float[Tensor, "span k"]) -> Float[Tensor, "rows k"]:
        """Inner products with a piece of a basis, for the outputs that it covers."""
        if basis.shape[1] >= _MANY and RowProducts.usable(self.signals, self.inputs, basis.T):
            return outer_products(self.signals, self.inputs, start, basis)
        width, stop, directions = self.inputs.shape[1], start + len(basis), basis.shape[1]
        first, last = start // width, -(-stop // width)
        outputs, turned = last - first, basis.T
        if (before := start - first * width) | (behind := last * width - stop):
            turned = F.pad(turned, (before, behind))
        # Public gradients that are zero span no direction, so `directions` may be 0.
        signals, products = self.signals[:, first:last].unsqueeze(2), [self.like.new_zeros(self.examples, 0)]
        # Between the two products there are [rows, k, out] numbers, which should stay in the cache.
        for part in parts(directions, 2 * outputs * self.examples * self.like.element_size(), self.like):
            # A view of directions that lie first in memory (`basis.py`): a product by outputs would copy inputs for
            # each.
            wide = turned[part].reshape(-1, width).T
            inner = product(self.inputs, wide).unflatten(1, (-1, outputs))
            products.append(torch.bmm(inner, signals).squeeze(2))
        return torch.cat(products, dim=1)


def _masked(
    signals: Float[Tensor, "rows out"],
    inputs: Float[Tensor, "rows in"],
    kept: Bool[Tensor, "out in"],
    within: torch.dtype,
) -> Float[Tensor, " rows"]:
    leaving, entering = (values.to(within).square() for values in (signals, inputs))
    squares = signals.new_zeros(signals.shape[0], dtype=torch.float64)
    for start in range(0, signals.shape[1], _STRIP):
        part = slice(start, start + _STRIP)
        squares += (leaving[:, part] @ kept[part].to(within)).mul_(entering).sum(dim=1)
    return squares


class OuterSum(FactoredGradient):
    """Gradients of a weight that each example uses at several positions: the sum of s_t x_tᵀ."""

    def __init__(
        self,
        inputs: Float[Tensor, "rows t in"],
        signals: Float[Tensor, "rows t out"],
        buffers: Callable[[int, Tensor], Tensor] | None = None,
    ) -> None:
        """Takes the input and the loss's gradient at the output, position by position.

        Args:
            inputs: the layer's input.
            signals: the loss's gradient at the output.
            buffers: source of memory for kept rows; fresh memory if None.
        """
        self.inputs, self.signals = inputs, signals
        self._buffers = buffers or (lambda numbers, like: like.new_empty(numbers))
        self.like, self.examples = signals, signals.shape[0]
        self.size, self.scratch = signals.shape[2] * inputs.shape[2], 0
        self._kept: GradientRows | None = None

    def rows(self, index: slice | Tensor) -> Tensor:
        """Sums of products, [out, in] flattened."""
        return torch.bmm(self.signals[index].mT, self.inputs[index]).flatten(1)

    def weighted(self, factors: Tensor) -> Tensor:
        """From the rows if they were kept, otherwise a single product over all positions of the batch."""
        if self._kept is not None:
            return self._kept.weighted(factors)
        positions = self.inputs.shape[1]
        weights = factors.repeat_interleave(positions)
        signals, inputs = (values.flatten(0, 1) for values in (self.signals, self.inputs))
        return added_products(signals, weights, inputs, positions).flatten()

    def without(self, bad: Tensor) -> OuterSum:
        """Returns a copy with zeros in both factors."""
        gone = bad.view(-1, 1, 1)
        good = OuterSum(torch.where(gone, 0.0, self.inputs), torch.where(gone, 0.0, self.signals))
        good._kept = None if self._kept is None else self._kept.without(bad)
        return good

    def largest(self) -> Tensor:
        """Upper bound from the factors' norms."""
        return product_size(self.inputs, self.signals)

    def squares(self) -> Squares:
        """Squared norms by the cheapest formula of `cost.py`."""
        strategy = cheapest(self._shape, self.like.device.type)
        if strategy is Strategy.PAIRS:
            pair_squares = product_squares(*self._images, self._geometry)
            if pair_squares is not None:
                return pair_squares
        if strategy in (Strategy.GRAM, Strategy.PAIRS):
            positions = self.inputs.shape[1]
            each = 8 * (2 * positions**2 + positions * (self.inputs.shape[2] + self.signals.shape[2]))
            pairs = ((self.inputs[part], self.signals[part]) for part in parts(self.examples, each, self.like))
            return joined([gram_squares(gram(x), gram(s), s.dtype) for x, s in pairs])
        if strategy is Strategy.KEEP:
            self._kept = self._all_rows()
            return self._kept.squares()
        return recomputed(super().squares().value, self.inputs, self.signals)

    def masked_squares(self, mask: Tensor) -> Squares:
        """Squared norms of masked rows: |M ∘ sum_t s_t x_tᵀ|² has cross terms, so `Outer`'s formula does not hold."""
        return recomputed(super().masked_squares(mask).value, self.inputs, self.signals)

    def inner(self, direction: Float[Tensor, " size"]) -> Float[Tensor, " rows"]:
        """From the rows if they were kept, otherwise as for a single position, position by position."""
        if self._kept is not None:
            return self._kept.inner(direction)
        through = self.inputs @ direction.view(self.signals.shape[2], self.inputs.shape[2]).T
        return (through * self.signals).sum(dim=(1, 2), dtype=torch.float64)

    def formed(self) -> FactoredGradient:
        """Returns the rows if norms and sums are computed from them and passes are in TF32; else itself."""
        if not reduced() or cheapest(self._shape, self.like.device.type) is not Strategy.KEEP:
            return self
        with product_precision():  # from here on, whatever is computed is computed from these rows
            return self._all_rows()

    def _all_rows(self) -> GradientRows:
        """Returns all rows, on a CPU with their norms, which are measured while a chunk is in the cache."""
        rows = self._buffers(self.examples * self.size, self.like).view(self.examples, self.size)
        out, entering = self.signals.shape[2], self.inputs.shape[2]
        measured: list[Tensor] = []
        for part in parts(self.examples, self.size * self.like.element_size(), self.like):
            torch.bmm(self.signals[part].mT, self.inputs[part], out=rows[part].view(-1, out, entering))
            if rows.is_cpu:
                measured.append(squared_lengths(rows[part]))
        return GradientRows(rows, torch.cat(measured) if measured else None)

    @property
    def _shape(self) -> Shape:
        _, positions, inputs = self.inputs.shape
        outputs = self.signals.shape[2]
        stored = positions * (inputs + outputs)
        compiled = positions > 0 and ProductKernel.usable(*self._images)
        products = product_flops(self._geometry, (1, positions), (1, positions)) if compiled else None
        return Shape(
            positions=positions, inputs=inputs, outputs=outputs, stored=stored, patched=False, products=products
        )

    @property
    def _images(self) -> tuple[Tensor, Tensor]:
        """Returns input and derivatives as those of a convolution with a kernel of one pixel."""
        return self.inputs.mT.unsqueeze(2), self.signals.mT.unsqueeze(2)

    @property
    def _geometry(self) -> Geometry:
        channels, ones = (self.inputs.shape[2], self.signals.shape[2]), (1, 1)
        return Geometry(channels=channels, kernel=ones, stride=ones, dilation=ones, padding=(0, 0, 0, 0), groups=1)


def added(terms: Sequence[FactoredGradient]) -> FactoredGradient:
    """Returns the sum of a parameter's gradients from several uses.

    Uses by linear layers are positions of a single one, as of a recurrent cell that is called in a loop. Formed rows
    are added up. Others are combined by `Summed`, which forms the rows of each.

    Args:
        terms: gradients of each use, of equal sizes.
    """
    if len(terms) == 1:
        return terms[0]
    outers = [term for term in terms if isinstance(term, Outer | OuterSum)]
    if len(outers) == len(terms) and len({term.inputs.shape[-1] for term in outers}) == 1:
        inputs, signals = (
            torch.cat([each.unsqueeze(1) if each.dim() == 2 else each for each in factors], dim=1)
            for factors in ([term.inputs for term in outers], [term.signals for term in outers])
        )
        return OuterSum(inputs, signals)
    formed = [term.values for term in terms if isinstance(term, GradientRows)]
    return GradientRows(torch.stack(formed).sum(dim=0)) if len(formed) == len(terms) else Summed(terms)
