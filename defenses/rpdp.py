"""RPDP-SGD: PCDP-SGD with a random subspace instead of a public one.

The ablation of the PCDP-SGD paper without public data: directions are orthonormalised Gaussian vectors, redrawn every
`interval` steps. A random subspace of rank k keeps k / d of a gradient's squared norm on average, so the expected step
is shorter by that factor.

Deviation: the paper does not say whether it clips before or after projection; here it is after, as in PCDP, unless
`clip_first`. The step is not rescaled unless `rescale`, which multiplies a tensor's update by d / k. Products with
dense directions take several times as long as the rest of a step: `directions = "sketch"` uses a count sketch, also
orthonormal and with the same average, at the cost of a single pass over the gradients
(`core/plan/linear_algebra/sketch.py`).
Guarantee: each step is a Gaussian mechanism at the defense's multiplier; the subspace does not depend on data.
"""

from __future__ import annotations

from .core import BoundKind, Defense, Projected, RandomKind, RandomSubspace, Scope, bounded


def rpdp(
    *,
    clip_norm: float = 1.0,
    rank: int = 800,
    scope: Scope = "tensor",
    interval: int = 1,
    directions: RandomKind = "gaussian",
    clip_first: bool = False,
    rescale: bool = False,
    bound: BoundKind = "clip",
    regulariser: float | None = None,
    noise_multiplier: float | None = None,
) -> Defense:
    """DP-SGD inside a random subspace, projected before clipping.

    Args:
        clip_norm: C, largest norm of an example's contribution, L2, in gradient units.
        rank: k, number of directions of a basis.
        scope: "tensor" for a basis per parameter tensor, "global" for a basis of all parameters.
        interval: number of steps for which a basis is used; drawing a Gaussian basis costs far more than a step.
        directions: "gaussian" for orthonormalised Gaussian vectors, as in the paper, whose products with every gradient
            take several times as long as the rest of a step; "sketch" for sums of disjoint coordinates with random
            signs (a count sketch), also orthonormal and unbiased, at the cost of a single pass over the gradients.
        clip_first: whether the whole gradient is clipped and the noisy update projected, as in PDP.
        rescale: whether the update of a tensor is multiplied by its size / k, so that its expectation is that of the
            clipped gradient.
        bound: bounding method: "clip", "normalize" (AUTO-S, NSGD), "adaptive_weight" (DP-PSAC) or "adaptive", a clip
            norm that follows a quantile (in suites; `adapted` in Python).
        regulariser: parameter of "normalize" or "adaptive_weight", in gradient units; None for the papers' 0.01 and
            0.1.
        noise_multiplier: noise standard deviation / C; None until calibrated.
    """
    method = Projected(
        bound=bounded(clip_norm, bound, regulariser),
        subspace=RandomSubspace(rank=rank, scope=scope, interval=interval, directions=directions),
        where="after the noise" if clip_first else "before the bound",
        rescale=rescale,
    )
    return Defense(method, noise_multiplier, name="rpdp")
