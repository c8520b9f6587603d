"""Adaptive clipping: the clip norm follows a quantile of the gradient norms, read off a noisy count.

Andrew, Thakkar, McMahan & Ramaswamy, "Differentially Private Learning with Adaptive Clipping", NeurIPS 2021, Algorithm
1. A second block of the same batch counts the gradients within the clip norm, as +1/2 or -1/2 each, so that one
example moves it by 1/2; the clip norm then moves geometrically towards the quantile.
Deviation: the count's noise follows from the step's multiplier sigma and `share`, where the paper gives it as a number
of examples s_b: that is a share of (sigma / (2 s_b))^2. Its s_b = B / 20, at B = 200 and sigma = 1, is a share of
1/400.
Guarantee: one Gaussian a step at the defense's multiplier, for both blocks together: gradients have noise of sigma /
sqrt(1 - share), the count sigma / sqrt(share), in units of what an example moves them by.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from .core import Block, BoundKind, Context, Defense, Everything, NormWithin, StepPlan, bounded, clip


@dataclass(frozen=True, kw_only=True)
class AdaptiveClipping:
    """A block of gradients, bounded by the state, and a block that counts the short ones; state: the clip norm."""

    clip_norm: float
    quantile: float
    rate: float
    share: float
    lowest: float
    highest: float
    bound: BoundKind
    regulariser: float | None

    def __post_init__(self) -> None:
        if not 0 <= self.quantile <= 1:
            raise ValueError(f"quantile must be in [0, 1], got {self.quantile}")
        if not (math.isfinite(self.rate) and self.rate >= 0):
            raise ValueError(f"rate must be at least 0, got {self.rate}")
        if not 1e-6 <= self.share <= 1 - 1e-6:
            raise ValueError(f"share must be in [1e-6, 1 - 1e-6], got {self.share}")
        # A range for which noise can be drawn, whatever the releases make of the clip norm.
        if not 1e-9 <= self.lowest <= self.clip_norm <= self.highest <= 1e9:
            raise ValueError(
                f"clip_norm must lie between lowest and highest, both in [1e-9, 1e9], got {self.clip_norm} "
                f"between {self.lowest} and {self.highest}"
            )

    def start(self, context: Context) -> float:
        """The first clip norm."""
        return self.clip_norm

    def plan(self, state: float, context: Context) -> tuple[float, StepPlan]:
        """Gradients at the current clip norm, and the count of those within it."""
        bound = bounded(state, self.bound, self.regulariser)
        count = Block(codec=Everything(1), bound=clip(0.5), share=self.share, query=NormWithin(state), updates=False)
        return state, StepPlan(Block(codec=Everything(context.dim), bound=bound, share=1 - self.share), count)

    def observe(self, state: float, context: Context, noisy: tuple[Tensor, ...], update: Tensor) -> float:
        """The clip norm of the next step: C exp(-rate (fraction within C - quantile))."""
        within = float(noisy[1]) / context.expected_batch + 0.5
        # The noise of one count may be large: of its exponent no more is taken than a range of floats holds.
        moved = state * math.exp(min(max(-self.rate * (within - self.quantile), -50.0), 50.0))
        return min(max(moved, self.lowest), self.highest)


def adaptive_clipping(
    *,
    clip_norm: float = 1.0,
    quantile: float = 0.5,
    rate: float = 0.2,
    share: float = 0.01,
    lowest: float = 1e-3,
    highest: float = 1e3,
    bound: BoundKind = "clip",
    regulariser: float | None = None,
    noise_multiplier: float | None = None,
) -> Defense:
    """DP-SGD whose clip norm follows the gradients.

    Args:
        clip_norm: C of the first step, L2, in gradient units.
        quantile: fraction of the gradients that is to be within the clip norm.
        rate: eta_C, of the geometric step towards it; 0 leaves the clip norm where it is.
        share: fraction of a step's 1 / sigma^2 spent on the count.
        lowest: the clip norm falls no further, in gradient units; fixed beforehand.
        highest: it rises no further.
        bound: how a row is brought to that norm: "clip", "normalize" (AUTO-S, NSGD) or "adaptive_weight" (DP-PSAC).
        regulariser: of the latter two, in gradient units; their papers' 0.01 and 0.1 if None.
        noise_multiplier: of the step as one Gaussian; None until it is calibrated.
    """
    bounded(clip_norm, bound, regulariser)  # refused here, not in the first step
    method = AdaptiveClipping(
        clip_norm=clip_norm,
        quantile=quantile,
        rate=rate,
        share=share,
        lowest=lowest,
        highest=highest,
        bound=bound,
        regulariser=regulariser,
    )
    return Defense(method, noise_multiplier)
