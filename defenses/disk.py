"""DiSK: a simplified Kalman filter of gradients, with a look-ahead along the last step.

Zhang, Bu, Balle, Hong, Razaviyayn & Mirrokni, "DiSK: Differentially Private Optimizer with Simplified Kalman Filter for
Noise Reduction", ICLR 2025. Each example's gradient is computed at the parameters x and at x + gamma d, with d the last
step: their difference predicts how the gradient changes, while a plain average of past updates would lag behind. The
filtered update is (1 - kappa) times the last filtered update plus kappa times the new update.
Deviation: in the first step, without a previous step, the filter starts from its update.
Guarantee: each step is a Gaussian mechanism at the defense's multiplier: both points are functions of releases, and the
bound applies to the weighted mean of both gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .core import Block, Bound, BoundKind, Context, Defense, Everything, GradientAhead, Offset, StepPlan, bounded


@dataclass(frozen=True, kw_only=True)
class Disk:
    """Releases weighted means of gradients at two points; state: last filtered update, and the parameters before it."""

    bound: Bound
    kappa: float
    gamma: float

    def __post_init__(self) -> None:
        if not 1e-6 <= self.kappa <= 1:
            raise ValueError(f"kappa must be in [1e-6, 1], got {self.kappa}")
        if not 1e-6 <= self.gamma <= 1e6:
            raise ValueError(f"gamma must be in [1e-6, 1e6], got {self.gamma}")

    def start(self, context: Context) -> dict[str, Any] | None:
        """Returns no state before the first step."""
        return None

    def plan(self, state: dict[str, Any] | None, context: Context) -> tuple[dict[str, Any] | None, StepPlan]:
        """Plans gradients at the current point in the first step, and at both points afterwards."""
        if state is None or context.parameters is None:
            return state, StepPlan(Block(codec=Everything(context.dim), bound=self.bound))
        ahead = context.parameters + self.gamma * (context.parameters - state["before"])
        weight = (1 - self.kappa) / (self.kappa * self.gamma)
        block = Block(codec=Everything(context.dim), bound=self.bound, query=GradientAhead(ahead, weight))
        return state, StepPlan(block, post=Offset((1 - self.kappa) * state["filtered"], self.kappa))

    def observe(
        self, state: dict[str, Any] | None, context: Context, noisy: tuple[Tensor, ...], update: Tensor
    ) -> dict[str, Any]:
        """Returns the filtered update and the parameters of this step."""
        return {"filtered": update, "before": context.parameters}


def disk(
    *,
    clip_norm: float = 1.0,
    kappa: float = 0.7,
    gamma: float = 0.5,
    bound: BoundKind = "clip",
    regulariser: float | None = None,
    noise_multiplier: float | None = None,
) -> Defense:
    """DP-SGD with a simplified Kalman filter.

    Args:
        clip_norm: C, largest norm of an example's weighted mean of both gradients, L2, in gradient units.
        kappa: weight of the new update in the filtered update; 1 is DP-SGD.
        gamma: distance of the second point, in units of the last step.
        bound: bounding method: "clip", "normalize" (AUTO-S, NSGD), "adaptive_weight" (DP-PSAC) or "adaptive", a clip
            norm that follows a quantile (in suites; `adapted` in Python).
        regulariser: parameter of "normalize" or "adaptive_weight", in gradient units; None for the papers' 0.01 and
            0.1.
        noise_multiplier: noise standard deviation / C; None until calibrated.
    """
    return Defense(Disk(bound=bounded(clip_norm, bound, regulariser), kappa=kappa, gamma=gamma), noise_multiplier)
