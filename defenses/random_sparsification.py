"""Random sparsification: DP-SGD on a random set of coordinates that shrinks and changes every epoch.

Zhu & Blaschko, "Improving Differentially Private SGD via Randomly Sparsified Gradients", TMLR 2023.
Coordinates are dropped before clipping, so the clip norm is spent on fewer of them; dropped ones get no
noise. The mask never looks at data, so it costs no privacy. One mask over the whole flat vector; it changes
between steps only.
"""

from dataclasses import dataclass

import torch

from .core import Block, Bound, BoundKind, Context, Coordinates, Defense, Stateless, StepPlan, bounded


@dataclass(frozen=True, kw_only=True)
class RandomSparsification(Stateless):
    """Keeps a uniformly random set of coordinates, redrawn `refreshes` times an epoch."""

    bound: Bound
    final_sparsity: float
    refreshes: int = 1
    cooling: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.final_sparsity < 1:
            raise ValueError(f"final_sparsity must be in [0, 1), got {self.final_sparsity}")
        if self.refreshes < 1:
            raise ValueError(f"refreshes must be at least 1, got {self.refreshes}")

    def plan(self, context: Context) -> StepPlan:
        """One clipped block in the coordinates of the current mask."""
        # A function of the step, so that micro-batches share a mask. The authors' code counts loader iterations and may
        # redraw inside a batch: coordinates that the later mask alone drops then get signal and no noise.
        within = context.step % context.steps_per_epoch * self.refreshes // context.steps_per_epoch
        refresh = context.epoch * self.refreshes + within
        last = context.epochs * self.refreshes - 1
        # r (e R + k) / (E R - 1) at refresh k of epoch e: 0 at the first one, r at the last.
        sparsity = self.final_sparsity * (refresh / max(1, last) if self.cooling else 1.0)
        order = torch.randperm(context.dim, generator=context.coins(refresh)).to(context.device)
        kept = Coordinates(order[int(sparsity * context.dim) :], dim=context.dim)
        return StepPlan(Block(codec=kept, bound=self.bound))


def random_sparsification(
    *,
    clip_norm: float = 1.0,
    final_sparsity: float = 0.9,
    refreshes: int = 1,
    cooling: bool = True,
    bound: BoundKind = "clip",
    regulariser: float | None = None,
    noise_multiplier: float | None = None,
) -> Defense:
    """DP-SGD whose sparsity (fraction dropped) grows linearly from 0 to `final_sparsity`.

    Args:
        clip_norm: C, largest norm of an example's masked gradient, L2, in gradient units.
        final_sparsity: fraction of coordinates dropped at the last refresh.
        refreshes: new masks per epoch; as many as there are steps in an epoch for one a step.
        cooling: False drops `final_sparsity` from the first step on.
        bound: how a row is brought to that norm: "clip", "normalize" (AUTO-S, NSGD) or "adaptive_weight" (DP-PSAC).
        regulariser: of the latter two, in gradient units; their papers' 0.01 and 0.1 if None.
        noise_multiplier: noise standard deviation / C; None until it is calibrated.
    """
    method = RandomSparsification(
        bound=bounded(clip_norm, bound, regulariser),
        final_sparsity=final_sparsity,
        refreshes=refreshes,
        cooling=cooling,
    )
    return Defense(method, noise_multiplier)
