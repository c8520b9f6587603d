"""Where oneDNN's kernels are faster than MKL's: float32 on a CPU with AVX-512, all of which oneDNN uses.

PyTorch takes matrix products from MKL, which on AMD uses half of AVX-512, and convolutions from oneDNN. A convolution
with a 1x1 kernel is a matrix product: 1.6 to 2.3 times as fast there (Zen 5), and rounded by about as much.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from .products import inner_products

_IMAGES = 16  # from so many on PyTorch takes oneDNN for 1x1 kernels, whatever the number of threads
_WORTH_IT = 2e7  # flops, below which the call takes longer than what it saves
_WEIGHTS = 2**20  # numbers of a basis at a time, which a kernel reads again and again: they should stay in the cache


def faster_here(values: Tensor) -> bool:
    """Whether oneDNN's kernels are the fast ones for these numbers."""
    return (
        values.device.type == "cpu"
        and values.dtype == torch.float32
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and torch.backends.mkldnn.is_available()
        and bool(torch.backends.mkldnn.enabled)
    )


def product(rows: Float[Tensor, "n d"], basis: Float[Tensor, "d k"]) -> Float[Tensor, "n k"]:
    """`rows @ basis`.

    Args:
        rows: one a row.
        basis: the transpose of a contiguous matrix, as leading directions are; others go by MKL.
    """
    weights, (count, width) = basis.T, rows.shape
    worth_it = 2.0 * count * basis.numel() >= _WORTH_IT
    if not (worth_it and weights.is_contiguous() and rows.is_contiguous() and faster_here(rows)):
        return inner_products(rows, basis)
    kernels = weights.view(len(weights), width, 1, 1).split(max(1, _WEIGHTS // width))
    missing = -count % _IMAGES
    # What is left over is filled up, not multiplied otherwise: a row's products are the same whoever else is there. Of
    # few rows all are copied for that, which takes less than to lay out a large basis once more.
    whole = 0 if missing and rows.numel() < basis.numel() else count - count % _IMAGES
    filled = F.pad(rows[whole:], (0, 0, 0, missing))
    parts = [part for part in (rows[:whole], filled) if len(part)]
    found = [torch.cat([_by_pixels(part, some) for some in kernels], dim=1) for part in parts]
    return (found[0] if len(found) == 1 else torch.cat(found))[:count]


def _by_pixels(rows: Float[Tensor, "n d"], kernels: Float[Tensor, "k d 1 1"]) -> Float[Tensor, "n k"]:
    # Rows as pixels of images with their channels last: a view.
    images = rows.view(_IMAGES, -1, 1, rows.shape[1]).permute(0, 3, 1, 2)
    return torch.conv2d(images, kernels).permute(0, 2, 3, 1).reshape(len(rows), -1)
