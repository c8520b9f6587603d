"""PDP-SGD: DP-SGD whose noisy update is projected on a subspace of public gradients.

Zhou, Wu & Banerjee, "Bypassing the Ambient Dimension: Private SGD with Gradient Subspace Identification", ICLR 2021,
Algorithm 1. The noise outside the subspace, nearly all of it, is removed after the release: post-processing. The clip
norm is still spent on the whole gradient, unlike in PCDP.

Deviation: each parameter tensor has its own basis, as in PCDP, for comparison; `scope="global"` is the paper's.
Guarantee: each step is a Gaussian mechanism at the defense's multiplier: that of DP-SGD, and the rest is
post-processing.
"""

from __future__ import annotations

from typing import Literal

from .core import BoundKind, Defense, Projected, PublicSubspace, Scope, bounded


def pdp(
    *,
    clip_norm: float = 1.0,
    rank: int = 100,
    scope: Scope = "tensor",
    interval: int = 1,
    auxiliary: Literal["random", "independent"] = "random",
    auxiliary_size: int | None = None,
    shortage: Literal["refuse", "lower_rank"] = "refuse",
    bound: BoundKind = "clip",
    regulariser: float | None = None,
    noise_multiplier: float | None = None,
) -> Defense:
    """DP-SGD with its noisy update projected on a subspace of public gradients.

    Args:
        clip_norm: C, largest norm of an example's gradient, L2, in gradient units.
        rank: k, largest number of directions of a basis.
        scope: "tensor" for a basis per parameter tensor, "global" for a basis of all parameters.
        interval: number of steps for which a basis is used.
        auxiliary: "random" draws a refresh's public examples from the whole pool, "independent" from a part of it that
            no other refresh reads.
        auxiliary_size: public examples of a refresh; None for as many as `rank`.
        shortage: "refuse" a public pool that is too small, or "lower_rank" to its size, with a remark.
        bound: bounding method: "clip", "normalize" (AUTO-S, NSGD), "adaptive_weight" (DP-PSAC) or "adaptive", a clip
            norm that follows a quantile (in suites; `adapted` in Python).
        regulariser: parameter of "normalize" or "adaptive_weight", in gradient units; None for the papers' 0.01 and
            0.1.
        noise_multiplier: noise standard deviation / C; None until calibrated.
    """
    subspace = PublicSubspace(
        rank=rank,
        scope=scope,
        interval=interval,
        auxiliary=auxiliary,
        auxiliary_size=auxiliary_size,
        shortage=shortage,
    )
    method = Projected(bound=bounded(clip_norm, bound, regulariser), subspace=subspace, where="after the noise")
    return Defense(method, noise_multiplier, name="pdp")
