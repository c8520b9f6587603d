"""AUTO-V: every gradient is scaled to exactly the clip norm, so that only its direction matters.

Bu, Wang, Zha & Karypis, "Automatic Clipping: Differentially Private Deep Learning Made Easier and Stronger", NeurIPS
2023: C g / ||g||, and zero for a zero gradient, which has no direction. The authors use it to motivate the stabiliser
of AUTO-S: without it, training may stall at parameters whose gradient is not zero.
Guarantee: each step is a Gaussian mechanism, as in DP-SGD at clip norm C. Assumes that no gradient is pure rounding
error, as that of a saturated loss may be: it would be scaled to norm C, and it depends on the rest of the batch
(docs/limits.md).
"""

from .core import Defense, Whole, normalize


def auto_v(*, clip_norm: float = 1.0, noise_multiplier: float | None = None) -> Defense:
    """DP-SGD on gradients that are all scaled to norm C.

    Args:
        clip_norm: C, norm of every scaled gradient, L2, in gradient units.
        noise_multiplier: noise standard deviation / C; None until calibrated.
    """
    return Defense(Whole(bound=normalize(clip_norm, regulariser=0.0)), noise_multiplier, name="auto_v")
