"""Magnitude dropping: DP-SGD on the larger part of each layer's weights, chosen anew in every step.

"Pre-Pruning and Gradient-Dropping Improve Differentially Private Image Classification" (DP-SSGD): the
gradients of the weights with the smallest magnitude are dropped before clipping, and those weights stay.
Deviation: none. What the paper leaves to the reader: the choice is free only while the weights are a function of
releases and of a random or public initialisation, as here; not after training on the data without privacy.
Guarantee: one Gaussian a step at the defense's multiplier: the mask follows from the parameters, which are released.
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
        drop_rate: fraction of the entries of each weight that a step drops, the smallest.
        hold_dropped: whether they stay where they are in that step, or momentum may move them.
        bound: how a row is brought to that norm: "clip", "normalize" (AUTO-S, NSGD), "adaptive_weight" (DP-PSAC)
            or "adaptive", by which the clip norm follows a quantile (in suites; `adapted` in Python).
        regulariser: of "normalize" and "adaptive_weight", in gradient units; their papers' 0.01 and 0.1 if None.
        noise_multiplier: noise standard deviation / C; None until it is calibrated.
    """
    method = Sparse(
        bound=bounded(clip_norm, bound, regulariser),
        dropping="magnitude",
        drop_rate=drop_rate,
        hold_dropped=hold_dropped,
    )
    return Defense(method, noise_multiplier, "magnitude_dropping")
