"""Squared norms of a convolution's rows from inner products between positions, by kernels compiled for its sizes.

Guarantee:
    An example's norm is computed from its own numbers, whatever its neighbours hold. Each kernel is checked before its
    first use, in its dtype, against products of patches, on three synthetic examples of which the middle one is NaN.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor

from ....kernels.product_norms import ProductKernel
from ..factors import Squares, cancelling
from .compiled_rows import over_images, refuse_unlike, row_kernel
from .convolution_settings import Geometry
from .patch_rows import PatchProducts

_TOLERANCE = 1e-5  # of the sum of the terms' sizes: smaller differences are rounding


def product_squares(
    inputs: Float[Tensor, "images channels height width"],
    signals: Float[Tensor, "images out rows columns"],
    geometry: Geometry,
) -> Squares | None:
    """Squared norms of the gradients of images, each an example; None if the kernel fails its check (`right`).

    Raises:
        ValueError: for tensors that a kernel of this geometry would read past the end of.
    """
    refuse_unlike(inputs, signals, geometry, 1)
    sizes = (geometry, inputs.shape[2:], signals.shape[2:])
    kernel = product_kernel(*sizes, signals.dtype == torch.float64)
    if not right(*sizes, signals.dtype):
        return None
    value, diagonal = _measured(inputs, signals, kernel)
    return cancelling(value, diagonal, signals.shape[2] * signals.shape[3], signals.dtype)


@lru_cache(maxsize=512)
def product_flops(g: Geometry, inputs: tuple[int, int], signals: tuple[int, int]) -> float | None:
    """Returns the flops of an example; None if matrices of inner products do not stay in the cache."""
    kernel = product_kernel(g, inputs, signals, False)
    return kernel.flops if kernel.fits else None


def _measured(inputs: Tensor, signals: Tensor, kernel: ProductKernel) -> tuple[Tensor, Tensor]:
    """Squared norms, and sums over positions of |x_t|² |s_t|²."""
    value, diagonal = signals.new_empty(2, len(signals), dtype=torch.float64)

    def run(*batch: int) -> None:
        kernel.measure(*batch, value.data_ptr(), diagonal.data_ptr())

    over_images(run, (inputs, signals), len(signals), numbers=kernel.numbers, flops=kernel.flops, memory=torch.float64)
    return value, diagonal


@lru_cache(maxsize=512)
def product_kernel(g: Geometry, inputs: tuple[int, int], signals: tuple[int, int], wide: bool) -> ProductKernel:
    """Returns the kernel for a layer's settings, heights and widths, which is compiled once."""
    return ProductKernel(row_kernel(g, inputs, signals, 1, wide))


@lru_cache(maxsize=512)
def right(geometry: Geometry, inputs: tuple[int, ...], signals: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Returns whether the kernel's norms equal those of rows from patches, beside an example that is NaN.

    Args:
        geometry: settings of the layer.
        inputs: height and width.
        signals: rows and columns.
        dtype: dtype of inputs and signals.
    """
    generator, (entering, leaving) = torch.Generator().manual_seed(0), geometry.channels
    x = torch.randn(3, entering, *inputs, generator=generator, dtype=dtype)
    s = torch.randn(3, leaving, *signals, generator=generator, dtype=dtype)
    reference = PatchProducts(x[::2].double(), s[::2].double(), geometry, 1)
    pixels, derivatives = reference.images(slice(None))
    sizes = (reference.unfolded(pixels, derivatives).square().sum(dim=2), derivatives.flatten(1, 2).square().sum(dim=2))
    expected = reference.squares(), (sizes[0] * sizes[1]).sum(dim=1)
    x[1], s[1] = torch.nan, torch.nan
    limit = _TOLERANCE * float(expected[1].max())
    measured = _measured(x, s, product_kernel(geometry, inputs, signals, dtype == torch.float64))
    return all(bool((a[::2] - b).abs().max() <= limit) for a, b in zip(measured, expected, strict=True))
