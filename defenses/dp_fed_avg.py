"""DP-FedAvg: the server clips the clients' updates and adds noise to their sum, so that a client is the unit.

McMahan, Ramage, Talwar & Zhang, "Learning Differentially Private Recurrent Language Models", ICLR 2018, Algorithm 1.
Clients take plain SGD steps; a row of the server's defense is minus a client's displacement, a step is a round, an
example a client. Any central defense can be the server's, in Python by `PrivateAverage(defense=...)` of
`leakbench.defenses.core`: adaptive clip norms, random sparsification, clip norms per layer, and correlated noise
(DP-FTRL) with `participants="partition"`.
Deviation: uniform weights; the published min(n_i / cap, 1) would need a sum of sizes that is public. Sums are divided
by participation x clients, never by the number of replies.
Guarantee: unit client, trusted server: each round is a Gaussian mechanism at the noise multiplier, sampled under
`participants="poisson"`.
"""

from .core import Federated, FixedBoundKind, PrivateAverage
from .dp_sgd import dp_sgd
from .sgd import sgd


def dp_fed_avg(
    *,
    update_norm: float = 1.0,
    bound: FixedBoundKind = "clip",
    regulariser: float | None = None,
    noise_multiplier: float | None = None,
) -> Federated:
    """Federated averaging of clipped updates with noise at the server.

    Args:
        update_norm: S, largest norm of a client's displacement, L2 over all tensors, in units of the parameters.
        bound: bounding method: "clip", "normalize" (AUTO-S, NSGD) or "adaptive_weight" (DP-PSAC).
        regulariser: parameter of "normalize" or "adaptive_weight", in gradient units; None for the papers' 0.01 and
            0.1.
        noise_multiplier: noise standard deviation / S in every round; None until calibrated.
    """
    server = dp_sgd(clip_norm=update_norm, bound=bound, regulariser=regulariser, noise_multiplier=noise_multiplier)
    return Federated(client=sgd(), server=PrivateAverage(defense=server), name="dp_fed_avg")
