"""Clients that share public directions: a basis a round, found by every party at the global model.

FedPCDP projects gradients on it before the bound, FedPDP updates after the noise. In both the displacement of a client
is V c, and c is its whole message; what leaves the span is refused.
"""

from __future__ import annotations

from typing import Any, Literal

from ..plan.bound import Bound
from ..plan.defense import Defense
from ..plan.families.public_subspaces import PublicSubspace
from ..plan.families.single_block import Projected
from .messages.codecs import Reachable
from .method import Federated


def along_shared_directions(
    name: str,
    where: Literal["before the bound", "after the noise"],
    *,
    bound: Bound,
    noise_multiplier: float | None,
    **subspace: Any,
) -> Federated:
    """Returns FedAvg of clients that move along public directions alone, with coefficients as messages.

    Args:
        name: name of the method.
        where: place of the projection in a local step.
        bound: of an example's coefficients, or of its whole gradient.
        noise_multiplier: noise standard deviation / the bound's norm; None until calibrated.
        subspace: settings of `PublicSubspace`.
    """
    method = Projected(bound=bound, subspace=PublicSubspace(every_round=True, **subspace), where=where)
    client = Defense(method, noise_multiplier)
    return Federated(client=client, messages=Reachable(outside="refuse"), name=name)
