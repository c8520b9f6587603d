"""DP-NSGD: gradients normalised with a tuned regulariser, which trades bias for variance.

Yang, Zhang, Chen & Liu, "Normalized/Clipped SGD with Perturbation for Differentially Private Non-Convex Optimization",
arXiv:2206.13033: g / (||g|| + r), times a clip norm that only scales the learning rate. The form is that of AUTO-S, but
with r as large as the gradients themselves instead of tiny.
Deviation from some implementations: they add noise of sigma * r, although a normalised row has norm up to 1: with r =
0.01, a hundredth of the noise that is charged. The noise here is sigma * C.
Guarantee: each step is a Gaussian mechanism, as in DP-SGD at clip norm C.
"""

from .core import Defense, Whole, normalize


def nsgd(*, clip_norm: float = 1.0, regulariser: float = 0.1, noise_multiplier: float | None = None) -> Defense:
    """DP-SGD on normalised gradients.

    Args:
        clip_norm: C, upper limit on the norm of a normalised gradient, L2, in gradient units.
        regulariser: r, added to each norm, in gradient units; to be tuned on public data.
        noise_multiplier: noise standard deviation / C; None until calibrated.
    """
    if not regulariser > 0:
        raise ValueError(f"regulariser must be positive, got {regulariser}; without one it is auto_v")
    return Defense(Whole(bound=normalize(clip_norm, regulariser=regulariser)), noise_multiplier, name="nsgd")
