"""DP-PSAC: gradients weighted by their norm, so that short ones are neither enlarged to full length nor lost.

Xia, Shen, Yao, Fu, Xu, Xu & Fu, "Differentially Private Learning with Per-Sample Adaptive Clipping", AAAI 2023:
C g / (||g|| + r / (||g|| + r)). The weight is C at norm 0 (where AUTO-S has C / gamma), largest at norm
sqrt(r) - r, and falls like C / ||g|| after that.
Deviation: some code of others calls a clip norm that follows the batch PSAC, with noise by the largest one met; that
noise is a function of the data, and proves nothing.
Guarantee: as of DP-SGD at clip norm C, one Gaussian a step.
"""

from .core import Defense, Whole, adaptive_weight


def psac(*, clip_norm: float = 1.0, regulariser: float = 0.1, noise_multiplier: float | None = None) -> Defense:
    """DP-SGD with per-sample adaptive weights.

    Args:
        clip_norm: C, which no weighted gradient is longer than, L2, in gradient units.
        regulariser: r, in gradient units; the paper takes 0.1 or 0.01.
        noise_multiplier: noise standard deviation / C; None until it is calibrated.
    """
    return Defense(Whole(bound=adaptive_weight(clip_norm, regulariser=regulariser)), noise_multiplier, name="psac")
