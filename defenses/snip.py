"""SNIP: an ablation of DP-SNIP whose mask is computed from the data without noise. It has no guarantee.

Lee, Ajanthan & Torr, "SNIP: Single-Shot Network Pruning Based on Connection Sensitivity", ICLR 2019, before DP-SGD: the
steps are private, but the mask is a release without noise. A comparison with DP-SNIP shows the effect of its noise.
Guarantee: none: the mask reveals the data, whatever the noise of the steps.
"""

from __future__ import annotations

from typing import Literal

from .core import BoundKind, Defense, Sparse, bounded, unbounded
from .dp_snip import Snip


def snip(
    *,
    clip_norm: float = 1.0,
    prune_rate: float = 0.5,
    pruned: Literal["zero", "initial"] = "zero",
    bound: BoundKind = "clip",
    regulariser: float | None = None,
    noise_multiplier: float | None = None,
) -> Defense:
    """DP-SGD on the weights of the largest connection sensitivity; epsilon is infinite.

    Args:
        clip_norm: C, largest norm of an example's masked gradient, L2, in gradient units.
        prune_rate: fraction of all weights that is pruned.
        pruned: "zero" sets pruned weights to zero, "initial" leaves them at their initialisation.
        bound: bounding method: "clip", "normalize" (AUTO-S, NSGD), "adaptive_weight" (DP-PSAC) or "adaptive", a clip
            norm that follows a quantile (in suites; `adapted` in Python).
        regulariser: parameter of "normalize" or "adaptive_weight", in gradient units; None for the papers' 0.01 and
            0.1.
        noise_multiplier: noise standard deviation / C; None until calibrated.
    """
    exact = Snip(prune_rate=prune_rate, bound=unbounded(), noise_multiplier=0.0)
    method = Sparse(bound=bounded(clip_norm, bound, regulariser), pruning=exact, pruned=pruned)
    return Defense(method, noise_multiplier, "snip")
