"""DP-SGD: clip each example's gradient, sum, add Gaussian noise.

Abadi et al., "Deep Learning with Differential Privacy", CCS 2016, Algorithm 1.
Deviation: divides by the expected batch, a public constant, not by the batch that was drawn.
"""

from .core import BoundKind, Defense, Whole, bounded


def dp_sgd(
    *,
    clip_norm: float = 1.0,
    bound: BoundKind = "clip",
    regulariser: float | None = None,
    noise_multiplier: float | None = None,
) -> Defense:
    """Differentially private SGD.

    Args:
        clip_norm: C, largest norm of an example's gradient, L2, in gradient units.
        bound: how a row is brought to that norm: "clip", "normalize" (AUTO-S, NSGD) or "adaptive_weight" (DP-PSAC).
        regulariser: of the latter two, in gradient units; their papers' 0.01 and 0.1 if None.
        noise_multiplier: noise standard deviation / C; None until it is calibrated.
    """
    return Defense(Whole(bound=bounded(clip_norm, bound, regulariser)), noise_multiplier, name="dp_sgd")
