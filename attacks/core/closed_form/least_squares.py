"""Least squares with bitwise reproducible results.

PyTorch's driver for CPUs, LAPACK's gelsy, takes its first pivots from uninitialised memory up to version 2.13: equal
calls differ in their last digits, which a search amplifies. gelsd does not pivot.
"""

from __future__ import annotations

import torch
from torch import Tensor

_PIVOTS_ARE_SET = tuple(int(number) for number in torch.__version__.split(".")[:2]) >= (2, 14)


def least_squares(matrix: Tensor, values: Tensor) -> Tensor:
    """Returns x that minimises |matrix x - values|; on CPUs the x of smallest norm.

    Args:
        matrix: [..., rows, unknowns]; of full rank on a GPU.
        values: [..., rows, columns].

    Returns:
        Solutions, a column for each column of values, [..., unknowns, columns].
    """
    driver = None if matrix.is_cuda or _PIVOTS_ARE_SET else "gelsd"
    return torch.linalg.lstsq(matrix, values, driver=driver).solution
