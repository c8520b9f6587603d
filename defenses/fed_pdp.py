"""FedPDP: the noisy local updates are projected on a subspace of public gradients, and clients send coefficients.

A baseline of the PCDP-SGD paper, which does not define it: here FedPCDP with the projection after the noise, PDP-SGD
(Zhou, Wu & Banerjee, ICLR 2021) in every local step, with one basis a round at the global model. The displacement lies
in the subspace, so messages are those of FedPCDP; the clip norm is spent on the whole gradient.
Deviation: a reading of ours.
Guarantee: unit record: each local step is a Gaussian mechanism at the noise multiplier; the projection is
post-processing.
"""

from __future__ import annotations

from typing import Literal

from .core import Federated, FixedBoundKind, Scope, along_shared_directions, bounded


def fed_pdp(
    *,
    clip_norm: float = 1.0,
    rank: int = 100,
    scope: Scope = "tensor",
    auxiliary: Literal["random", "independent"] = "random",
    auxiliary_size: int | None = None,
    shortage: Literal["refuse", "lower_rank"] = "refuse",
    bound: FixedBoundKind = "clip",
    regulariser: float | None = None,
    noise_multiplier: float | None = None,
) -> Federated:
    """Federated averaging of clients that train under PDP-SGD, with a basis a round and coefficients as messages.

    Args:
        clip_norm: C, largest norm of an example's gradient, L2, in gradient units.
        rank: k, largest number of directions of a basis.
        scope: "tensor" for a basis per parameter tensor, "global" for a basis of all parameters.
        auxiliary: "random" draws a round's public examples from the whole pool, "independent" from a part of it that no
            other round reads.
        auxiliary_size: public examples of a round; None for as many as `rank`.
        shortage: "refuse" a public pool that is too small, or "lower_rank" to its size, with a remark.
        bound: bounding method: "clip", "normalize" (AUTO-S, NSGD) or "adaptive_weight" (DP-PSAC).
        regulariser: parameter of "normalize" or "adaptive_weight", in gradient units; None for the papers' 0.01 and
            0.1.
        noise_multiplier: noise standard deviation / C in every local step; None until calibrated.
    """
    return along_shared_directions(
        "fed_pdp",
        "after the noise",
        bound=bounded(clip_norm, bound, regulariser),
        noise_multiplier=noise_multiplier,
        rank=rank,
        scope=scope,
        auxiliary=auxiliary,
        auxiliary_size=auxiliary_size,
        shortage=shortage,
    )
