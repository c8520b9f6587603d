"""SNIP without noise: an ablation of DP-SNIP, whose mask is read off the data. Nothing is proved.

Lee, Ajanthan & Torr, "SNIP: Single-Shot Network Pruning Based on Connection Sensitivity", ICLR 2019, before DP-SGD: the
steps are private, and the mask is a release of the data without any noise. It shows what the noise of DP-SNIP costs.
Guarantee: none: the mask shows the data, whatever noise the steps have.
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
        pruned: "zero" puts pruned weights to zero, "initial" leaves them as they were.
        bound: how a row is brought to that norm: "clip", "normalize" (AUTO-S, NSGD), "adaptive_weight" (DP-PSAC)
            or "adaptive", by which the clip norm follows a quantile (in suites; `adapted` in Python).
        regulariser: of "normalize" and "adaptive_weight", in gradient units; their papers' 0.01 and 0.1 if None.
        noise_multiplier: noise standard deviation / C; None until it is calibrated.
    """
    exact = Snip(prune_rate=prune_rate, bound=unbounded(), noise_multiplier=0.0)
    method = Sparse(bound=bounded(clip_norm, bound, regulariser), pruning=exact, pruned=pruned)
    return Defense(method, noise_multiplier, "snip")
