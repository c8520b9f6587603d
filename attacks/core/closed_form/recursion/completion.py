"""Completion of a rank-one matrix from some of its entries: the gradient of a last layer behind a mask."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class RankOne:
    """A matrix u v^T as far as it follows from one row: the component of entries that are connected to that.

    Attributes:
        left: u, [rows], 0 where it does not follow; 1 at the row that it was begun from.
        rows: bool, where it does.
        right: v, [columns], the same.
        columns: bool.
    """

    left: Tensor
    rows: Tensor
    right: Tensor
    columns: Tensor


def spread(matrix: Tensor, seen: Tensor, row: int) -> RankOne:
    """Factors of a rank-one matrix, by spreading from one row over what is connected to it by entries away from 0.

    Args:
        matrix: [rows, columns].
        seen: bool, in the same shape.
        row: to begin from; some of it is seen.
    """
    shown = seen.to(matrix)
    values = matrix * shown
    u, has_row = values.new_zeros(len(values)), torch.zeros_like(seen[:, 0])
    u[row], has_row[row] = 1.0, True
    v, has_column = torch.zeros_like(values[0]), torch.zeros_like(seen[0])
    tiny = torch.finfo(u.dtype).tiny
    # Each round reaches what is one entry further away: at most as many as there are rows.
    for _ in range(len(matrix) + 1):
        before = int(has_row.sum() + has_column.sum())
        weights = shown.T @ (u.square() * has_row)
        v, has_column = (values.T @ (u * has_row)) / weights.clamp(min=tiny), weights > 0
        weights = shown @ (v.square() * has_column)
        u, has_row = (values @ (v * has_column)) / weights.clamp(min=tiny), weights > 0
        if int(has_row.sum() + has_column.sum()) == before:
            break
    return RankOne(left=u, rows=has_row, right=v, columns=has_column)


def components(matrix: Tensor, seen: Tensor) -> list[RankOne]:
    """All components of a rank-one matrix that have an entry away from 0, at most one for each row.

    Args:
        matrix: [rows, columns].
        seen: bool, in the same shape.
    """
    left, found = (matrix * seen).abs().sum(dim=1), []
    while bool((left > 0).any()):
        found.append(spread(matrix, seen, int(left.argmax())))
        left = torch.where(found[-1].rows, 0.0, left)
    return found
