"""Completion of a rank-one matrix from some of its entries: the gradient of a last layer behind a mask."""

import torch
from torch import Tensor


def completed(matrix: Tensor, seen: Tensor, column: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """U v^T from the entries that are seen, by spreading from one row over what is connected to it.

    Args:
        matrix: [rows, columns].
        seen: bool, in the same shape.
        column: u up to a factor, where it is known; [rows].

    Returns:
        The matrix, and bool [columns]: those whose entries follow. The others are 0.
    """
    rows, columns = matrix.shape
    shown = seen.to(matrix)
    values = matrix * shown
    if column is not None:
        u, has_row = column, torch.ones(rows, dtype=torch.bool, device=matrix.device)
    else:
        first = int(values.norm(dim=1).argmax())
        u, has_row = values.new_zeros(rows), torch.zeros(rows, dtype=torch.bool, device=matrix.device)
        u[first], has_row[first] = 1.0, True
    v, has_column = values.new_zeros(columns), torch.zeros(columns, dtype=torch.bool, device=matrix.device)
    # Each round reaches what is one entry further away: at most as many as there are rows.
    for _ in range(rows + 1):
        before = int(has_row.sum() + has_column.sum())
        weights = shown * (u.square() * has_row)[:, None]
        v = (values * (u * has_row)[:, None]).sum(dim=0) / weights.sum(dim=0).clamp(min=torch.finfo(u.dtype).tiny)
        has_column = weights.sum(dim=0) > 0
        if column is None:
            weights = shown * (v.square() * has_column)
            u = (values * (v * has_column)).sum(dim=1) / weights.sum(dim=1).clamp(min=torch.finfo(u.dtype).tiny)
            has_row = weights.sum(dim=1) > 0
        if int(has_row.sum() + has_column.sum()) == before:
            break
    return u[:, None] * torch.where(has_column, v, 0.0), has_column
