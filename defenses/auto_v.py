"""AUTO-V: every gradient is scaled to exactly the clip norm, so that its direction alone counts.

Bu, Wang, Zha & Karypis, "Automatic Clipping: Differentially Private Deep Learning Made Easier and Stronger",
NeurIPS 2023: C g / ||g||, and zero for a zero gradient, which has no direction. Kept beside AUTO-S, whose
authors show with it what the stabiliser is for: without one, training may stand still where gradients do not vanish.
Guarantee: as of DP-SGD at clip norm C, one Gaussian a step. Assumes that no gradient is rounding alone, as of a
saturated loss may be: here it counts as much as any, and rounding differs with who else is in the batch
(docs/limits.md).
"""

from .core import Defense, Whole, normalize


def auto_v(*, clip_norm: float = 1.0, noise_multiplier: float | None = None) -> Defense:
    """DP-SGD on gradients of one length.

    Args:
        clip_norm: C, length of every scaled gradient, L2, in gradient units.
        noise_multiplier: noise standard deviation / C; None until it is calibrated.
    """
    return Defense(Whole(bound=normalize(clip_norm, regulariser=0.0)), noise_multiplier, name="auto_v")
