"""Clipped SGD: per-example clipping without noise, an ablation of DP-SGD. Nothing is proved.

Zhu & Blaschko, "Improving Differentially Private SGD via Randomly Sparsified Gradients", TMLR 2023, use it to
tell the effect of clipping from that of noise. Each example is clipped by itself; clipping the mean of a
batch is another thing.
Guarantee: none: what is bounded is released as it is.
"""

from .core import BoundKind, Defense, Whole, bounded


def clipped_sgd(*, clip_norm: float = 1.0, bound: BoundKind = "clip", regulariser: float | None = None) -> Defense:
    """SGD on clipped per-example gradients; epsilon is infinite.

    Args:
        clip_norm: C, largest norm of an example's gradient, L2, in gradient units.
        bound: how a row is brought to that norm: "clip", "normalize" (AUTO-S, NSGD), "adaptive_weight" (DP-PSAC)
            or "adaptive", by which the clip norm follows a quantile (in suites; `adapted` in Python).
        regulariser: of "normalize" and "adaptive_weight", in gradient units; their papers' 0.01 and 0.1 if None.
    """
    return Defense(Whole(bound=bounded(clip_norm, bound, regulariser)), noise_multiplier=0.0, name="clipped_sgd")
