"""AUTO-S: every gradient is scaled to almost the same length, with a stabiliser for the short ones.

Bu, Wang, Zha & Karypis, "Automatic Clipping: Differentially Private Deep Learning Made Easier and Stronger",
NeurIPS 2023: C g / (||g|| + gamma). What a row adds is shorter than C, whatever it is, so that the clip
norm only scales the learning rate, and need not be tuned: C = 1 by default. The stabiliser keeps short gradients
shorter than long ones; without it (`auto_v`) a sum of directions may stand still where its gradients do not cancel.
Guarantee: as of DP-SGD at clip norm C, one Gaussian a step.
"""

from .core import Defense, Whole, normalize


def auto_s(*, clip_norm: float = 1.0, gamma: float = 0.01, noise_multiplier: float | None = None) -> Defense:
    """DP-SGD with automatic clipping.

    Args:
        clip_norm: C, which no scaled gradient is longer than, L2, in gradient units.
        gamma: the stabiliser, in gradient units; the paper's is 0.01.
        noise_multiplier: noise standard deviation / C; None until it is calibrated.
    """
    if not gamma > 0:
        raise ValueError(f"gamma must be positive, got {gamma}; without a stabiliser it is auto_v")
    return Defense(Whole(bound=normalize(clip_norm, regulariser=gamma)), noise_multiplier, name="auto_s")
