"""DP-PSAC: gradients weighted by a function of their norm that is bounded at zero and falls for long gradients.

Xia, Shen, Yao, Fu, Xu, Xu & Fu, "Differentially Private Learning with Per-Sample Adaptive Clipping", AAAI 2023: C g /
(||g|| + r / (||g|| + r)). The weight is C at norm 0 (C / gamma in AUTO-S), largest at norm sqrt(r) - r, and then falls
like C / ||g||.
Deviation from some implementations: under the name PSAC they use a clip norm that depends on the batch, and scale the
noise by the largest clip norm used; such noise depends on the data and guarantees nothing.
Guarantee: each step is a Gaussian mechanism, as in DP-SGD at clip norm C.
"""

from .core import Defense, Whole, adaptive_weight


def psac(*, clip_norm: float = 1.0, regulariser: float = 0.1, noise_multiplier: float | None = None) -> Defense:
    """DP-SGD with per-sample adaptive weights.

    Args:
        clip_norm: C, upper limit on the norm of a weighted gradient, L2, in gradient units.
        regulariser: r, in gradient units; the paper uses 0.1 or 0.01.
        noise_multiplier: noise standard deviation / C; None until calibrated.
    """
    return Defense(Whole(bound=adaptive_weight(clip_norm, regulariser=regulariser)), noise_multiplier, name="psac")
