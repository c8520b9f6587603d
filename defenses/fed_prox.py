"""FedProx: local steps are pulled back to the global model.

Li, Sahu, Zaheer, Sanjabi, Talwalkar & Smith, "Federated Optimization in Heterogeneous Networks", MLSys 2020, Algorithm
2: the local loss has the term (mu / 2) |y - theta|^2. Its gradient mu (y - theta) reads no data, so it is added after
the noise: inside the clip it would be cut away, and scaled by the size of the drawn batch. With one local step, or mu =
0, this is FedAvg.
Deviation: all clients take the same number of local steps, instead of solving to an accuracy of their own.
Guarantee: unit record: each local step is a Gaussian mechanism at the noise multiplier; the term is post-processing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from .core import Federated, FixedBoundKind, Follow, Round
from .dp_sgd import dp_sgd


@dataclass(frozen=True, kw_only=True)
class Proximal(Follow):
    """Adds the gradient of (mu / 2) |y - theta|^2 to a noisy update.

    Attributes:
        mu: strength, at least 0, in gradient units per unit of the parameters.
    """

    mu: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.mu) and self.mu >= 0):
            raise ValueError(f"mu must be at least 0 and finite, got {self.mu}")

    def correct(self, state: None, round: Round, point: Tensor, update: Tensor) -> Tensor:
        """Returns u + mu (y - theta)."""
        return update + self.mu * (point - round.parameters)

    def linear(self, state: None, round: Round) -> tuple[float, None]:
        """Returns the pull mu."""
        return self.mu, None


def fed_prox(
    *,
    clip_norm: float = 1.0,
    mu: float = 0.1,
    bound: FixedBoundKind = "clip",
    regulariser: float | None = None,
    noise_multiplier: float | None = None,
) -> Federated:
    """Federated averaging with a proximal term, of clients that train under DP-SGD.

    Args:
        clip_norm: C, largest norm of an example's gradient, L2, in gradient units.
        mu: strength of the pull towards the global model; the paper's grid is 0.001, 0.01, 0.1 and 1.
        bound: bounding method: "clip", "normalize" (AUTO-S, NSGD) or "adaptive_weight" (DP-PSAC).
        regulariser: parameter of "normalize" or "adaptive_weight", in gradient units; None for the papers' 0.01 and
            0.1.
        noise_multiplier: noise standard deviation / C in every local step; None until calibrated.
    """
    client = dp_sgd(clip_norm=clip_norm, bound=bound, regulariser=regulariser, noise_multiplier=noise_multiplier)
    return Federated(client=client, rule=Proximal(mu=mu), name="fed_prox")
