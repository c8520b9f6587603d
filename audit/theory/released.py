"""Releases of given per-example gradients under a method's plan, many at low cost: one clipped sum, noise for each."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from leakbench.defenses.core import Codec, Context, Defense, Noise, StepPlan, clipped_sums
from leakbench.defenses.core.gradients.executor import add_noise

from .claim import Setup


def plan_of(defense: Defense, context: Context) -> StepPlan:
    """Returns the plan of a step, from a fresh state."""
    return defense.plan(defense.start(context), context)[1]


def released(
    plan: StepPlan, rows: Float[Tensor, "rows dim"], *, sigma: float = 0.0, noise: Noise | None = None, count: int = 1
) -> Float[Tensor, "count dim"]:
    """Decoded releases of the same rows under the same plan, each with independent noise.

    Args:
        plan: of a step.
        rows: per-example gradients.
        sigma: noise multiplier; 0 for no noise.
        noise: source of the noise.
        count: number of releases.
    """
    sums = clipped_sums(plan, [lambda _point: rows], rows)
    executed = plan.at(sigma)
    # Copies, because noise is added in place.
    drawn = [add_noise(executed, [total.clone() for total in sums], noise, rows.dtype).total for _ in range(count)]
    return torch.stack(drawn)


def mask_of(codec: Codec, device: torch.device) -> Float[Tensor, " dim"]:
    """Mask of the decoded release: 1 for coordinates that rows reach, 0 elsewhere."""
    ones = torch.ones(1, codec.dim, dtype=torch.float64, device=device)
    return (codec.decode(codec.encode(ones)[0]) != 0).double()


def masks_of(defense: Defense, setup: Setup, dim: int, count: int) -> Float[Tensor, "count dim"]:
    """Masks of `count` epochs, on the CPU."""
    plans = (plan_of(defense, setup.context(dim, step, count)) for step in range(count))
    return torch.stack([mask_of(plan.blocks[0].codec, setup.device).cpu() for plan in plans])
