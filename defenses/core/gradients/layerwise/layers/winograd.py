"""Winograd's algorithm for a 3x3 convolution's weight gradient, summed over a batch: 16 products in place of 36.

Winograd's minimal filtering (Arithmetic Complexity of Computations, 1980; Lavin & Gray, CVPR 2016, for networks) with
the derivatives as the filter: two adjacent derivatives s and four inputs d give the three sums s0 d_k + s1 d_(k+1) by

    s0 (d0 - d2),  (s0 + s1) (d1 + d2),  (s0 - s1) (d2 - d1),  s1 (d3 - d1),

the middle two halved. Along both dimensions that is 16 products for a tile of 2x2 derivatives, each of which is a
matrix product over all tiles of a batch. The factors are at most four times as large as the numbers they are sums of.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

GROWTH = 4
"""Factor by which the rounding error may exceed that of a plain sum: the transformed factors are larger, and cancel."""
# From the four products to the three sums.
_SUMS = ((1.0, 0.5, 0.5, 0.0), (0.0, 0.5, -0.5, 0.0), (0.0, 0.5, 0.5, 1.0))
# Factors of some images, which should stay in the cache; more images make the products more efficient.
_CACHED_BYTES = 8 * 2**20


def summed(
    images: int, tiles_of: Callable[[slice], tuple[Tensor, Tensor]], each: int
) -> Float[Tensor, "out entering 3 3"]:
    """Sum over images of the gradients of a 3x3 kernel of stride 1.

    Args:
        images: number of images.
        tiles_of: returns inputs [images, 2 * rows + 2, 2 * columns + 2, entering] and output gradients [images,
            2 * rows, 2 * columns, out] of some images, padded with zeros.
        each: bytes of the factors of an image.
    """
    step, total = max(1, min(images, _CACHED_BYTES // each)), None
    for start in range(0, images, step):
        inputs, signals = tiles_of(slice(start, min(start + step, images)))
        first, second = _of_signals(signals).mT, _of_inputs(inputs)
        total = torch.bmm(first, second) if total is None else total.baddbmm_(first, second)
    assert total is not None  # noqa: S101  there is at least one image
    line = total.new_tensor(_SUMS)
    kernel = torch.einsum("ka,lb->klab", line, line).view(9, 16) @ total.flatten(1)
    return kernel.view(3, 3, *total.shape[1:]).permute(2, 3, 0, 1)


def factor_numbers(rows: int, columns: int, channels: int) -> int:
    """Returns the size of the factors of an image, for derivatives of this height and width."""
    return 16 * -(-rows // 2) * -(-columns // 2) * channels


def _of_inputs(inputs: Float[Tensor, "n high wide c"]) -> Float[Tensor, "16 tiles c"]:
    images, high, wide, channels = inputs.shape
    rows, columns = high // 2 - 1, wide // 2 - 1
    transformed = inputs.new_empty(4, 4, images, rows, columns, channels)

    for row, (a, b) in enumerate(_differences(inputs, 1, rows)):
        across = a + b if row == 1 else a - b
        for column, (c, d) in enumerate(_differences(across, 2, columns)):
            (torch.add if column == 1 else torch.sub)(c, d, out=transformed[row, column])
    return transformed.view(16, -1, channels)


def _of_signals(signals: Float[Tensor, "n high wide c"]) -> Float[Tensor, "16 tiles c"]:
    images, high, wide, channels = signals.shape
    transformed = signals.new_empty(4, 4, images, high // 2, wide // 2, channels)
    upper, lower = signals[:, ::2], signals[:, 1::2]
    for row, across in enumerate((upper, upper + lower, upper - lower, lower)):
        left, right = across[:, :, ::2], across[:, :, 1::2]
        transformed[row, 0] = left
        torch.add(left, right, out=transformed[row, 1])
        torch.sub(left, right, out=transformed[row, 2])
        transformed[row, 3] = right
    return transformed.view(16, -1, channels)


def _differences(values: Tensor, dim: int, count: int) -> list[tuple[Tensor, Tensor]]:
    """Operands along a dimension, for `count` tiles: d0 - d2, d1 + d2, d2 - d1 and d3 - d1."""
    # Tiles are four inputs wide and start two apart: adjacent tiles share two inputs.
    starts = [values.narrow(dim, k, 2 * count - 1) for k in range(4)]
    d0, d1, d2, d3 = (start[(slice(None),) * dim + (slice(None, None, 2),)] for start in starts)
    return [(d0, d2), (d1, d2), (d2, d1), (d3, d1)]
