"""Clipped SGD: per-example clipping without noise, an ablation of DP-SGD. It has no guarantee.

Zhu & Blaschko, "Improving Differentially Private SGD via Randomly Sparsified Gradients", TMLR 2023, use it to separate
the effect of clipping from that of noise. Each example's gradient is clipped, not the mean of a batch.
Guarantee: none: bounded sums are released without noise.
"""

from .core import BoundKind, Defense, Whole, bounded


def clipped_sgd(*, clip_norm: float = 1.0, bound: BoundKind = "clip", regulariser: float | None = None) -> Defense:
    """SGD on clipped per-example gradients; epsilon is infinite.

    Args:
        clip_norm: C, largest norm of an example's gradient, L2, in gradient units.
        bound: bounding method: "clip", "normalize" (AUTO-S, NSGD), "adaptive_weight" (DP-PSAC) or "adaptive", a clip
            norm that follows a quantile (in suites; `adapted` in Python).
        regulariser: parameter of "normalize" or "adaptive_weight", in gradient units; None for the papers' 0.01 and
            0.1.
    """
    return Defense(Whole(bound=bounded(clip_norm, bound, regulariser)), noise_multiplier=0.0, name="clipped_sgd")
