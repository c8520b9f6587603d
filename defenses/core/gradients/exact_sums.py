"""Exact integer sums for discrete Gaussian noise: contributions are rounded to units within their bound, then added.

A float sum depends on the order of its summation and on its other terms: removing one example changes the last bits of
the others' part, so the proof for discrete noise does not apply to such a sum. Therefore each example is processed
alone, from its gradient to its rounded contribution, and integers are added.

Guarantee:
    For every example the rounded contribution, in units, has an L2 norm of at most bound / unit, exactly: it is rounded
    towards zero, after it was shortened by more than the float64 error of its norm. Removing one example subtracts
    exactly its own contribution from the sum. Assumes that a gradient computed for an example alone is a function of
    that example: its last bits may depend on the machine and be random there, but not on other examples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ..plan.bound import Bound
from ..plan.defense import StepPlan
from ..plan.query import ExampleLosses, Gradients
from .reference_sums import contributions

_MOST_EXAMPLES = 2**22  # in a sum
_MOST_UNITS = 2.0**40  # per contribution: a sum is then below 2^62, and float64 represents each contribution exactly


def whole_units(rows: Float[Tensor, "rows size"], bound: Bound, unit: float) -> Int64[Tensor, "rows size"]:
    """Returns bounded rows in whole units, with norms that do not exceed the bound.

    Args:
        rows: the output of `Bound`, whose norms may exceed it by the rounding of their dtype.
        bound: finite.
        unit: the public unit, in gradient units.
    """
    exact = rows.double()
    # Relative float64 errors: at most 2^-53 per term of a sum of squares, and 2^-53 for a product or a quotient.
    slack = 1 + (rows.shape[1] + 16) * 2.0**-52
    norms = torch.linalg.vector_norm(exact, dim=1, keepdim=True) * slack
    factors = torch.where(norms > bound.norm, bound.norm / norms / slack, 1.0)
    # Towards zero, because rounding to nearest may exceed the bound; product and quotient round by less than 2^-50.
    return (exact * factors / unit * (1 - 2.0**-50)).trunc().long()


def exact_sums(
    plan: StepPlan,
    examples: Sequence[tuple[Gradients, ExampleLosses | None]],
    units: Sequence[float],
    device: torch.device,
) -> tuple[Tensor, ...]:
    """Returns each block's sum: whole units as int64, or float64 for an unbounded block, which has no guarantee.

    Args:
        plan: the step's plan.
        examples: gradients and losses of each example alone, a row.
        units: public unit of each block, in gradient units.
        device: device of the result.

    Raises:
        ValueError: if the units might not fit into 64 bits.
    """
    if len(examples) > _MOST_EXAMPLES:
        raise ValueError(f"an exact sum must be of 2^22 examples or fewer, got {len(examples)}")
    bounded = [math.isfinite(block.bound.sensitivity) for block in plan.blocks]
    for block, unit, finite in zip(plan.blocks, units, bounded, strict=True):
        if finite and not block.bound.norm / unit < _MOST_UNITS:
            raise ValueError(
                f"an exact contribution must be below 2^40 units, got {block.bound.norm / unit:.1e}; exact noise needs "
                "a noise multiplier of about 0.001 or more"
            )
    kinds = [torch.int64 if finite else torch.float64 for finite in bounded]
    sums = tuple(torch.zeros(b.codec.size, dtype=k, device=device) for b, k in zip(plan.blocks, kinds, strict=True))
    for example in examples:
        for total, rows, block, unit, finite in zip(
            sums, contributions(plan, *example), plan.blocks, units, bounded, strict=True
        ):
            total += whole_units(rows, block.bound, unit).sum(dim=0) if finite else rows.sum(dim=0, dtype=torch.float64)
    return sums
