"""The linear system that R-GAP solves at a convolution, as matrices, and its rank.

Knowing the derivatives k by a layer's output z, its gradient G and its weights, the layer's input x obeys K x = G and
W x = z. K has the same block for every input channel, K0, which depends on k and the geometry alone. Columns are pixels
of the input without its padding, so what is padded is no unknown.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import sparse
from torch import Tensor, nn

TOLERANCE = 1e-10  # of eigenvalues, relative to the largest: 1e-5 of singular values


class Observed(NamedTuple):
    """One convolution and what an attacker has recovered when it comes to its input."""

    layer: nn.Conv2d
    inputs: Tensor  # [channels, height, width]: the unknowns, for checks
    outputs: Tensor  # z
    derivatives: Tensor  # k, of the loss by z


def observed(model: nn.Module, image: Tensor, label: float) -> list[Observed]:
    """All convolutions of a network with one logit, from one pass with the logistic loss; `label` is 1 or -1."""
    uses: list[Any] = []
    convolutions = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d)]
    handles = [c.register_forward_hook(lambda c, given, z: uses.append((c, given[0], z))) for c in convolutions]
    loss = nn.functional.softplus(-label * model(image.unsqueeze(0))).sum()
    for handle in handles:
        handle.remove()
    gradients = torch.autograd.grad(loss, [z for _, _, z in uses])
    return [
        Observed(layer, given[0].detach(), z[0].detach(), k[0])
        for (layer, given, z), k in zip(uses, gradients, strict=True)
    ]


def taps(use: Observed) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(output position, place in the kernel, pixel of the input) wherever a kernel meets the image."""
    layer, (_, height, width), (_, rows, columns) = use.layer, use.inputs.shape, use.outputs.shape
    down, across = (int(size) for size in layer.padding)
    y = np.arange(rows)[:, None] * layer.stride[0] + np.arange(layer.kernel_size[0]) - down  # [rows, a]
    x = np.arange(columns)[:, None] * layer.stride[1] + np.arange(layer.kernel_size[1]) - across
    inside = ((y >= 0) & (y < height))[:, None, :, None] & ((x >= 0) & (x < width))[None, :, None, :]
    row, column, a, b = np.nonzero(inside)
    return row * columns + column, a * layer.kernel_size[1] + b, y[row, a] * width + x[column, b]


def of_weights(use: Observed) -> sparse.csr_array:
    """W: from the input to z [filters * positions, channels * pixels]."""
    position, tap, pixel = taps(use)
    weight = use.layer.weight.detach().flatten(2).numpy()
    filters, channels, _ = weight.shape
    pixels, positions = use.inputs[0].numel(), use.outputs[0].numel()
    f, c = np.arange(filters)[:, None, None], np.arange(channels)[None, :, None]
    rows, columns, values = np.broadcast_arrays(f * positions + position, c * pixels + pixel, weight[:, :, tap])
    shape = (filters * positions, channels * pixels)
    return sparse.coo_array((values.ravel(), (rows.ravel(), columns.ravel())), shape=shape).tocsr()


def of_gradient(use: Observed) -> sparse.csr_array:
    """K0: from one channel of the input to its part of the gradient [filters * kernel, pixels]."""
    position, tap, pixel = taps(use)
    k = use.derivatives.flatten(1).numpy()
    kernel = use.layer.weight[0, 0].numel()
    rows, columns = np.broadcast_arrays(np.arange(len(k))[:, None] * kernel + tap, pixel)
    shape = (len(k) * kernel, use.inputs[0].numel())
    return sparse.coo_array((k[:, position].ravel(), (rows.ravel(), columns.ravel())), shape=shape).tocsr()


def rank_of(gram: np.ndarray) -> int:
    """Rank of a matrix of which this is the Gram matrix."""
    values = torch.linalg.eigvalsh(torch.from_numpy(gram))
    return int((values > TOLERANCE * values[-1]).sum())


def gram(matrix: sparse.csr_array) -> np.ndarray:
    """Of a matrix at scale 1, which changes no rank: k is far smaller than the weights."""
    found = (matrix.T @ matrix).toarray()
    return found / found.diagonal().max()


def rank_of_system(use: Observed) -> int:
    """Rank of [I kron K0; W]."""
    weights = gram(of_weights(use))
    return rank_of(weights + np.kron(np.eye(len(use.inputs)), gram(of_gradient(use))))
