"""FedLRS: local updates are regularised to a ball around the global model, and messages keep the largest entries.

Cheng, Wang, Zhang, Zhang & Xu, "Differentially Private Federated Learning with Local Regularization and
Sparsification", CVPR 2022, from memory. A local step adds the gradient of (lambda / 2) max(0, |y - theta| - S)^2, which
keeps the displacement near the norm S; then all but the largest entries of the displacement are dropped, by |Delta_j|
or by |Delta_j u_j|, where the paper's gradient is a noisy update.
Deviation: the paper's noise is on the client's update, with a client as the unit; here it is in the local steps, as in
the PCDP-SGD paper's comparison. Both parts act on noisy numbers alone.
Guarantee: unit record: each local step is a Gaussian mechanism at the noise multiplier; the rest is post-processing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from .core import Federated, FixedBoundKind, Follow, LargestEntries, Round
from .dp_sgd import dp_sgd


@dataclass(frozen=True, kw_only=True)
class WithinBall(Follow):
    """Adds the gradient of (penalty / 2) max(0, |y - theta| - radius)^2 to a noisy update.

    Attributes:
        radius: S, norm from which the displacement is pulled back, L2, in units of the parameters.
        penalty: lambda, at least 0.
    """

    radius: float
    penalty: float

    def __post_init__(self) -> None:
        for name, value in (("radius", self.radius), ("penalty", self.penalty)):
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be at least 0 and finite, got {value}")

    def correct(self, state: None, round: Round, point: Tensor, update: Tensor) -> Tensor:
        """Returns u + lambda max(0, 1 - S / |y - theta|) (y - theta)."""
        gap = point - round.parameters
        length = gap.norm()  # a tensor: a message is differentiated in the data behind it
        if length <= self.radius:
            return update
        return update + self.penalty * (1 - self.radius / length.double()) * gap


def fed_lrs(
    *,
    clip_norm: float = 1.0,
    radius: float = 1.0,
    penalty: float = 0.1,
    sparsity: float = 0.5,
    score: Literal["size", "effect"] = "size",
    bound: FixedBoundKind = "clip",
    regulariser: float | None = None,
    noise_multiplier: float | None = None,
) -> Federated:
    """Federated averaging with local regularisation and sparsified messages, of clients that train under DP-SGD.

    Args:
        clip_norm: C, largest norm of an example's gradient, L2, in gradient units.
        radius: S, norm of the displacement from which it is pulled back, L2, in units of the parameters.
        penalty: lambda, strength of the pull; 0 for none.
        sparsity: fraction of the displacement's entries that a message drops; 0 for none.
        score: entries are kept by "size", |Delta_j|, or by "effect", |Delta_j u_j|, with u the noisy update of the last
            local step.
        bound: bounding method: "clip", "normalize" (AUTO-S, NSGD) or "adaptive_weight" (DP-PSAC).
        regulariser: parameter of "normalize" or "adaptive_weight", in gradient units; None for the papers' 0.01 and
            0.1.
        noise_multiplier: noise standard deviation / C in every local step; None until calibrated.
    """
    client = dp_sgd(clip_norm=clip_norm, bound=bound, regulariser=regulariser, noise_multiplier=noise_multiplier)
    rule, messages = WithinBall(radius=radius, penalty=penalty), LargestEntries(sparsity=sparsity, score=score)
    return Federated(client=client, rule=rule, messages=messages, name="fed_lrs")
