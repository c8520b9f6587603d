"""Completion of a rank-1 matrix from some of its entries: the gradient of a last layer under a mask."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class RankOne:
    """Matrix u v^T as far as it follows from a row: the component of entries that are connected to that.

    Attributes:
        left: u, [rows], 0 for open rows; 1 at the starting row.
        rows: bool, rows that follow.
        right: v, [columns], the same.
        columns: bool.
    """

    left: Tensor
    rows: Tensor
    right: Tensor
    columns: Tensor


def spread(matrix: Tensor, observed: Tensor, row: int) -> RankOne:
    """Returns factors of a rank-1 matrix, spread from a row over nonzero entries that connect to it.

    Args:
        matrix: [rows, columns].
        observed: bool, in the same shape.
        row: the starting row; some of it is seen.
    """
    shown = observed.to(matrix)
    values = matrix * shown
    u, has_row = values.new_zeros(len(values)), torch.zeros_like(observed[:, 0])
    u[row], has_row[row] = 1.0, True
    v, has_column = torch.zeros_like(values[0]), torch.zeros_like(observed[0])
    tiny = torch.finfo(u.dtype).tiny
    # Each round reaches entries a step further away: at most as many rounds as rows.
    for _ in range(len(matrix) + 1):
        before = int(has_row.sum() + has_column.sum())
        weights = shown.T @ (u.square() * has_row)
        v, has_column = (values.T @ (u * has_row)) / weights.clamp(min=tiny), weights > 0
        weights = shown @ (v.square() * has_column)
        u, has_row = (values @ (v * has_column)) / weights.clamp(min=tiny), weights > 0
        if int(has_row.sum() + has_column.sum()) == before:
            break
    return RankOne(left=u, rows=has_row, right=v, columns=has_column)


def components(matrix: Tensor, observed: Tensor) -> list[RankOne]:
    """Returns all components of a rank-1 matrix that have an entry away from 0, at most as many as rows.

    Args:
        matrix: [rows, columns].
        observed: bool, in the same shape.
    """
    remaining, factors = (matrix * observed).abs().sum(dim=1), []
    while bool((remaining > 0).any()):
        factors.append(spread(matrix, observed, int(remaining.argmax())))
        remaining = torch.where(factors[-1].rows, 0.0, remaining)
    return factors
