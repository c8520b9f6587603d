"""DP-Adam: Adam on the noisy updates of DP-SGD.

Kingma & Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015, Algorithm 1, on the updates of Abadi et al., CCS
2016. If noise dominates, the second moment is that of the noise, and Adam is DP-SGD with momentum and another learning
rate; `dp_adam_bc` subtracts the noise variance.
Deviation: none. Adam is also available as a training optimizer, `optimizer = "adam"`, for any method; here it is part
of the defense, so the training optimizer stays SGD, and its rate is Adam's.
Guarantee: each step is a Gaussian mechanism, as in DP-SGD: both moments are functions of releases.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .core import Adaptive, Block, Bound, BoundKind, Context, Defense, Everything, StepPlan, bounded

Moments = tuple[Tensor, Tensor, Tensor]
"""Moving averages of updates, of their squares, and of the noise variance in an entry of an update."""


@dataclass(frozen=True, kw_only=True)
class DpAdam:
    """Releases a single block of all coordinates; state: both moments, and the noise variance in the second."""

    bound: Bound
    betas: tuple[float, float]
    stabiliser: float
    corrected: bool = False

    def __post_init__(self) -> None:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"beta1 and beta2 must be in [0, 1), got {self.betas[0]} and {self.betas[1]}")
        if not 0 < self.stabiliser <= 1e18:  # its square must fit in float32
            raise ValueError(f"stabiliser must be above 0 and at most 1e18, got {self.stabiliser}")

    def start(self, context: Context) -> Moments:
        """Returns zero moments."""
        none = torch.zeros(context.dim, device=context.device)
        return none, none.clone(), torch.zeros((), dtype=torch.float64)

    def plan(self, state: Moments, context: Context) -> tuple[Moments, StepPlan]:
        """Plans DP-SGD's block, and Adam's step after the noise."""
        block = Block(codec=Everything(context.dim), bound=self.bound)
        return state, StepPlan(block, post=self._step(state, context))

    def observe(self, state: Moments, context: Context, noisy: tuple[Tensor, ...], update: Tensor) -> Moments:
        """Returns the moments, updated with this step's noisy gradient."""
        moments = self._step(state, context).moments(noisy[0] / context.expected_batch)
        return *moments, self._noise(state, context)

    def _step(self, state: Moments, context: Context) -> Adaptive:
        first, second, _ = state
        variance = float(self._noise(state, context)) / (1 - self.betas[1] ** (context.step + 1))
        settings = (context.step, self.betas, self.stabiliser)
        return Adaptive(first, second, *settings, variance if self.corrected else None)

    def _noise(self, state: Moments, context: Context) -> Tensor:
        """Moving average of the noise variance, updated with this step's, which varies if the clip norm is adaptive."""
        block = Block(codec=Everything(context.dim), bound=self.bound)
        std = block.noise_std(context.noise_multiplier) / context.expected_batch
        return self.betas[1] * state[2] + (1 - self.betas[1]) * std**2


def dp_adam(
    *,
    clip_norm: float = 1.0,
    beta1: float = 0.9,
    beta2: float = 0.999,
    stabiliser: float = 1e-8,
    bound: BoundKind = "clip",
    regulariser: float | None = None,
    noise_multiplier: float | None = None,
) -> Defense:
    """DP-SGD with Adam's step.

    Args:
        clip_norm: C, largest norm of an example's gradient, L2, in gradient units.
        beta1: decay of the average of updates, per step.
        beta2: decay of the average of their squares, per step.
        stabiliser: added to the root of the average of squares, in gradient units.
        bound: bounding method: "clip", "normalize" (AUTO-S, NSGD), "adaptive_weight" (DP-PSAC) or "adaptive", a clip
            norm that follows a quantile (in suites; `adapted` in Python).
        regulariser: parameter of "normalize" or "adaptive_weight", in gradient units; None for the papers' 0.01 and
            0.1.
        noise_multiplier: noise standard deviation / C; None until calibrated.
    """
    method = DpAdam(bound=bounded(clip_norm, bound, regulariser), betas=(beta1, beta2), stabiliser=stabiliser)
    return Defense(method, noise_multiplier)
