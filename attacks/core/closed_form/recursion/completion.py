"""Completion of a rank-1 matrix from some of its entries, such as the gradient of a last layer under a mask."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class RankOne:
    """Part of a matrix u v^T that follows from one of its rows: the connected component of observed entries.

    Attributes:
        left: u, [rows]; 1 at the starting row, 0 for undetermined rows.
        rows: bool, determined rows.
        right: v, [columns]; 0 for undetermined columns.
        columns: bool, determined columns.
    """

    left: Tensor
    rows: Tensor
    right: Tensor
    columns: Tensor


def spread(matrix: Tensor, observed: Tensor, row: int) -> RankOne:
    """Returns factors of a rank-1 matrix on the component of nonzero observed entries that are connected to a row.

    Args:
        matrix: [rows, columns].
        observed: bool, in the same shape.
        row: the starting row, with an observed nonzero entry.
    """
    shown = observed.to(matrix)
    values = matrix * shown
    u, has_row = values.new_zeros(len(values)), torch.zeros_like(observed[:, 0])
    u[row], has_row[row] = 1.0, True
    v, has_column = torch.zeros_like(values[0]), torch.zeros_like(observed[0])
    tiny = torch.finfo(u.dtype).tiny
    # Each round extends the component by a step in the bipartite graph, so there are at most as many rounds as rows.
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
    """Returns the components of a rank-1 matrix that have a nonzero entry, at most as many as rows.

    Args:
        matrix: [rows, columns].
        observed: bool, in the same shape.
    """
    remaining, factors = (matrix * observed).abs().sum(dim=1), []
    while bool((remaining > 0).any()):
        factors.append(spread(matrix, observed, int(remaining.argmax())))
        remaining = torch.where(factors[-1].rows, 0.0, remaining)
    return factors
