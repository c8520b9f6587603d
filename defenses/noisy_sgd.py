"""Noisy SGD: noise without clipping, an ablation of DP-SGD. Sums have no bounded sensitivity, hence no guarantee.

Zhu & Blaschko, "Improving Differentially Private SGD via Randomly Sparsified Gradients", TMLR 2023. The noise on the
sum has standard deviation noise_multiplier * nominal_norm, as in DP-SGD at that clip norm, for comparison.
Guarantee: none.
"""

from .core import Defense, Whole, unbounded


def noisy_sgd(*, nominal_norm: float = 1.0, noise_multiplier: float | None = None) -> Defense:
    """SGD with Gaussian noise on the unclipped sum; epsilon is infinite.

    Args:
        nominal_norm: clip norm of the DP-SGD run to compare with, L2, in gradient units.
        noise_multiplier: noise standard deviation / nominal norm; None until set.
    """
    return Defense(Whole(bound=unbounded(unit=nominal_norm)), noise_multiplier, name="noisy_sgd")
