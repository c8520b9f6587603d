"""AUTO-S: every gradient is scaled to nearly the clip norm, with a stabiliser that keeps short gradients shorter.

Bu, Wang, Zha & Karypis, "Automatic Clipping: Differentially Private Deep Learning Made Easier and Stronger", NeurIPS
2023: C g / (||g|| + gamma). The norm C only scales the learning rate and needs no tuning: C = 1 by default. Without the
stabiliser gamma (`auto_v`), the sum of normalised gradients may vanish although the sum of the gradients does not.
Guarantee: each step is a Gaussian mechanism, as in DP-SGD at clip norm C.
"""

from .core import Defense, Whole, normalize


def auto_s(*, clip_norm: float = 1.0, gamma: float = 0.01, noise_multiplier: float | None = None) -> Defense:
    """DP-SGD with automatic clipping.

    Args:
        clip_norm: C, upper limit on the norm of a scaled gradient, L2, in gradient units.
        gamma: stabiliser, in gradient units; 0.01 in the paper.
        noise_multiplier: noise standard deviation / C; None until calibrated.
    """
    if not gamma > 0:
        raise ValueError(f"gamma must be positive, got {gamma}; without a stabiliser it is auto_v")
    return Defense(Whole(bound=normalize(clip_norm, regulariser=gamma)), noise_multiplier, name="auto_s")
