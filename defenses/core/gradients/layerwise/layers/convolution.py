"""Per-example gradients of a convolution's weight: sums over positions of output gradient times patch.

Rows are computed by products of patches (`patch_rows.py`) or by compiled kernels (`compiled_rows.py`); norms without
rows come from inner products between positions, for which there is a compiled kernel too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F
from torch.nn.grad import conv2d_weight

from ....kernels.convolution_rows import RowKernel
from ....kernels.product_norms import ProductKernel
from ....plan.bound import row_norms
from ....plan.linear_algebra.products import product
from ....plan.public_data import RowSizes
from ...numerics.full_precision import device_type, product_precision
from ..cost import Shape, Strategy, Summation, cheapest, estimates, made_by_kernel, summation
from ..factors import (
    BasisPiece,
    FactoredGradient,
    Squares,
    added_in_parts,
    gram,
    gram_squares,
    joined,
    parts,
    product_size,
    recomputed,
    squared_lengths,
)
from . import winograd as tiles
from .compiled_rows import CompiledRows, product_flops, product_squares, row_kernel
from .convolution_settings import Geometry
from .kept_rows import KeptRows, along
from .patch_rows import PatchProducts


class Convolution(FactoredGradient):
    """Gradients of a convolution's weight, [out, in / groups, height, width] flattened."""

    def __init__(
        self,
        inputs: Float[Tensor, "images channels height width"],
        signals: Float[Tensor, "images out rows columns"],
        geometry: Geometry,
        *,
        views: int = 1,
        buffers: Callable[[int, Tensor], Tensor] | None = None,
    ) -> None:
        """Takes the layer's input and the loss's gradient at its output.

        Args:
            inputs: the layer's input, before padding.
            signals: the loss's gradient at the output.
            geometry: settings of the layer.
            views: adjacent images that belong to an example.
            buffers: source of memory for kept rows; fresh memory if None.
        """
        self.inputs, self.signals, self.geometry, self.views = inputs, signals, geometry, views
        self._buffers = buffers or (lambda numbers, like: like.new_empty(numbers))
        self.like, self.examples = signals, len(signals) // views
        self.size = torch.Size(geometry.weight_shape).numel()
        self._kept: KeptRows | None = None

    @cached_property
    def _patches(self) -> PatchProducts:
        return PatchProducts(self.inputs, self.signals, self.geometry, self.views)

    @cached_property
    def _maker(self) -> PatchProducts | CompiledRows:
        """Method that computes rows."""
        if self._plan.compiled:
            compiled = CompiledRows(self.inputs, self.signals, self.geometry, self.views)
            if compiled.kernel.agrees:
                return compiled
        return self._patches

    @property
    def scratch(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]  that of what makes the rows
        """Temporary numbers per row that is formed."""
        return self._maker.scratch

    def rows(self, index: slice | Tensor) -> Tensor:
        """Rows in the weight's own order."""
        return self._maker.order.in_order(self._maker.made(index))

    def chunks(self, *, wide: bool = False) -> Iterator[tuple[slice, Tensor]]:
        """Yields all rows, in chunks that suit the method that computes them."""
        for part in self._maker.parts(wide=wide):
            yield part, self.rows(part)

    def weighted(self, factors: Tensor) -> Float[Tensor, "leaving entering height width"]:
        """Weighted sum from kept rows, or recomputed by Winograd's tiles or the vendor's kernel."""
        if self._kept is not None:
            return self._kept.weighted(factors)
        return added_in_parts(self.examples, self.like, lambda part: self._some(part)._added(factors[part]))

    def _some(self, index: slice) -> Convolution:
        """Returns the gradients of some examples."""
        if index == slice(0, self.examples):
            return self
        images = slice(index.start * self.views, index.stop * self.views)
        return Convolution(self.inputs[images], self.signals[images], self.geometry, views=self.views)

    def _added(self, factors: Float[Tensor, " rows"]) -> Float[Tensor, "leaving entering height width"]:
        g = self.geometry
        factors = factors.repeat_interleave(self.views)
        _, _, rows, columns = self.signals.shape
        if self._summation is Summation.TILES:
            each = tiles.factor_numbers(rows, columns, sum(g.channels)) * self.like.element_size()
            return tiles.summed(len(self.signals), lambda images: self._tiled(images, factors), each)
        scaled = self.signals * factors.view(-1, 1, 1, 1)
        top, bottom, left, right = g.padding
        symmetric = top == bottom and left == right
        # conv2d pads both sides of a dimension alike; "same" with an even kernel does not.
        inputs = self.inputs if symmetric else F.pad(self.inputs, (left, right, top, bottom))
        padding = (top, left) if symmetric else (0, 0)
        # Typed as a number for both dimensions, but accepts a pair as every convolution does.
        settings: Any = (g.stride, padding, g.dilation, g.groups)
        return conv2d_weight(inputs, g.weight_shape, scaled, *settings)

    def without(self, bad: Tensor) -> Convolution:
        """Returns a copy with zeros in both factors."""
        gone = bad.repeat_interleave(self.views).view(-1, 1, 1, 1)
        inputs, signals = (torch.where(gone, 0.0, values) for values in (self.inputs, self.signals))
        good = Convolution(inputs, signals, self.geometry, views=self.views)
        good._kept = None if self._kept is None else self._kept.without(bad)
        return good

    def largest(self) -> Tensor:
        """Upper bound from the factors' norms: an entry sums products in which a pixel occurs at most once."""
        first, second = (v.permute(0, 2, 3, 1).reshape(self.examples, -1) for v in (self.inputs, self.signals))
        return product_size(first, second)

    def squares(self) -> Squares:
        """Squared norms by the cheapest formula of `cost.py`; rows that are kept already are not computed again."""
        if self._kept is not None:
            return self._kept.squares()
        strategy = self._plan.way
        if strategy is Strategy.PAIRS:
            pair_squares = product_squares(self.inputs, self.signals, self.geometry)
            if pair_squares is not None:
                return pair_squares
            strategy = Strategy.PIXELS
        if strategy in (Strategy.GRAM, Strategy.PIXELS):
            return self._by_products(strategy)
        return self._of_rows(keep=strategy is Strategy.KEEP)

    def masked_squares(self, mask: Tensor) -> Squares:
        """Squared norms from rows, because inner products between positions admit no mask; rows are kept if cheaper."""
        if (kept := self._kept_if_cheaper()) is not None:
            return kept.masked_squares(mask)
        chunks, ordered = map(self._maker.made, self._maker.parts()), self._maker.order.ordered(mask)
        return self._recomputed(torch.cat([squared_lengths(rows, ordered) for rows in chunks]))

    def along(self, pieces: Sequence[BasisPiece]) -> tuple[list[Tensor], Tensor]:
        """Inner products and norms from rows as they are computed, kept if cheaper."""
        if (kept := self._kept_if_cheaper()) is not None:
            return kept.along(pieces)
        chunks = (self._maker.made(part) for part in self._maker.parts(wide=True))
        by_chunk = ((along(self._maker.order, rows, pieces), row_norms(rows)) for rows in chunks)
        products, norms = zip(*by_chunk, strict=True)
        return [torch.cat(each) for each in zip(*products, strict=True)], torch.cat(norms)

    @property
    def made_as(self) -> RowSizes:
        """Sizes of the order in which rows are computed."""
        return self._maker.order.sizes

    def made(self) -> Tensor:
        """Returns all rows, in that order."""
        return self._kept.made() if self._kept is not None else self._maker.made(slice(None))

    def along_made(self, directions: Float[Tensor, "size k"]) -> tuple[Tensor, Tensor]:
        """Inner products with directions in that order, from rows as they are computed, and norms."""
        if (kept := self._kept_if_cheaper()) is not None:
            return kept.along_made(directions)
        chunks = (self._maker.made(part) for part in self._maker.parts(wide=True))
        by_chunk = ((product(rows, directions), row_norms(rows)) for rows in chunks)
        products, norms = zip(*by_chunk, strict=True)
        return torch.cat(products), torch.cat(norms)

    def _kept_if_cheaper(self) -> KeptRows | None:
        """Returns the kept rows, which are formed if none are and keeping them for the sum is cheaper; else None."""
        if self._kept is None and self._worth_keeping:
            self._of_rows(keep=True)
        return self._kept

    @property
    def _worth_keeping(self) -> bool:
        """Returns whether rows that have to be formed are kept for the sum."""
        costs = estimates(self.shape, self.like.device.type)
        return costs.get(Strategy.KEEP, math.inf) <= costs[Strategy.FREE]

    def inner(self, direction: Float[Tensor, " size"]) -> Float[Tensor, " rows"]:
        """From the rows if they were kept, otherwise a convolution with the direction in the weight's place."""
        if self._kept is not None:
            return self._kept.inner(direction)
        g = self.geometry
        top, bottom, left, right = g.padding
        inputs = F.pad(self.inputs, (left, right, top, bottom)) if any(g.padding) else self.inputs
        through = F.conv2d(inputs, direction.view(g.weight_shape), None, g.stride, 0, g.dilation, g.groups)
        products = (through * self.signals).sum(dim=(1, 2, 3), dtype=torch.float64)
        return products.unflatten(0, (self.examples, self.views)).sum(dim=1)

    def formed(self) -> FactoredGradient:
        """Returns the rows, if norms and sums are computed from them; else itself.

        Forming rows during the backward pass reads tensors that are still in the cache, and lets the pass free them.
        """
        if self._plan.way is not Strategy.KEEP:
            return self
        with product_precision():  # from here on, whatever is computed is computed from these rows
            self._of_rows(keep=True)
        return self._kept or self

    def _of_rows(self, *, keep: bool) -> Squares:
        """Squared norms of rows, which are kept for the sum or freed at once."""
        kept = self._buffers(self.examples * self.size, self.like).view(self.examples, self.size) if keep else None
        value = self._maker.squares(kept)
        if kept is None:
            return self._recomputed(value)
        self._kept = KeptRows(kept, self._maker.order, value)
        return Squares.exact(value)

    def _recomputed(self, value: Tensor) -> Squares:
        # In the order in which they lie in memory: a view, no copy.
        inputs = self.inputs.permute(0, 2, 3, 1).reshape(self.examples, -1)
        signals = self.signals.permute(0, 2, 3, 1).reshape(self.examples, -1, self.geometry.channels[1])
        overlap = self.geometry.kernel[0] * self.geometry.kernel[1]
        return recomputed(
            value, inputs, signals, overlap * tiles.GROWTH**2 if self._summation is Summation.TILES else overlap
        )

    @property
    def shape(self) -> Shape:
        """Returns the sizes that the cost model uses."""
        return self._plan.shape

    @cached_property
    def _plan(self) -> _Plan:
        (_, _, *inputs), (_, _, *signals), like = self.inputs.shape, self.signals.shape, self.like
        one_group = self.geometry.groups == 1  # a group of several has too few channels for a kernel's vectors
        rows, norms = (one_group and kernel.usable(self.inputs, self.signals) for kernel in (RowKernel, ProductKernel))
        # Needed for every layer in every step, hence a single cache look-up.
        sizes = (self.geometry, tuple(inputs), tuple(signals), self.views)
        return _planned((cheapest, made_by_kernel), *sizes, like.dtype, device_type(like), rows, norms)

    @property
    def _summation(self) -> Summation:
        return summation(self.shape, self.like.device.type)

    @property
    def _positions(self) -> int:
        return self.signals.shape[2] * self.signals.shape[3]

    def _tiled(self, images: slice, factors: Tensor) -> tuple[Tensor, Tensor]:
        """Returns some images' inputs and weighted signals, channels last, padded to even height and width."""
        inputs, signals = (values[images].permute(0, 2, 3, 1) for values in (self.inputs, self.signals))
        signals = signals * factors[images].view(-1, 1, 1, 1)
        below, beside = (size % 2 for size in signals.shape[1:3])
        top, bottom, left, right = self.geometry.padding
        # Zero-padded output gradients add nothing, whatever the inputs there.
        if below or beside:
            signals = F.pad(signals, (0, 0, 0, beside, 0, below))
        return F.pad(inputs, (0, 0, left, right + beside, top, bottom + below)), signals

    def _by_products(self, strategy: Strategy) -> Squares:
        """Squared norms from inner products between positions."""
        positions = self.views * self._positions
        numbers = 2 * self.geometry.groups * positions**2
        if strategy is Strategy.PIXELS:
            numbers += 2 * (self.shape.pixels or 0) ** 2
        else:
            numbers += positions * self.shape.inputs * self.geometry.groups
        each = 8 * numbers
        part_squares = []
        for part in parts(self.examples, each, self.like):
            inputs, signals = self._patches.images(part)
            if strategy is Strategy.PIXELS:
                both = self._pixel_products(inputs, signals), gram(signals.flatten(1, 2))
                part_squares.append(gram_squares(*both, self.like.dtype))
            else:
                patches, grouped = (
                    self._by_example(values)
                    for values in (self._patches.unfolded(inputs, signals), self._patches.by_group(signals))
                )
                group_squares = gram_squares(gram(patches), gram(grouped), self.like.dtype)
                # Groups fill different entries of the weight, so their squares add up.
                groups = (-1, self.geometry.groups)
                part_squares.append(
                    Squares(group_squares.value.view(groups).sum(dim=1), group_squares.slack.view(groups).sum(dim=1))
                )
        return joined(part_squares)

    def _by_example(self, values: Float[Tensor, "parts positions width"]) -> Tensor:
        """Merges the positions of all views of an example: [examples * groups, views * positions, width]."""
        if self.views == 1:
            return values
        split = values.unflatten(0, (-1, self.views, self.geometry.groups))
        return split.transpose(1, 2).flatten(2, 3).flatten(0, 1)

    def _pixel_products(self, inputs: Tensor, signals: Tensor) -> Float[Tensor, "some positions positions"]:
        """Inner products of patches: <patch_t, patch_u> = sum over kernel offsets k of <pixel_(t+k), pixel_(u+k)>.

        Separable, so a kernel of height h and width w takes h + w passes rather than h * w.
        """
        g, (_, high, wide, _) = self.geometry, inputs.shape
        _, rows, columns, _ = signals.shape
        products = gram(inputs.flatten(1, 2)).unflatten(2, (high, wide)).unflatten(1, (high, wide))

        def along(values: Tensor, first: int, count: int, size: int, stride: int, dilation: int) -> Tensor:
            total: Tensor | None = None
            for offset in range(0, size * dilation, dilation):
                span = slice(offset, offset + stride * (count - 1) + 1, stride)
                index = [slice(None)] * 5
                index[first] = index[first + 2] = span  # both pixels of a pair move by the same offset
                shifted = values[tuple(index)]
                total = shifted.clone() if total is None else total.add_(shifted)
            assert total is not None  # noqa: S101  a kernel has at least one row and one column
            return total

        summed = along(products, 1, rows, g.kernel[0], g.stride[0], g.dilation[0])
        summed = along(summed, 2, columns, g.kernel[1], g.stride[1], g.dilation[1])
        return summed.reshape(len(inputs), rows * columns, rows * columns)


class _Plan(NamedTuple):
    """Choice of the formulas for a layer's norms and rows.

    Attributes:
        shape: the sizes given to the cost model.
        way: the formula that it selected.
        compiled: True if rows, when needed, are computed by a compiled kernel that passes its check.
    """

    shape: Shape
    way: Strategy
    compiled: bool


@lru_cache(maxsize=1024)
def _planned(
    choices: tuple[Callable[[Shape, str], Strategy], Callable[[Shape, str], bool]],
    g: Geometry,
    inputs: tuple[int, int],
    signals: tuple[int, int],
    views: int,
    dtype: torch.dtype,
    device: str,
    rows_usable: bool,
    norms_usable: bool,
) -> _Plan:
    """Returns the plan for a layer's settings, heights and widths.

    Args:
        choices: `cheapest` and `made_by_kernel`.
        g: the settings.
        inputs: height and width.
        signals: rows and columns.
        views: images of an example.
        dtype: dtype of inputs and signals.
        device: device of inputs and signals.
        rows_usable: True if our kernel can compute rows.
        norms_usable: True if our kernel can compute norms without rows.
    """
    double = dtype == torch.float64
    kernel = row_kernel(g, inputs, signals, views, double) if rows_usable else None
    (high, wide), (rows, columns), (top, bottom, left, right) = inputs, signals, g.padding
    # Inner products of pixels run over all channels of an image, so neither groups nor views can use them.
    plain = g.groups == 1 and views == 1
    once = g.stride == (1, 1) and g.dilation == (1, 1)
    tiles = views * ((rows + 1) // 2) * ((columns + 1) // 2)
    shape = Shape(
        positions=views * rows * columns,
        inputs=g.weight_shape[1] * g.kernel[0] * g.kernel[1],
        outputs=g.channels[1] // g.groups,
        stored=views * (g.channels[0] * high * wide + g.channels[1] * rows * columns),
        groups=g.groups,
        pixels=(high + top + bottom) * (wide + left + right) if plain else None,
        channels=g.channels[0],
        kernel=g.kernel,
        tiles=tiles if once and g.groups == 1 and g.kernel == (3, 3) else None,
        lanes=0 if kernel is None else kernel.lanes * (2 if double else 1),
        multiplied=0 if kernel is None else kernel.products,
        products=product_flops(g, inputs, signals) if plain and norms_usable else None,
    )
    cheapest_of, by_kernel = choices
    return _Plan(shape, cheapest_of(shape, device), by_kernel(shape, device))
