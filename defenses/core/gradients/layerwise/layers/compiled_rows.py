"""Rows of a convolution, and their norms from rows or from inner products, by kernels compiled for its sizes.

Guarantee:
    An example's row or norm is computed from its own numbers, whatever its neighbours hold. Each kernel is compared
    before its first use, in its dtype, with PyTorch's gradients of three synthetic examples, the middle one NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor

from ....kernels.convolution_rows import RowKernel
from ....kernels.product_norms import ProductKernel
from ..factors import Squares, cancelling
from .convolution_settings import Geometry
from .kept_rows import product_order
from .patch_rows import images_of

_CHUNK_BYTES = 2**20  # of rows that are measured as they are computed: half of a core's L2 cache


class CompiledRows:
    """Computes rows by compiled kernels.

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
        self.inputs, self.signals, self._views = inputs, signals, views
        self.order, self.scratch = product_order(geometry), 0
        wide = signals.dtype == torch.float64
        self.kernel = row_kernel(geometry, inputs.shape[2:], signals.shape[2:], views, wide)
        self.size = self.kernel.size

    def parts(self, *, wide: bool = False) -> Iterator[slice]:
        """Yields slices of examples whose rows are read while they are in the cache, or larger ones for products."""
        examples, each = len(self.signals) // self._views, self.size * self.signals.element_size()
        step = max(1, (16 if wide else 1) * _CHUNK_BYTES // each)
        for start in range(0, examples, step):
            yield slice(start, min(start + step, examples))

    def made(self, index: slice | Tensor, out: Float[Tensor, "some size"] | None = None) -> Float[Tensor, "some size"]:
        """Returns the gradients of some examples; written into `out` if given."""
        inputs, signals = images_of((self.inputs, self.signals), index, self._views)
        count = len(signals) // self._views
        rows = signals.new_empty(count, self.size) if out is None else out
        self.kernel(inputs, signals, rows)
        return rows

    def squares(self, out: Float[Tensor, "rows size"] | None = None) -> Float[Tensor, " rows"]:
        """Squared norms of all rows, in float64; the rows are written into `out` if given, else discarded."""
        return self.kernel(self.inputs, self.signals, out)[0]


@lru_cache(maxsize=512)
def row_kernel(g: Geometry, inputs: tuple[int, int], signals: tuple[int, int], views: int, wide: bool) -> RowKernel:
    """Returns the kernel for a layer's settings, heights and widths, which is compiled once."""
    return RowKernel(*inputs, *g.channels, g.kernel, g.stride, g.dilation, g.padding, *signals, views, wide)


def product_squares(
    inputs: Float[Tensor, "images channels height width"],
    signals: Float[Tensor, "images out rows columns"],
    geometry: Geometry,
) -> Squares | None:
    """Squared norms of the gradients of images, each an example; None if the kernel does not agree with its reference.

    Raises:
        ValueError: for tensors that a kernel of this geometry would read past the end of.
    """
    kernel = product_kernel(geometry, inputs.shape[2:], signals.shape[2:], signals.dtype == torch.float64)
    if not kernel.agrees:
        return None
    value, diagonal = kernel(inputs, signals)
    return cancelling(value, diagonal, signals.shape[2] * signals.shape[3], signals.dtype)


@lru_cache(maxsize=512)
def product_flops(g: Geometry, inputs: tuple[int, int], signals: tuple[int, int]) -> float | None:
    """Returns the flops of an example; None if matrices of inner products do not stay in the cache."""
    kernel = product_kernel(g, inputs, signals, False)
    return kernel.flops if kernel.fits else None


@lru_cache(maxsize=512)
def product_kernel(g: Geometry, inputs: tuple[int, int], signals: tuple[int, int], wide: bool) -> ProductKernel:
    """Returns the kernel for a layer's settings, heights and widths, which is compiled once."""
    return ProductKernel(row_kernel(g, inputs, signals, 1, wide))
