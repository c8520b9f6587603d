"""Norms of float32 rows, without the accumulated rounding error of long sums.

On the CPU, PyTorch adds the squares of a norm sequentially. For 11 million float32 numbers, the computed norm is too
small by a relative 4e-4, and rows clipped with it would exceed the clip norm by as much. Long rows are therefore
measured in parts, whose norms are combined in float64.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

_PART = 4096  # numbers whose float32 norm is accurate to 2e-7


def lengths(rows: Float[Tensor, "rows size"]) -> Float[Tensor, " rows"]:
    """Computes L2 norms, float64; differentiable. Infinite or 0 if squares overflow or underflow the rows' dtype."""
    size = rows.shape[1]
    if size <= 2 * _PART or rows.dtype == torch.float64:
        return torch.linalg.vector_norm(rows, dim=1).double()
    whole = size // _PART * _PART
    # A view, without a copy of the rows.
    parts = torch.linalg.vector_norm(rows[:, :whole].unflatten(1, (-1, _PART)), dim=2).double()
    remainder = torch.linalg.vector_norm(rows[:, whole:], dim=1).double()
    return torch.linalg.vector_norm(torch.cat([parts, remainder.unsqueeze(1)], dim=1), dim=1)
