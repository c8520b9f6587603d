"""DIFF: releases the difference of gradients from the last release, and accumulates the differences.

The strawman in "DPDR: Gradient Decomposition and Reconstruction for Differentially Private Deep Learning",
arXiv:2406.02744: consecutive gradients are similar, so clip_C(g - u), with u the previous update, loses less to
clipping than clip_C(g). The paper omits that the noise accumulates with the differences: its variance is amplified by
1 / (a (2 - a)) if a fraction a of a correction survives the clip.
Guarantee: each step is a Gaussian mechanism at the defense's multiplier; the last update is a function of releases that
are charged already.
"""

from __future__ import annotations

from dataclasses import dataclass

from .core import (
    Block,
    Bound,
    BoundKind,
    Context,
    Defense,
    Everything,
    GradientLess,
    Offset,
    Stateless,
    StepPlan,
    bounded,
    refuse_norm,
)


@dataclass(frozen=True, kw_only=True)
class Diff(Stateless):
    """Releases differences from the last update, which is added back."""

    bound: Bound
    first_bound: Bound

    def plan(self, context: Context) -> StepPlan:
        """Plans gradients in the first step, and differences from the last update afterwards."""
        if context.update is None:
            return StepPlan(Block(codec=Everything(context.dim), bound=self.first_bound))
        change = Block(codec=Everything(context.dim), bound=self.bound, query=GradientLess(context.update))
        return StepPlan(change, post=Offset(context.update))


def diff(
    *,
    clip_norm: float = 1.0,
    first_clip_norm: float | None = None,
    bound: BoundKind = "clip",
    regulariser: float | None = None,
    noise_multiplier: float | None = None,
) -> Defense:
    """DP-SGD on differences from the last update.

    Args:
        clip_norm: C, largest norm of an example's difference, L2, in gradient units.
        first_clip_norm: largest norm of an example's gradient in the first step; `clip_norm` if None.
        bound: bounding method: "clip", "normalize" (AUTO-S, NSGD), "adaptive_weight" (DP-PSAC) or "adaptive", a clip
            norm that follows a quantile (in suites; `adapted` in Python).
        regulariser: parameter of "normalize" or "adaptive_weight", in gradient units; None for the papers' 0.01 and
            0.1.
        noise_multiplier: noise standard deviation / C; None until calibrated.
    """
    refuse_norm("first_clip_norm", first_clip_norm)
    first = clip_norm if first_clip_norm is None else first_clip_norm
    method = Diff(bound=bounded(clip_norm, bound, regulariser), first_bound=bounded(first, bound, regulariser))
    return Defense(method, noise_multiplier)
