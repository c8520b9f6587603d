"""FedAvg: clients take local steps, the server averages their models.

McMahan, Moore, Ramage, Hampson & Aguera y Arcas, "Communication-Efficient Learning of Deep Networks from Decentralized
Data", AISTATS 2017, Algorithm 1. Clients train under DP-SGD; with another defense of the local steps, this is FedAvg
over it, in Python by `Federated(client=...)` of `leakbench.defenses.core`. A message has the numbers that the plans
move: all of them here.
Deviation: weights are uniform by default, because weights by size release the sizes; the paper's are
`Federation(weights="size")`.
Guarantee: unit record: each local step is a Gaussian mechanism at the noise multiplier, for the record's own client.
"""

from .core import Federated, FixedBoundKind
from .dp_sgd import dp_sgd


def fed_avg(
    *,
    clip_norm: float = 1.0,
    bound: FixedBoundKind = "clip",
    regulariser: float | None = None,
    noise_multiplier: float | None = None,
) -> Federated:
    """Federated averaging of clients that train under DP-SGD.

    Args:
        clip_norm: C, largest norm of an example's gradient, L2, in gradient units.
        bound: bounding method: "clip", "normalize" (AUTO-S, NSGD) or "adaptive_weight" (DP-PSAC).
        regulariser: parameter of "normalize" or "adaptive_weight", in gradient units; None for the papers' 0.01 and
            0.1.
        noise_multiplier: noise standard deviation / C in every local step; None until calibrated.
    """
    client = dp_sgd(clip_norm=clip_norm, bound=bound, regulariser=regulariser, noise_multiplier=noise_multiplier)
    return Federated(client=client, name="fed_avg")
