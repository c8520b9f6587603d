"""Lengths of rows in float32, without the drift of long sums.

PyTorch adds the squares of a norm one after another on the CPU. Of 11 million numbers in float32 that loses 4e-4 of the
length, always downwards: a bound that goes by it lets rows be longer by as much. So long rows are measured in parts.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

_PART = 4096  # numbers, whose norm in float32 is right to 2e-7


def lengths(rows: Float[Tensor, "rows size"]) -> Float[Tensor, " rows"]:
    """L2 norms of the rows, float64; differentiable. Infinite or 0 where a square leaves the format of the rows."""
    size = rows.shape[1]
    if size <= 2 * _PART or rows.dtype == torch.float64:
        return torch.linalg.vector_norm(rows, dim=1).double()
    whole = size // _PART * _PART
    # A view: nothing of the rows' size is written.
    parts = torch.linalg.vector_norm(rows[:, :whole].unflatten(1, (-1, _PART)), dim=2).double()
    rest = torch.linalg.vector_norm(rows[:, whole:], dim=1).double()
    return torch.linalg.vector_norm(torch.cat([parts, rest.unsqueeze(1)], dim=1), dim=1)
