"""DP-SSGD: pre-pruning and gradient dropping together.

"Pre-Pruning and Gradient-Dropping Improve Differentially Private Image Classification": a network is
pruned before training, and in each step a part of what is left is dropped. Their 10 by 10 grid of the two rates, on
CIFAR-10 at epsilon 1, has no trend in either (correlations 0.03 and 0.12), and its best cell is below the largest of
100 draws from its own spread; the base recipe (De et al. 2022) does most of the work.
Deviation: DP-SNIP bounds each example, as `dp_snip` says.
Guarantee: one Gaussian a step at the defense's multiplier, and for `pruning="sensitivity"` one on all the data before.
"""

from __future__ import annotations

from typing import Literal

from .core import BoundKind, Criterion, Defense, Sparse, bounded, clip, refuse_norm, refuse_unknown
from .dp_snip import Snip
from .random_pruning import RandomPruning
from .synflow import SynFlow


def dp_ssgd(
    *,
    clip_norm: float = 1.0,
    pruning: Literal["random", "flow", "sensitivity"] = "random",
    prune_rate: float = 0.3,
    dropping: Literal["random", "magnitude"] = "random",
    drop_rate: float = 0.3,
    pruned: Literal["zero", "initial"] = "zero",
    rounds: int = 100,
    score_clip_norm: float = 1.0,
    mask_noise_multiplier: float = 8.0,
    bound: BoundKind = "clip",
    regulariser: float | None = None,
    noise_multiplier: float | None = None,
) -> Defense:
    """DP-SGD on a pruned network, of which every step drops a part.

    Args:
        clip_norm: C, largest norm of an example's masked gradient, L2, in gradient units.
        pruning: "random", "flow" (SynFlow) or "sensitivity" (DP-SNIP, which spends privacy).
        prune_rate: fraction of the weights that is pruned.
        dropping: "random" or "magnitude".
        drop_rate: fraction of what is left of each weight that a step drops.
        pruned: "zero" puts pruned weights to zero, "initial" leaves them as they were.
        rounds: of SynFlow.
        score_clip_norm: of DP-SNIP: largest norm of an example's weight times gradient, L2, in units of the loss.
        mask_noise_multiplier: of DP-SNIP: noise standard deviation / score_clip_norm.
        bound: how a row is brought to that norm: "clip", "normalize" (AUTO-S, NSGD), "adaptive_weight" (DP-PSAC)
            or "adaptive", by which the clip norm follows a quantile (in suites; `adapted` in Python).
        regulariser: of "normalize" and "adaptive_weight", in gradient units; their papers' 0.01 and 0.1 if None.
        noise_multiplier: noise standard deviation / C; None until it is calibrated.
    """
    refuse_norm("score_clip_norm", score_clip_norm)
    refuse_unknown("pruning", pruning, ("random", "flow", "sensitivity"))
    criteria: dict[str, Criterion] = {
        "random": RandomPruning(prune_rate=prune_rate),
        "flow": SynFlow(prune_rate=prune_rate, rounds=rounds),
        "sensitivity": Snip(prune_rate=prune_rate, bound=clip(score_clip_norm), noise_multiplier=mask_noise_multiplier),
    }
    method = Sparse(
        bound=bounded(clip_norm, bound, regulariser),
        pruning=criteria[pruning],
        pruned=pruned,
        dropping=dropping,
        drop_rate=drop_rate,
    )
    return Defense(method, noise_multiplier, "dp_ssgd")
