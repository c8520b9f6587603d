"""DP-ZO: zeroth-order optimisation, whose release per step is a single number, a slope along a public random direction.

Tang, Panda, Nasr, Mahloujifar & Mittal, "Private Fine-tuning of Large Language Models with Zeroth-order Optimization",
TMLR 2025, arXiv:2401.04343: all parties draw the same direction z of length sqrt(d), each example's slope is clipped,
the noisy sum of the slopes is a single number, and the update is that number times z. Noise is added to a single number
instead of d; in exchange, the direction is unrelated to the gradient.
Deviation: the slope is the derivative along z by backpropagation, the limit of the paper's difference of two losses;
this loses the paper's advantage in memory. The clip norm applies to the derivative along z / sqrt(d).
Guarantee: each step is a Gaussian mechanism at the defense's multiplier: the direction is a function of public
randomness.
"""

from __future__ import annotations

from .core import BoundKind, Defense, Projected, RandomSubspace, bounded


def dp_zo(
    *,
    clip_norm: float = 1.0,
    bound: BoundKind = "clip",
    regulariser: float | None = None,
    noise_multiplier: float | None = None,
) -> Defense:
    """DP-SGD along a random direction per step.

    Args:
        clip_norm: C, largest slope of an example along the unit direction, in gradient units.
        bound: bounding method: "clip", "normalize" (AUTO-S, NSGD), "adaptive_weight" (DP-PSAC) or "adaptive", a clip
            norm that follows a quantile (in suites; `adapted` in Python).
        regulariser: parameter of "normalize" or "adaptive_weight", in gradient units; None for the papers' 0.01 and
            0.1.
        noise_multiplier: noise standard deviation / C; None until calibrated.
    """
    method = Projected(
        bound=bounded(clip_norm, bound, regulariser),
        subspace=RandomSubspace(rank=1, scope="global", interval=1),
        where="before the bound",
        rescale=True,  # d times the projection: z z' g for z of length sqrt(d), the gradient in expectation
    )
    return Defense(method, noise_multiplier, "dp_zo")
