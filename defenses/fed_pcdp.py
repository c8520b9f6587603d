"""FedPCDP: clients train inside a subspace of public gradients, and send coefficients.

PCDP-SGD paper, section on federated learning. The server, as a virtual client, finds at the global model the leading
directions of public gradients, for every tensor; clients project their gradients on them before the bound, and the
noise lies inside; so a client's displacement is V c, and c is its whole message. The basis is recomputed by every party
that holds the public pool: same seed, pool and model give the same directions; sending it would cost as much as a
hundred models.
Guarantee: unit record: each local step is a Gaussian mechanism at the noise multiplier, on coefficients.
Caveat: the paper counts numbers / 1024 as KB; in float32 its 0.48 KB are 1,960 bytes. What leaves the span is refused:
weight decay, Adam, control variates, a basis that changes within a round.
"""

from __future__ import annotations

from typing import Literal

from .core import Federated, FixedBoundKind, Scope, along_shared_directions, bounded


def fed_pcdp(
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
    """Federated averaging of clients that train under PCDP-SGD, with a basis a round and coefficients as messages.

    Args:
        clip_norm: C, largest norm of an example's coefficients, L2, in gradient units.
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
        "fed_pcdp",
        "before the bound",
        bound=bounded(clip_norm, bound, regulariser),
        noise_multiplier=noise_multiplier,
        rank=rank,
        scope=scope,
        auxiliary=auxiliary,
        auxiliary_size=auxiliary_size,
        shortage=shortage,
    )
