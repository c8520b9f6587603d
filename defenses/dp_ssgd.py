"""DP-SSGD: DP-SGD with pruning before the training and gradient dropping in every step.

"Pre-Pruning and Gradient-Dropping Improve Differentially Private Image Classification": a network is pruned before
training, and each step drops a part of the remaining weights. The paper's 10 by 10 grid of the two rates, on CIFAR-10
at epsilon 1, has no trend in either (correlations 0.03 and 0.12), and its best cell is below the largest of 100 draws
from its own spread; the base recipe (De et al. 2022) does most of the work.
Deviation: DP-SNIP bounds each example, see `dp_snip`.
Guarantee: each step is a Gaussian mechanism at the defense's multiplier, and `pruning="sensitivity"` adds one on all
data before.
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
    """DP-SGD on a pruned network, a part of which is dropped in every step.

    Args:
        clip_norm: C, largest norm of an example's masked gradient, L2, in gradient units.
        pruning: "random", "flow" (SynFlow) or "sensitivity" (DP-SNIP, which spends privacy).
        prune_rate: fraction of the weights that is pruned.
        dropping: "random" or "magnitude".
        drop_rate: fraction of each weight's remaining entries that a step drops.
        pruned: "zero" sets pruned weights to zero, "initial" leaves them at their initialisation.
        rounds: rounds of SynFlow.
        score_clip_norm: largest norm of an example's weight times gradient in DP-SNIP, L2, in units of the loss.
        mask_noise_multiplier: noise standard deviation / score_clip_norm in DP-SNIP.
        bound: bounding method: "clip", "normalize" (AUTO-S, NSGD), "adaptive_weight" (DP-PSAC) or "adaptive", a clip
            norm that follows a quantile (in suites; `adapted` in Python).
        regulariser: parameter of "normalize" or "adaptive_weight", in gradient units; None for the papers' 0.01 and
            0.1.
        noise_multiplier: noise standard deviation / C; None until calibrated.
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
