"""Patches of images under each position of a convolution's kernel, which turn a convolution into a matrix product.

A stack needs a product for each model and group of channels. A convolution with the models as groups would be a single
call too, but vendors' kernels for many groups are slow, and per-example gradients are computed from the patches anyway.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class KernelGrid:
    """A kernel and its positions on a padded image; each a (height, width).

    Attributes:
        kernel: size.
        stride: steps from a position to the next.
        dilation: steps between the pixels of a patch.
        groups: groups of channels, each with its own kernels.
    """

    kernel: tuple[int, int]
    stride: tuple[int, int]
    dilation: tuple[int, int]
    groups: int

    def positions(self, height: int, width: int) -> tuple[int, int]:
        """Returns rows and columns of the output for an image of this size."""
        sizes = zip((height, width), self.kernel, self.stride, self.dilation, strict=True)
        rows, columns = ((size - dilation * (k - 1) - 1) // stride + 1 for size, k, stride, dilation in sizes)
        return rows, columns


def patches(
    images: Float[Tensor, "images channels height width"], grid: KernelGrid, models: int
) -> Float[Tensor, "models groups rows positions patch"]:
    """Returns each position's patch, [kernel height, kernel width, channels of the group] flattened; differentiable.

    Args:
        images: padded; images of the same model are adjacent.
        grid: of the convolution.
        models: number of models.
    """
    return _Patches.apply(images, grid, models)  # pyright: ignore[reportReturnType] -- torch does not say


class _Patches(torch.autograd.Function):
    """A strided view, copied once; `F.unfold` launches a kernel for every image on a GPU."""

    @staticmethod
    def forward(ctx: Any, images: Tensor, grid: KernelGrid, models: int) -> Tensor:
        ctx.shape, ctx.grid = images.shape, grid
        count, channels, height, width = images.shape
        rows, columns = grid.positions(height, width)
        each = channels // grid.groups
        by_image, by_channel, by_line, by_pixel = images.stride()
        (down, across), (below, beside) = grid.stride, grid.dilation
        view = images.as_strided(
            (models, grid.groups, count // models, rows, columns, *grid.kernel, each),
            (
                by_image * (count // models),
                by_channel * each,
                by_image,
                by_line * down,
                by_pixel * across,
                by_line * below,
                by_pixel * beside,
                by_channel,
            ),
            images.storage_offset(),
        )
        return view.reshape(models, grid.groups, count // models, rows * columns, -1)

    @staticmethod
    def backward(ctx: Any, *signals: Tensor) -> tuple[Tensor, None, None]:
        (signal,), grid = signals, ctx.grid
        count, channels, height, width = ctx.shape
        pixels = grid.kernel[0] * grid.kernel[1]
        by_pixel = signal.unflatten(-1, (pixels, channels // grid.groups))
        # In the order of `F.fold`: [images, channels of all groups * pixels, positions].
        columns = by_pixel.permute(0, 2, 1, 5, 4, 3).reshape(count, channels * pixels, signal.shape[3])
        images = F.fold(columns, (height, width), grid.kernel, grid.dilation, 0, grid.stride)
        return images, None, None
