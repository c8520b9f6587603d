"""Least squares, the same to the last digit at every call.

PyTorch's driver for CPUs, LAPACK's gelsy, takes its first pivots from uninitialised memory up to version 2.13: equal
calls differ in their last digits, which a search amplifies. gelsd has no pivots.
"""

from __future__ import annotations

import torch
from torch import Tensor

_PIVOTS_ARE_SET = tuple(int(number) for number in torch.__version__.split(".")[:2]) >= (2, 14)


def least_squares(matrix: Tensor, values: Tensor) -> Tensor:
    """Returns the solutions x of least |matrix x - values|, and of these the shortest on CPUs.

    Args:
        matrix: [..., rows, unknowns]; of full rank on a GPU.
        values: [..., rows, columns].

    Returns:
        A column of unknowns for each of values, [..., unknowns, columns].
    """
    driver = None if matrix.is_cuda or _PIVOTS_ARE_SET else "gelsd"
    return torch.linalg.lstsq(matrix, values, driver=driver).solution
