"""Random gradient dropping: DP-SGD on a new random subset of each layer's weights in every step.

"Pre-Pruning and Gradient-Dropping Improve Differentially Private Image Classification" (DP-SSGD). Random sparsification
at a constant rate with a mask per step, drawn layer by layer; dropped weights stay fixed even under momentum, which
would move them in random sparsification.
Guarantee: each step is a Gaussian mechanism at the defense's multiplier: the mask is a function of public randomness.
"""

from __future__ import annotations

from .core import BoundKind, Defense, Sparse, bounded


def random_dropping(
    *,
    clip_norm: float = 1.0,
    drop_rate: float = 0.5,
    hold_dropped: bool = True,
    bound: BoundKind = "clip",
    regulariser: float | None = None,
    noise_multiplier: float | None = None,
) -> Defense:
    """DP-SGD on a random subset of each weight, redrawn in every step.

    Args:
        clip_norm: C, largest norm of an example's masked gradient, L2, in gradient units.
        drop_rate: fraction of each weight's entries that a step drops.
        hold_dropped: whether dropped entries stay fixed in the step; otherwise momentum may move them.
        bound: bounding method: "clip", "normalize" (AUTO-S, NSGD), "adaptive_weight" (DP-PSAC) or "adaptive", a clip
            norm that follows a quantile (in suites; `adapted` in Python).
        regulariser: parameter of "normalize" or "adaptive_weight", in gradient units; None for the papers' 0.01 and
            0.1.
        noise_multiplier: noise standard deviation / C; None until calibrated.
    """
    method = Sparse(
        bound=bounded(clip_norm, bound, regulariser),
        dropping="random",
        drop_rate=drop_rate,
        hold_dropped=hold_dropped,
    )
    return Defense(method, noise_multiplier, "random_dropping")
