"""Random gradient dropping: DP-SGD on a fresh random part of each layer's weights in every step.

"Pre-Pruning and Gradient-Dropping Improve Differentially Private Image Classification" (DP-SSGD). Random
sparsification at a constant rate with a mask a step, drawn layer by layer; what is dropped stays where it is, also
under momentum, which in random sparsification moves it on.
Guarantee: one Gaussian a step at the defense's multiplier: the mask follows from public coins.
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
    """DP-SGD on a random part of each weight, drawn a step.

    Args:
        clip_norm: C, largest norm of an example's masked gradient, L2, in gradient units.
        drop_rate: fraction of the entries of each weight that a step drops.
        hold_dropped: whether they stay where they are in that step, or momentum may move them.
        bound: how a row is brought to that norm: "clip", "normalize" (AUTO-S, NSGD), "adaptive_weight" (DP-PSAC)
            or "adaptive", by which the clip norm follows a quantile (in suites; `adapted` in Python).
        regulariser: of "normalize" and "adaptive_weight", in gradient units; their papers' 0.01 and 0.1 if None.
        noise_multiplier: noise standard deviation / C; None until it is calibrated.
    """
    method = Sparse(
        bound=bounded(clip_norm, bound, regulariser),
        dropping="random",
        drop_rate=drop_rate,
        hold_dropped=hold_dropped,
    )
    return Defense(method, noise_multiplier, "random_dropping")
