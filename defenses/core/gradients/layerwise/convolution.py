"""Per-example gradients of a convolution's weight: sums over positions of derivative times patch, in four ways.

Channels-last inputs are used as they lie: patches are then copied in long runs, a few examples at a time, so that they
stay in the cache. At many positions only the kernel's columns are unfolded, and its rows are offsets into them, which
copies a third of what a 3x3 kernel's patches take.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F
from torch.nn.grad import conv2d_weight

from ...plan.bound import row_norms
from ...plan.lengths import lengths
from . import winograd as tiles
from .cost import Shape, Strategy, cheapest, estimates, summed_by_tiles
from .factors import (
    BasisPiece,
    FactoredGradient,
    GradientRows,
    Squares,
    gram_squares,
    joined,
    parts,
    product_size,
    recomputed,
)

IntPair = tuple[int, int]
# From this many positions on, unfolding columns alone is the faster; below, the products get too small.
_MANY_POSITIONS = 512
_NARROW = 16  # columns: MKL's products of fewer run at a sixth of its speed (AMD EPYC), of as many rows at a half


@dataclass(frozen=True)
class Geometry:
    """A two-dimensional convolution's settings; those of one dimension have height 1.

    Attributes:
        channels: of input and output.
        kernel: height and width.
        stride: of the kernel.
        dilation: of the kernel.
        padding: (top, bottom, left, right), zeros.
        groups: of channels.
    """

    channels: IntPair
    kernel: IntPair
    stride: IntPair
    dilation: IntPair
    padding: tuple[int, int, int, int]
    groups: int

    @property
    def weight_shape(self) -> tuple[int, int, int, int]:
        """Shape of the weight."""
        entering, leaving = self.channels
        return leaving, entering // self.groups, *self.kernel


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
        """Takes what went into the layer and the loss's derivatives by what came out.

        Args:
            inputs: before padding.
            signals: by the output.
            geometry: settings of the layer.
            views: neighbouring images that belong to one example.
            buffers: gives the memory for rows that are kept; fresh memory where None.
        """
        self.inputs, self.signals, self.geometry, self.views = inputs, signals, geometry, views
        self._buffers = buffers or (lambda numbers, like: like.new_empty(numbers))
        self.like, self.examples = signals, len(signals) // views
        self.size = torch.Size(geometry.weight_shape).numel()
        top, bottom, left, right = geometry.padding
        self._padded = (inputs.shape[2] + top + bottom, inputs.shape[3] + left + right)
        lines = self._lines if self._by_columns else self._positions * geometry.kernel[0]
        self._unfolded = views * lines * geometry.kernel[1] * geometry.channels[0]
        self.scratch = self._unfolded + views * self.size
        self._kept: GradientRows | None = None

    def rows(self, which: slice | Tensor) -> Tensor:
        """Products of patches and signals, in the weight's own order."""
        made = self._made(*self._some(which))  # [some, groups, height, width, in, out] of a group
        return made.permute(0, 1, 5, 4, 2, 3).reshape(len(made), self.size)

    def weighted(self, factors: Tensor) -> Float[Tensor, "leaving entering height width"]:
        """From the rows if they were kept, otherwise by tiles or the vendor's kernel for a whole batch."""
        g = self.geometry
        if self._kept is not None:
            # Kept rows are in the products' order (`_made`): permuting their sum is cheaper than permuting each.
            total = self._kept.weighted(factors)
            out, entering, height, width = g.weight_shape
            return total.view(g.groups, height, width, entering, out // g.groups).permute(0, 4, 3, 1, 2).flatten(0, 1)
        factors = factors.repeat_interleave(self.views)
        _, _, rows, columns = self.signals.shape
        if self._by_tiles:
            each = tiles.factor_numbers(rows, columns, sum(g.channels)) * self.like.element_size()
            return tiles.summed(len(self.signals), lambda some: self._tiled(some, factors), each)
        scaled = self.signals * factors.view(-1, 1, 1, 1)
        top, bottom, left, right = g.padding
        symmetric = top == bottom and left == right
        # conv2d pads both sides of a dimension alike; "same" with an even kernel does not.
        inputs = self.inputs if symmetric else F.pad(self.inputs, (left, right, top, bottom))
        padding = (top, left) if symmetric else (0, 0)
        # Typed for one number for both dimensions, and takes a pair as every convolution does.
        settings: Any = (g.stride, padding, g.dilation, g.groups)
        return conv2d_weight(inputs, g.weight_shape, scaled, *settings)

    def without(self, bad: Tensor) -> Convolution:
        """Zeros in both factors."""
        gone = bad.repeat_interleave(self.views).view(-1, 1, 1, 1)
        inputs, signals = (torch.where(gone, 0.0, values) for values in (self.inputs, self.signals))
        rest = Convolution(inputs, signals, self.geometry, views=self.views)
        rest._kept = None if self._kept is None else self._kept.without(bad)
        return rest

    def largest(self) -> Tensor:
        """By the factors' norms: an entry is a sum of products, each pixel in one at most."""
        first, second = (v.permute(0, 2, 3, 1).reshape(self.examples, -1) for v in (self.inputs, self.signals))
        return product_size(first, second)

    def squares(self) -> Squares:
        """By the formula that `cost.py` finds the cheapest; rows that are kept already are not computed again."""
        if self._kept is not None:
            return self._kept.squares()
        way = cheapest(self.shape, self.like.device.type)
        if way in (Strategy.GRAM, Strategy.PIXELS):
            return self._by_products(way)
        return self._of_rows(keep=way is Strategy.KEEP)

    def masked_squares(self, mask: Tensor) -> Squares:
        """From rows, because inner products between positions know no mask; they are kept where that is cheaper."""
        own = self._as_made(mask)
        if self._kept is not None:
            return self._kept.masked_squares(own)
        return self._of_rows(keep=self._worth_keeping, mask=own.to(self.like))

    def along(self, pieces: Sequence[BasisPiece]) -> tuple[list[Tensor], Tensor]:
        """From rows in the products' order, kept where that is cheaper, and bases that are brought into that order."""
        turned = [self._as_made_basis(start, basis) for start, basis in pieces]
        if self._kept is None and self._worth_keeping:
            self._of_rows(keep=True)
        if self._kept is not None:
            return self._products(self._kept.values, turned), self._kept.norms()
        each = (self._unfolded + self.views * self.size) * self.like.element_size()
        made = (self._made(*self._some(part)).flatten(1) for part in parts(self.examples, each, self.like, wide=True))
        products, norms = zip(*((self._products(rows, turned), row_norms(rows)) for rows in made), strict=True)
        return [torch.cat(found) for found in zip(*products, strict=True)], torch.cat(norms)

    def _products(self, made: Tensor, bases: Sequence[tuple[int, Tensor]]) -> list[Tensor]:
        """Inner products of rows in the products' order with bases of some channels that leave."""
        found = []
        for first, basis in bases:
            directions, patch, channels = basis.shape
            some = (
                made if channels * patch == self.size else made.unflatten(1, (patch, -1))[:, :, first:][..., :channels]
            )
            found.append(some.reshape(len(made), -1) @ basis.reshape(directions, -1).T)
        return found

    def _as_made_basis(self, start: int, basis: Float[Tensor, "span k"]) -> tuple[int, Float[Tensor, "k patch some"]]:
        """A piece of a basis in the products' order (`_made`), and the first of the channels that leave in it."""
        out, entering, height, width = self.geometry.weight_shape
        groups, patch = self.geometry.groups, entering * height * width
        # Of few channels those alone: a group of directions may begin or end within a weight.
        first, last = start // patch, -(-(start + len(basis)) // patch)
        if groups > 1 or 2 * (last - first) > out:
            first, last = 0, out
        # Directions first, as they lie in memory (`basis.py`): what is permuted is then one direction at a time.
        turned = F.pad(basis.T, (start - first * patch, last * patch - start - len(basis)))
        split = turned.unflatten(1, (groups, (last - first) // groups, entering, height, width))
        made = split.permute(0, 1, 4, 5, 3, 2)
        return first, made.reshape(len(made), groups * patch, -1)

    @property
    def _worth_keeping(self) -> bool:
        """Whether rows that have to be formed are kept for the sum."""
        costs = estimates(self.shape, self.like.device.type)
        return costs.get(Strategy.KEEP, math.inf) <= costs[Strategy.FREE]

    def inner(self, direction: Float[Tensor, " size"]) -> Float[Tensor, " rows"]:
        """From the rows if they were kept, otherwise one convolution with the direction in the weight's place."""
        if self._kept is not None:
            return self._kept.inner(self._as_made(direction))
        g = self.geometry
        top, bottom, left, right = g.padding
        inputs = F.pad(self.inputs, (left, right, top, bottom)) if any(g.padding) else self.inputs
        through = F.conv2d(inputs, direction.view(g.weight_shape), None, g.stride, 0, g.dilation, g.groups)
        products = (through * self.signals).sum(dim=(1, 2, 3), dtype=torch.float64)
        return products.unflatten(0, (self.examples, self.views)).sum(dim=1)

    def _as_made(self, values: Float[Tensor, " size"] | Bool[Tensor, " size"]) -> Tensor:
        """Numbers of the weight in the products' order (`_made`): they are brought into it, not every row out of it."""
        out, entering, height, width = self.geometry.weight_shape
        groups = self.geometry.groups
        return values.view(groups, out // groups, entering, height, width).permute(0, 3, 4, 2, 1).flatten()

    def _of_rows(self, *, keep: bool, mask: Tensor | None = None) -> Squares:
        """Squared norms of rows, masked or not, which are kept for the sum or freed at once."""
        kept = self._buffers(self.examples * self.size, self.like).view(self.examples, self.size) if keep else None
        found = []
        each = (self._unfolded + self.views * self.size) * self.like.element_size()
        for part in parts(self.examples, each, self.like):
            made = self._made(*self._some(part), out=None if kept is None else kept[part]).flatten(1)
            found.append(lengths(made if mask is None else made * mask).square())
        if kept is not None:
            self._kept = GradientRows(kept)
            return Squares.exact(torch.cat(found))
        return self._recomputed(torch.cat(found))

    def _recomputed(self, value: Tensor) -> Squares:
        # In the order in which they lie in memory: a view, no copy.
        inputs = self.inputs.permute(0, 2, 3, 1).reshape(self.examples, -1)
        signals = self.signals.permute(0, 2, 3, 1).reshape(self.examples, -1, self.geometry.channels[1])
        overlap = self.geometry.kernel[0] * self.geometry.kernel[1]
        return recomputed(value, inputs, signals, overlap * tiles.GROWTH**2 if self._by_tiles else overlap)

    @cached_property
    def shape(self) -> Shape:
        """What the cost model looks at."""
        g, per_image = self.geometry, self.inputs[0].numel() + self.signals[0].numel()
        # Inner products of pixels run over all channels of one image, so neither groups nor views can use them.
        plain = g.groups == 1 and self.views == 1
        once = g.stride == (1, 1) and g.dilation == (1, 1)
        rows, columns = ((size + 1) // 2 for size in self.signals.shape[2:])
        return Shape(
            positions=self.views * self._positions,
            inputs=g.weight_shape[1] * g.kernel[0] * g.kernel[1],
            outputs=g.channels[1] // g.groups,
            stored=self.views * per_image,
            groups=g.groups,
            pixels=self._padded[0] * self._padded[1] if plain else None,
            channels=g.channels[0],
            kernel=g.kernel,
            tiles=self.views * rows * columns if once and g.groups == 1 and g.kernel == (3, 3) else None,
        )

    @property
    def _by_tiles(self) -> bool:
        return summed_by_tiles(self.shape, self.like.device.type)

    @property
    def _positions(self) -> int:
        return self.signals.shape[2] * self.signals.shape[3]

    @property
    def _lines(self) -> int:
        return self._padded[0] * self.signals.shape[3]

    @property
    def _by_columns(self) -> bool:
        g = self.geometry  # a row of the kernel is an offset of whole lines only at vertical stride 1
        return g.groups == 1 and g.stride[0] == 1 and g.kernel[0] > 1 and self._positions >= _MANY_POSITIONS

    def _some(self, which: slice | Tensor) -> tuple[Tensor, Tensor]:
        """Padded inputs [images, height, width, channels] and signals [images, rows, columns, out] of some examples."""
        if self.views == 1:
            inputs, signals = self.inputs[which], self.signals[which]
        else:
            shaped = (values.unflatten(0, (-1, self.views))[which] for values in (self.inputs, self.signals))
            inputs, signals = (values.flatten(0, 1) for values in shaped)
        top, bottom, left, right = self.geometry.padding
        # NHWC in memory too: `_patches` and `_columns` compute strides from the shape.
        pixels = inputs.permute(0, 2, 3, 1)
        padded = F.pad(pixels, (0, 0, left, right, top, bottom)) if any(self.geometry.padding) else pixels.contiguous()
        return padded, signals.permute(0, 2, 3, 1).contiguous()

    def _made(
        self, inputs: Tensor, signals: Tensor, out: Tensor | None = None
    ) -> Float[Tensor, "some groups height width entering leaving"]:
        """The gradients of some examples, in the order in which the products come; into `out` [some, size] if given."""
        g, images = self.geometry, len(inputs)
        shape = (images, g.groups, *g.kernel, g.weight_shape[1], g.channels[1] // g.groups)
        # Rows of several views are summed afterwards, so their products need memory of their own.
        made = self.like.new_empty(shape) if out is None or self.views > 1 else out.view(shape)
        if self._by_columns:
            # Row by row of the kernel: lines of the padded input, shifted.
            columns, flat = self._columns(inputs), signals.flatten(1, 2)
            by_row = made.view(images, g.kernel[0], -1, g.channels[1])
            for row in range(g.kernel[0]):
                start = row * g.dilation[0] * signals.shape[2]
                _products_into(by_row[:, row], columns[:, start : start + flat.shape[1]], flat)
        else:
            products = made.view(images * g.groups, -1, shape[-1])
            _products_into(products, self._patches(inputs, signals), self._grouped(signals))
        if self.views == 1:
            return made
        summed = made.unflatten(0, (-1, self.views)).sum(dim=1)
        return summed if out is None else out.view(summed.shape).copy_(summed)

    def _tiled(self, some: slice, factors: Tensor) -> tuple[Tensor, Tensor]:
        """Some images' inputs and weighted signals, channels last, padded to an even number of rows and columns."""
        inputs, signals = (values[some].permute(0, 2, 3, 1) for values in (self.inputs, self.signals))
        signals = signals * factors[some].view(-1, 1, 1, 1)
        below, beside = (size % 2 for size in signals.shape[1:3])
        top, bottom, left, right = self.geometry.padding
        # Derivatives of zero add nothing, whatever inputs they meet.
        if below or beside:
            signals = F.pad(signals, (0, 0, 0, beside, 0, below))
        return F.pad(inputs, (0, 0, left, right + beside, top, bottom + below)), signals

    def _grouped(self, signals: Tensor) -> Float[Tensor, "parts positions out"]:
        by_group = signals.flatten(1, 2).unflatten(2, (self.geometry.groups, -1))
        return by_group.transpose(1, 2).flatten(0, 1)

    def _patches(self, inputs: Tensor, signals: Tensor) -> Float[Tensor, "parts positions patch"]:
        """Every position's patch, [height, width, in] flattened: a strided view, copied once.

        A prototype's chunks were 8 times as fast as `F.unfold` over a batch (32 channels, 32x32, two CPU cores).
        """
        g, (images, _, wide, channels) = self.geometry, inputs.shape
        _, rows, columns, _ = signals.shape
        entering, line = g.weight_shape[1], wide * channels
        view = inputs.as_strided(
            (images, g.groups, rows, columns, *g.kernel, entering),
            (
                inputs.stride(0),
                entering,
                g.stride[0] * line,
                g.stride[1] * channels,
                g.dilation[0] * line,
                g.dilation[1] * channels,
                1,
            ),
            inputs.storage_offset(),
        )
        return view.reshape(images * g.groups, rows * columns, -1)

    def _columns(self, inputs: Tensor) -> Float[Tensor, "images lines patch"]:
        """Every pixel's patch of height 1, [width, in] flattened."""
        g, (images, high, wide, channels) = self.geometry, inputs.shape
        columns = self.signals.shape[3]
        view = inputs.as_strided(
            (images, high, columns, g.kernel[1], channels),
            (inputs.stride(0), wide * channels, g.stride[1] * channels, g.dilation[1] * channels, 1),
            inputs.storage_offset(),
        )
        return view.reshape(images, high * columns, -1)

    def _by_products(self, way: Strategy) -> Squares:
        """Norms from inner products between positions."""
        positions = self.views * self._positions
        numbers = 2 * self.geometry.groups * positions**2
        if way is Strategy.PIXELS:
            numbers += 2 * (self.shape.pixels or 0) ** 2
        else:
            numbers += positions * self.shape.inputs * self.geometry.groups
        each = numbers * self.like.element_size()
        found = []
        for part in parts(self.examples, each, self.like):
            inputs, signals = self._some(part)
            if way is Strategy.PIXELS:
                flat = signals.flatten(1, 2)
                found.append(gram_squares(self._pixel_products(inputs, signals), torch.bmm(flat, flat.mT)))
            else:
                patches, grouped = (
                    self._by_example(values) for values in (self._patches(inputs, signals), self._grouped(signals))
                )
                one = gram_squares(torch.bmm(patches, patches.mT), torch.bmm(grouped, grouped.mT))
                # Groups fill different entries of the weight, so their squares add up.
                groups = (-1, self.geometry.groups)
                found.append(Squares(one.value.view(groups).sum(dim=1), one.slack.view(groups).sum(dim=1)))
        return joined(found)

    def _by_example(self, values: Float[Tensor, "parts positions width"]) -> Tensor:
        """The positions of all views of an example in one: [examples * groups, views * positions, width]."""
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
        pixels = inputs.flatten(1, 2)
        products = torch.bmm(pixels, pixels.mT).unflatten(2, (high, wide)).unflatten(1, (high, wide))

        def along(values: Tensor, first: int, count: int, size: int, stride: int, dilation: int) -> Tensor:
            total: Tensor | None = None
            for offset in range(0, size * dilation, dilation):
                span = slice(offset, offset + stride * (count - 1) + 1, stride)
                index = [slice(None)] * 5
                index[first] = index[first + 2] = span  # both pixels of a pair move by one offset
                shifted = values[tuple(index)]
                total = shifted.clone() if total is None else total.add_(shifted)
            assert total is not None  # noqa: S101  a kernel has at least one row and one column
            return total

        summed = along(products, 1, rows, g.kernel[0], g.stride[0], g.dilation[0])
        summed = along(summed, 2, columns, g.kernel[1], g.stride[1], g.dilation[1])
        return summed.reshape(len(inputs), rows * columns, rows * columns)


def _products_into(
    out: Float[Tensor, "some patch leaving"],
    patches: Float[Tensor, "some positions patch"],
    signals: Float[Tensor, "some positions leaving"],
) -> None:
    """Sums over positions of patch times signal, written where they belong: `bmm(patches', signals)`."""
    if signals.shape[2] < min(_NARROW, patches.shape[2]):
        out.copy_(torch.bmm(signals.mT, patches).mT)
    elif out.is_contiguous():
        torch.bmm(patches.mT, signals, out=out)
    else:
        # PyTorch writes into what has gaps one product at a time.
        out.copy_(torch.bmm(patches.mT, signals))
