"""Rows of a convolution as products of patches and output gradients, for any dtype and device.

Channels-last inputs are used in place: patches are then copied in long runs, a few examples at a time, so that they
stay in the cache. At many positions a CPU unfolds the kernel's columns alone, and its rows are offsets into them, which
copies a third of the patches of a 3x3 kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from ..factors import parts, squared_lengths
from .convolution_settings import Geometry
from .kept_rows import ProductOrder

# Number of positions from which on unfolding columns alone is faster; below, the products get too small.
_MANY_POSITIONS = 512
_NARROW = 16  # columns: MKL's products of fewer run at a sixth of its speed (AMD EPYC), of as few rows at a half


class PatchProducts:
    """Computes rows by matrix products.

    Attributes:
        order: order of the numbers in a row.
        scratch: temporary numbers per row that is formed.
    """

    def __init__(
        self,
        inputs: Float[Tensor, "images channels height width"],
        signals: Float[Tensor, "images out rows columns"],
        geometry: Geometry,
        views: int,
    ) -> None:
        """Takes the layer's input and the loss's gradient at its output, of `views` images for each example."""
        self.inputs, self.signals, self.geometry, self.views = inputs, signals, geometry, views
        self.size, self.order = torch.Size(geometry.weight_shape).numel(), ProductOrder(geometry)
        top, bottom, _, _ = geometry.padding
        rows, columns = signals.shape[2:]
        lines = (inputs.shape[2] + top + bottom) * columns if self._by_columns else rows * columns * geometry.kernel[0]
        self._unfolded = views * lines * geometry.kernel[1] * geometry.channels[0]
        self.scratch = self._unfolded + views * self.size

    def parts(self, *, wide: bool = False) -> Iterator[slice]:
        """Yields slices of examples that are processed at a time."""
        examples = len(self.signals) // self.views
        return parts(examples, self.scratch * self.signals.element_size(), self.signals, wide=wide)

    def made(self, index: slice | Tensor, out: Float[Tensor, "some size"] | None = None) -> Float[Tensor, "some size"]:
        """Returns the gradients of some examples, in the order of the products; written into `out` if given."""
        inputs, signals = self.images(index)
        g, images = self.geometry, len(inputs)
        shape = (images, g.groups, *g.kernel, g.weight_shape[1], g.channels[1] // g.groups)
        # Rows of several views are summed afterwards, so their products need memory of their own.
        rows = signals.new_empty(shape) if out is None or self.views > 1 else out.view(shape)
        if self._by_columns:
            # Row by row of the kernel: lines of the padded input, shifted.
            columns, flat = self._columns(inputs), signals.flatten(1, 2)
            by_row = rows.view(images, g.kernel[0], -1, g.channels[1])
            for row in range(g.kernel[0]):
                start = row * g.dilation[0] * signals.shape[2]
                _products_into(by_row[:, row], columns[:, start : start + flat.shape[1]], flat)
        else:
            products = rows.view(images * g.groups, -1, shape[-1])
            _products_into(products, self.unfolded(inputs, signals), self.by_group(signals))
        if self.views == 1:
            return rows.flatten(1)
        summed = rows.flatten(1).unflatten(0, (-1, self.views)).sum(dim=1)
        return summed if out is None else out.copy_(summed)

    def squares(self, out: Float[Tensor, "rows size"] | None = None) -> Float[Tensor, " rows"]:
        """Squared norms of all rows, in float64; the rows are written into `out` if given, else discarded."""
        chunks = (self.made(part, out=None if out is None else out[part]) for part in self.parts())
        return torch.cat([squared_lengths(rows) for rows in chunks])

    def images(self, index: slice | Tensor) -> tuple[Tensor, Tensor]:
        """Padded inputs [images, height, width, channels] and signals [images, rows, columns, out] of some examples."""
        inputs, signals = images_of((self.inputs, self.signals), index, self.views)
        top, bottom, left, right = self.geometry.padding
        # Channels last in memory: patches are then copied in long runs.
        pixels = inputs.permute(0, 2, 3, 1)
        padded = F.pad(pixels, (0, 0, left, right, top, bottom)) if any(self.geometry.padding) else pixels.contiguous()
        return padded, signals.permute(0, 2, 3, 1).contiguous()

    def unfolded(self, inputs: Tensor, signals: Tensor) -> Float[Tensor, "parts positions patch"]:
        """Every position's patch, [height, width, in] flattened: a strided view, copied once.

        In a prototype, chunks of it were 8 times as fast as `F.unfold` over a batch (32 channels, 32x32, two CPU
        cores).
        """
        rows, columns = signals.shape[1:3]
        view = self.geometry.patches(inputs.permute(0, 3, 1, 2), rows, columns)
        return view.reshape(len(inputs) * self.geometry.groups, rows * columns, -1)

    def by_group(self, signals: Tensor) -> Float[Tensor, "parts positions out"]:
        """Output gradients, split by group of channels."""
        split = signals.flatten(1, 2).unflatten(2, (self.geometry.groups, -1))
        return split.transpose(1, 2).flatten(0, 1)

    @property
    def _by_columns(self) -> bool:
        g = self.geometry  # a row of the kernel is an offset of whole lines only at vertical stride 1
        many = self.signals.is_cpu and self.signals.shape[2] * self.signals.shape[3] >= _MANY_POSITIONS
        return g.groups == 1 and g.stride[0] == 1 and g.kernel[0] > 1 and many

    def _columns(self, inputs: Tensor) -> Float[Tensor, "images lines patch"]:
        """Every pixel's patch of height 1, [width, in] flattened."""
        g, columns = self.geometry, self.signals.shape[3]
        lines = replace(g, kernel=(1, g.kernel[1])).patches(inputs.permute(0, 3, 1, 2), inputs.shape[1], columns)
        return lines.reshape(len(inputs), inputs.shape[1] * columns, -1)


def images_of(values: Sequence[Tensor], index: slice | Tensor, views: int) -> list[Tensor]:
    """Returns the images of some examples, all views of an example adjacent."""
    if views == 1:
        return [each[index] for each in values]
    return [each.unflatten(0, (-1, views))[index].flatten(0, 1) for each in values]


def _products_into(
    out: Float[Tensor, "some patch leaving"],
    patches: Float[Tensor, "some positions patch"],
    signals: Float[Tensor, "some positions leaving"],
) -> None:
    """Writes sums over positions of patch times signal in place: `bmm(patches', signals)`."""
    if signals.is_cpu and signals.shape[2] < min(_NARROW, patches.shape[2]):
        out.copy_(torch.bmm(signals.mT, patches).mT)
    elif out.is_contiguous():
        torch.bmm(patches.mT, signals, out=out)
    else:
        # PyTorch writes into non-contiguous outputs product by product.
        out.copy_(torch.bmm(patches.mT, signals))
