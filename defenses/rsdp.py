"""RSDP-SGD: random sparsification at a constant rate, as the PCDP-SGD paper compares with it.

Gradients are restricted to a random set of coordinates before they are bounded (Zhu & Blaschko, TMLR 2023), but without
the cooling of that paper: the fraction dropped is `sparsity` from the first step to the last. It is not how its authors
run theirs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .core import Block, Context, Coordinates, Defense, Stateless, StepPlan, clip


@dataclass(frozen=True, kw_only=True)
class Rsdp(Stateless):
    """Keeps a uniformly random set of coordinates of constant size, redrawn each epoch."""

    clip_norm: float
    sparsity: float

    def __post_init__(self) -> None:
        clip(self.clip_norm)  # refuses what is not a norm
        if not 0 <= self.sparsity < 1:
            raise ValueError(f"sparsity must be in [0, 1), got {self.sparsity}")

    def plan(self, context: Context) -> StepPlan:
        """One clipped block in the coordinates of the epoch's mask."""
        order = torch.randperm(context.dim, generator=context.coins(context.epoch)).to(context.device)
        kept = Coordinates(order[int(self.sparsity * context.dim) :], dim=context.dim)
        return StepPlan(Block(codec=kept, bound=clip(self.clip_norm)))


def rsdp(*, clip_norm: float = 1.0, sparsity: float = 0.3, noise_multiplier: float | None = None) -> Defense:
    """DP-SGD on a random set of coordinates of constant size, redrawn each epoch.

    Args:
        clip_norm: C, largest norm of an example's masked gradient, L2, in gradient units.
        sparsity: fraction of coordinates dropped.
        noise_multiplier: noise standard deviation / C; None until it is calibrated.
    """
    return Defense(Rsdp(clip_norm=clip_norm, sparsity=sparsity), noise_multiplier=noise_multiplier)
