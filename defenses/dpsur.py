"""DPSUR: a step of DP-SGD is kept only if it appears to lower the loss of a validation batch.

Fu et al., "DPSUR: Accelerating Differentially Private Stochastic Gradient Descent Using Selective Update and Release",
VLDB 2024, arXiv:2311.14056. A step is taken, the noisy mean change of the loss on an independently drawn batch is
released, and the step is kept if this change is below beta C_v; otherwise it is undone.
Deviation: every round is charged, for its step and for its validation, even if it is rejected: the kept steps depend on
all rounds, so that charging accepted rounds alone, as in the paper, gives no valid bound. The loss change of each
example is clipped to C_v, and the sum divided by the expected batch: noise is therefore sigma_v C_v / B_v on the mean,
while the paper clips the mean itself and adds 2 sigma_v C_v for any batch. Optimizer state is rolled back too.
Guarantee: each step is a Gaussian mechanism at the defense's multiplier, and its validation another, of multiplier
sigma_v, on a Poisson sample at its own rate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .core import (
    Block,
    Bound,
    BoundKind,
    Context,
    Defense,
    Everything,
    LossChange,
    Stateless,
    StepPlan,
    Trial,
    bounded,
    checked_multiplier,
    clip,
)


@dataclass(frozen=True, kw_only=True)
class Dpsur(Stateless):
    """DP-SGD's block, with a trial on the change of the loss."""

    bound: Bound
    loss_clip: float
    beta: float
    validation_rate: float
    validation_noise_multiplier: float

    def __post_init__(self) -> None:
        if not 1e-9 <= self.loss_clip <= 1e6:
            raise ValueError(f"loss_clip must be in [1e-9, 1e6], got {self.loss_clip}")
        if math.isnan(self.beta):
            raise ValueError("beta must be a number, got NaN")
        if not 0 < self.validation_rate <= 1:
            raise ValueError(f"validation_rate must be in (0, 1], got {self.validation_rate}")
        checked_multiplier(self.validation_noise_multiplier)

    def plan(self, context: Context) -> StepPlan:
        """Plans DP-SGD's block, and a trial that keeps the step if the noisy mean loss falls enough."""
        if context.parameters is None:
            raise ValueError("this method compares two parameter points, and this context has none")
        change = Block(codec=Everything(1), bound=clip(self.loss_clip), query=LossChange(context.parameters))
        trial = Trial(
            plan=StepPlan(change).at(self.validation_noise_multiplier),
            rate=self.validation_rate,
            below=self.beta * self.loss_clip,
        )
        return StepPlan(Block(codec=Everything(context.dim), bound=self.bound), trial=trial)


def dpsur(
    *,
    clip_norm: float = 1.0,
    loss_clip: float = 0.1,
    beta: float = 0.0,
    validation_rate: float = 0.025,
    validation_noise_multiplier: float = 5.0,
    bound: BoundKind = "clip",
    regulariser: float | None = None,
    noise_multiplier: float | None = None,
) -> Defense:
    """DP-SGD that undoes steps which do not lower the loss.

    Args:
        clip_norm: C, largest norm of an example's gradient, L2, in gradient units.
        loss_clip: C_v, largest change of an example's loss, in units of the loss.
        beta: a step is kept if the noisy mean change is below beta C_v; infinity keeps every step (in Python; use a
            large number in a suite).
        validation_rate: q_v, probability with which each example joins a validation batch, independently of the step's.
        validation_noise_multiplier: sigma_v, noise standard deviation / C_v of the summed changes; unchanged by
            calibration.
        bound: bounding method: "clip", "normalize" (AUTO-S, NSGD), "adaptive_weight" (DP-PSAC) or "adaptive", a clip
            norm that follows a quantile (in suites; `adapted` in Python).
        regulariser: parameter of "normalize" or "adaptive_weight", in gradient units; None for the papers' 0.01 and
            0.1.
        noise_multiplier: noise standard deviation / C of the steps; None until calibrated.
    """
    method = Dpsur(
        bound=bounded(clip_norm, bound, regulariser),
        loss_clip=loss_clip,
        beta=beta,
        validation_rate=validation_rate,
        validation_noise_multiplier=validation_noise_multiplier,
    )
    return Defense(method, noise_multiplier)
