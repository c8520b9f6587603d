"""DP-NSGD: gradients normalised with a regulariser that is tuned, which trades bias for variance.

Yang, Zhang, Chen & Liu, "Normalized/Clipped SGD with Perturbation for Differentially Private Non-Convex Optimization",
arXiv:2206.13033: g / (||g|| + r), times a clip norm that only scales the learning rate. The same form as AUTO-S,
where r is tiny; here it is of the size of the gradients themselves.
Deviation: some code adds noise of sigma * r, though a normalised row has norm up to 1: with r = 0.01, a hundredth of
the noise that is charged. Here it is sigma * C.
Guarantee: as of DP-SGD at clip norm C, one Gaussian a step.
"""

from .core import Defense, Whole, normalize


def nsgd(*, clip_norm: float = 1.0, regulariser: float = 0.1, noise_multiplier: float | None = None) -> Defense:
    """DP-SGD on normalised gradients.

    Args:
        clip_norm: C, which no normalised gradient is longer than, L2, in gradient units.
        regulariser: r, added to each norm, in gradient units; to be tuned on public data.
        noise_multiplier: noise standard deviation / C; None until it is calibrated.
    """
    if not regulariser > 0:
        raise ValueError(f"regulariser must be positive, got {regulariser}; without one it is auto_v")
    return Defense(Whole(bound=normalize(clip_norm, regulariser=regulariser)), noise_multiplier, name="nsgd")
