"""Reference clipped sums from per-example gradients (query, encode, bound, sum), which faster engines must match.

Guarantee:
    Each example adds to a block the output of `Block.contributions` for it, and nothing else; a non-finite row adds
    zero, and affects no other row. Sums accumulate in float64, so the order of micro-batches affects the last digits
    only.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor

from ..plan.bound import finite_rows
from ..plan.defense import StepPlan
from ..plan.query import ExampleLosses, Gradients, Query


def contributions(
    plan: StepPlan, gradients: Gradients, losses: ExampleLosses | None = None
) -> tuple[Float[Tensor, "rows _"], ...]:
    """Returns each example's contribution to each block: query, encode, bound. A tensor [rows, size] per block.

    Args:
        plan: the step's plan.
        gradients: per-example gradients.
        losses: per-example losses; needed for queries of losses.

    Raises:
        ValueError: for a query of losses if there are none.
    """

    @cache  # by point: the blocks of a plan share their rows
    def finite(point: Tensor | None) -> Tensor:
        return finite_rows(gradients(point))

    @cache
    def known(point: Tensor | None) -> Tensor:
        assert losses is not None  # noqa: S101  by `source`
        return losses(point)

    def source(query: Query) -> Gradients | ExampleLosses:
        if not getattr(query, "of_losses", False):
            return finite
        if losses is None:
            raise ValueError(f"{type(query).__name__} must be asked of a model and data, got gradients alone")
        return known

    return tuple(block.contributions(source(block.query)) for block in plan.blocks)


def added_up(plan: StepPlan, gradients: Gradients, losses: ExampleLosses | None = None) -> tuple[Tensor, ...]:
    """Returns the float64 sum of a micro-batch's contributions to each block: private."""
    return tuple(rows.sum(dim=0, dtype=torch.float64) for rows in contributions(plan, gradients, losses))


def totals(plan: StepPlan, parts: Sequence[tuple[Tensor, ...]], device: torch.device) -> tuple[Tensor, ...]:
    """Returns the sum over micro-batches of each block, before any noise: private.

    Args:
        plan: the step's plan.
        parts: sums of each micro-batch; empty for an empty batch.
        device: device of the result.

    Returns:
        A float64 vector [size] per block, to which noise may be added in place.
    """
    if len(parts) == 1:
        return tuple(part.double() for part in parts[0])
    zeros = tuple(torch.zeros(b.codec.size, dtype=torch.float64, device=device) for b in plan.blocks)
    for part in parts:
        for total, summand in zip(zeros, part, strict=True):
            total += summand
    return zeros


def clipped_sums(plan: StepPlan, batches: Sequence[Gradients], like: Tensor) -> tuple[Tensor, ...]:
    """Returns each block's sum of bounded contributions by the reference, for releases of given rows and for tests.

    Args:
        plan: the step's plan.
        batches: gradients of each micro-batch; empty for an empty batch.
        like: device and dtype of the result.

    Returns:
        A vector [size] per block.
    """
    sums = totals(plan, [added_up(plan, gradients) for gradients in batches], like.device)
    return tuple(total.to(like.dtype) for total in sums)
