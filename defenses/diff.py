"""DIFF: releases how gradients differ from the last release, and adds them up.

The strawman in "DPDR: Gradient Decomposition and Reconstruction for Differentially Private Deep Learning",
arXiv:2406.02744: consecutive gradients are alike, so clip_C(g - u), with u the update before, loses less to
clipping than clip_C(g). What it does not say: of every release a part stays in all later ones, and so does its noise,
whose variance is amplified by 1 / (a (2 - a)) where a fraction a of a correction survives the clip.
Guarantee: one Gaussian a step at the defense's multiplier; the last release is public, and its own noise is paid for.
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
    """A block of differences from the last update, which is added again."""

    bound: Bound
    first_bound: Bound

    def plan(self, context: Context) -> StepPlan:
        """Gradients in the first step, differences from the last update after it."""
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
        first_clip_norm: the same of the first step's gradient; `clip_norm` if None.
        bound: how a row is brought to that norm: "clip", "normalize" (AUTO-S, NSGD), "adaptive_weight" (DP-PSAC)
            or "adaptive", by which the clip norm follows a quantile (in suites; `adapted` in Python).
        regulariser: of "normalize" and "adaptive_weight", in gradient units; their papers' 0.01 and 0.1 if None.
        noise_multiplier: noise standard deviation / C; None until it is calibrated.
    """
    refuse_norm("first_clip_norm", first_clip_norm)
    first = clip_norm if first_clip_norm is None else first_clip_norm
    method = Diff(bound=bounded(clip_norm, bound, regulariser), first_bound=bounded(first, bound, regulariser))
    return Defense(method, noise_multiplier)
