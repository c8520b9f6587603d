"""DP-ZO: one number a step, the slope of each example's loss along a public random direction.

Tang, Panda, Nasr, Mahloujifar & Mittal, "Private Fine-tuning of Large Language Models with Zeroth-order Optimization",
TMLR 2025, arXiv:2401.04343: everybody draws the same direction z of length sqrt(d), each example's slope is clipped,
the noisy sum of the slopes is one number, and the update is that number times z. Noise falls on one number instead of
d; the price is a direction that has little to do with the gradient.
Deviation: the slope is the derivative along z, by backpropagation, which the paper's difference of two losses tends
to; so the memory that the paper saves is not saved. The clip norm is of the derivative along z / sqrt(d).
Guarantee: one Gaussian a step at the defense's multiplier: the direction follows from public coins.
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
    """DP-SGD along one random direction a step.

    Args:
        clip_norm: C, largest slope of an example along the unit direction, in gradient units.
        bound: how a row is brought to that norm: "clip", "normalize" (AUTO-S, NSGD), "adaptive_weight" (DP-PSAC)
            or "adaptive", by which the clip norm follows a quantile (in suites; `adapted` in Python).
        regulariser: of "normalize" and "adaptive_weight", in gradient units; their papers' 0.01 and 0.1 if None.
        noise_multiplier: noise standard deviation / C; None until it is calibrated.
    """
    method = Projected(
        bound=bounded(clip_norm, bound, regulariser),
        subspace=RandomSubspace(rank=1, scope="global", interval=1),
        where="before the bound",
        rescale=True,  # d times the projection: z z' g for z of length sqrt(d), the gradient on average
    )
    return Defense(method, noise_multiplier, "dp_zo")
