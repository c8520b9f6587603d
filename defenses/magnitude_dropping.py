"""Magnitude dropping: DP-SGD on the largest of each layer's weights, selected anew in every step.

"Pre-Pruning and Gradient-Dropping Improve Differentially Private Image Classification" (DP-SSGD): the gradients of the
weights with the smallest magnitude are dropped before clipping, and those weights stay fixed.
Deviation: none. The selection costs no privacy only if the weights are a function of releases and of a random or public
initialisation, as here, and not of non-private training on the data; the paper does not state this condition.
Guarantee: each step is a Gaussian mechanism at the defense's multiplier: the mask is a function of the released
parameters.
"""

from __future__ import annotations

from .core import BoundKind, Defense, Sparse, bounded


def magnitude_dropping(
    *,
    clip_norm: float = 1.0,
    drop_rate: float = 0.5,
    hold_dropped: bool = True,
    bound: BoundKind = "clip",
    regulariser: float | None = None,
    noise_multiplier: float | None = None,
) -> Defense:
    """DP-SGD on the weights of the largest magnitude.

    Args:
        clip_norm: C, largest norm of an example's masked gradient, L2, in gradient units.
        drop_rate: fraction of each weight's entries that a step drops, the smallest.
        hold_dropped: whether dropped entries stay fixed in the step; otherwise momentum may move them.
        bound: bounding method: "clip", "normalize" (AUTO-S, NSGD), "adaptive_weight" (DP-PSAC) or "adaptive", a clip
            norm that follows a quantile (in suites; `adapted` in Python).
        regulariser: parameter of "normalize" or "adaptive_weight", in gradient units; None for the papers' 0.01 and
            0.1.
        noise_multiplier: noise standard deviation / C; None until calibrated.
    """
    method = Sparse(
        bound=bounded(clip_norm, bound, regulariser),
        dropping="magnitude",
        drop_rate=drop_rate,
        hold_dropped=hold_dropped,
    )
    return Defense(method, noise_multiplier, "magnitude_dropping")
