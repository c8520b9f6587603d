"""DP-SNIP: DP-SGD on the weights with the largest effect on the loss, found by a noisy release before training.

Lee, Ajanthan & Torr, "SNIP: Single-Shot Network Pruning Based on Connection Sensitivity", ICLR 2019; made private in
"Pre-Pruning and Gradient-Dropping Improve Differentially Private Image Classification" (DP-SSGD). A weight's score is
|sum_i w dl_i/dw| at the initial weights.
Deviation: in the paper, the score of the whole data set is clipped once; an example may then move it by 2 C, twice the
sensitivity that the noise assumes, and the budget is split in epsilon but not in delta. Here each example's w dl_i/dw
is clipped, and the release is charged to the same ledger as the steps, on all data, at its own multiplier.
Guarantee: a Gaussian on all data at `mask_noise_multiplier`, and a Gaussian per step at the defense's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .core import (
    Block,
    Bound,
    BoundKind,
    Context,
    Defense,
    Scaled,
    Sparse,
    StepPlan,
    bounded,
    checked_multiplier,
    clip,
    drop_overall,
    refuse_fraction,
    refuse_norm,
)


@dataclass(frozen=True, kw_only=True)
class Snip:
    """Keeps the weights of the largest connection sensitivity, over all layers together."""

    prune_rate: float
    bound: Bound
    noise_multiplier: float

    def __post_init__(self) -> None:
        refuse_fraction("prune_rate", self.prune_rate)
        try:
            checked_multiplier(self.noise_multiplier)
        except ValueError as error:
            raise ValueError(f"mask_{error}") from None

    def keeps(self, context: Context) -> Tensor:
        """Drops a fraction of all weights, by a release of weight times gradient on all data."""
        weights = context.parameters if context.parameters is not None else torch.zeros(context.dim)
        plan = StepPlan(Block(codec=Scaled(weights), bound=self.bound))
        (scores,) = context.release(plan.at(self.noise_multiplier))
        return drop_overall(context.layout, self.prune_rate, scores.abs())


def dp_snip(
    *,
    clip_norm: float = 1.0,
    prune_rate: float = 0.5,
    score_clip_norm: float = 1.0,
    mask_noise_multiplier: float = 8.0,
    pruned: Literal["zero", "initial"] = "zero",
    bound: BoundKind = "clip",
    regulariser: float | None = None,
    noise_multiplier: float | None = None,
) -> Defense:
    """DP-SGD on the weights of the largest noisy connection sensitivity.

    Args:
        clip_norm: C, largest norm of an example's masked gradient, L2, in gradient units.
        prune_rate: fraction of all weights that is pruned.
        score_clip_norm: largest norm of an example's weight times gradient, L2, in units of the loss.
        mask_noise_multiplier: noise standard deviation / score_clip_norm of the release that determines the mask. The
            paper finds that the mask hardly depends on it: choose a large value, which costs little epsilon.
        pruned: "zero" sets pruned weights to zero, "initial" leaves them at their initialisation.
        bound: bounding method: "clip", "normalize" (AUTO-S, NSGD), "adaptive_weight" (DP-PSAC) or "adaptive", a clip
            norm that follows a quantile (in suites; `adapted` in Python).
        regulariser: parameter of "normalize" or "adaptive_weight", in gradient units; None for the papers' 0.01 and
            0.1.
        noise_multiplier: noise standard deviation / C; None until calibrated.
    """
    refuse_norm("score_clip_norm", score_clip_norm)
    if not mask_noise_multiplier > 0:
        raise ValueError(
            f"mask_noise_multiplier must be positive, got {mask_noise_multiplier}; without noise it is snip"
        )
    snip = Snip(prune_rate=prune_rate, bound=clip(score_clip_norm), noise_multiplier=mask_noise_multiplier)
    method = Sparse(bound=bounded(clip_norm, bound, regulariser), pruning=snip, pruned=pruned)
    return Defense(method, noise_multiplier, "dp_snip")
