"""Patches of images under each position of a convolution's kernel, which turn a convolution into a matrix product.

A stack needs a product for each model and group of channels. A convolution with the models as groups would be a single
call too, but vendors' kernels for many groups are slow, and per-example gradients are computed from the patches anyway.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from ...gradients.layerwise.layers.convolution_settings import Geometry


def patches(
    images: Float[Tensor, "images channels height width"], geometry: Geometry, models: int
) -> Float[Tensor, "models groups rows positions patch"]:
    """Returns each position's patch, [kernel height, kernel width, channels of the group] flattened; differentiable.

    Args:
        images: padded; images of the same model are adjacent.
        geometry: settings of the convolution.
        models: number of models.
    """
    return _Patches.apply(images, geometry, models)  # pyright: ignore[reportReturnType] -- torch does not say


class _Patches(torch.autograd.Function):
    """A strided view, copied once; `F.unfold` launches a kernel for every image on a GPU."""

    @staticmethod
    def forward(ctx: Any, images: Tensor, geometry: Geometry, models: int) -> Tensor:
        ctx.shape, ctx.geometry = images.shape, geometry
        view = geometry.patches(images, *geometry.positions(*images.shape[2:]))
        by_model = view.unflatten(0, (models, -1)).transpose(1, 2)
        return by_model.flatten(5).flatten(3, 4)

    @staticmethod
    def backward(ctx: Any, *signals: Tensor) -> tuple[Tensor, None, None]:
        (signal,), g = signals, ctx.geometry
        count, channels, height, width = ctx.shape
        pixels = g.kernel[0] * g.kernel[1]
        by_pixel = signal.unflatten(-1, (pixels, channels // g.groups))
        # In the order of `F.fold`: [images, channels of all groups * pixels, positions].
        columns = by_pixel.permute(0, 2, 1, 5, 4, 3).reshape(count, channels * pixels, signal.shape[3])
        images = F.fold(columns, (height, width), g.kernel, g.dilation, 0, g.stride)
        return images, None, None
