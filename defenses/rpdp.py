"""RPDP-SGD: PCDP-SGD with a random subspace in place of the public one.

The ablation of the PCDP-SGD paper that takes its public data away: directions are orthonormalised Gaussian vectors,
drawn anew every `interval` steps. A random subspace of rank k keeps k / d of a gradient's squared norm on average, so
the expected step is shorter by that factor.

Deviation: whether the paper clips before or after it projects cannot be told; here it is after, as in PCDP, unless
`clip_first`. The step is not rescaled unless `rescale`, which multiplies a tensor's part by d / k. Products with dense
directions take several times as long as the rest of a step: `directions = "sketch"` takes a count sketch's, which are
as orthonormal and keep as much on average, at the cost of one pass over the gradients
(`core/plan/linear_algebra/sketch.py`).
Guarantee: one Gaussian a step at the defense's multiplier; the subspace never looks at data.
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
        clip_norm: C, largest norm of what an example contributes, L2, in gradient units.
        rank: k, directions of a basis.
        scope: "tensor" for a basis per parameter tensor, "global" for one over all parameters.
        interval: steps that a basis is used for; drawing a Gaussian one costs far more than a step.
        directions: "gaussian" for orthonormalised Gaussian vectors, as in the paper, whose products with every gradient
            take ten times as long as a step; "sketch" for sums of disjoint coordinates with random signs (a count
            sketch), as orthonormal and as unbiased, at the cost of one pass over the gradients.
        clip_first: whether the whole gradient is clipped and the noisy update projected, as in PDP.
        rescale: whether the update of a tensor is multiplied by its size / k, which makes its expectation that of the
            clipped gradient.
        bound: how a row is brought to that norm: "clip", "normalize" (AUTO-S, NSGD), "adaptive_weight" (DP-PSAC)
            or "adaptive", by which the clip norm follows a quantile (in suites; `adapted` in Python).
        regulariser: of "normalize" and "adaptive_weight", in gradient units; their papers' 0.01 and 0.1 if None.
        noise_multiplier: noise standard deviation / C; None until it is calibrated.
    """
    method = Projected(
        bound=bounded(clip_norm, bound, regulariser),
        subspace=RandomSubspace(rank=rank, scope=scope, interval=interval, directions=directions),
        where="after the noise" if clip_first else "before the bound",
        rescale=rescale,
    )
    return Defense(method, noise_multiplier, name="rpdp")
