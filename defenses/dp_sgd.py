"""DP-SGD: clip each example's gradient, sum, add Gaussian noise.

Abadi et al., "Deep Learning with Differential Privacy", CCS 2016, Algorithm 1.
Deviation: divides by the expected batch size, a public constant, instead of the size of the drawn batch.
Guarantee: each step is a Gaussian mechanism at the defense's multiplier.
Caveat: reported epsilons often assume Poisson sampling while the code shuffles the data set and cuts it into batches:
noise multiplier 1.54 over 40 epochs of 50 steps gives 2.75 with the former and 25.3 with the latter (delta 1e-5).
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
        bound: bounding method: "clip", "normalize" (AUTO-S, NSGD), "adaptive_weight" (DP-PSAC) or "adaptive", a clip
            norm that follows a quantile (in suites; `adapted` in Python).
        regulariser: parameter of "normalize" or "adaptive_weight", in gradient units; None for the papers' 0.01 and
            0.1.
        noise_multiplier: noise standard deviation / C; None until calibrated.
    """
    return Defense(Whole(bound=bounded(clip_norm, bound, regulariser)), noise_multiplier, name="dp_sgd")
