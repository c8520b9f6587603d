"""Local noise filter: clients clip their update and add Gaussian noise before they send it.

`LocalDpMod` of Flower (1.42.0): noise standard deviation sqrt(2 ln(1.25 / delta)) sensitivity / epsilon, the classic
formula, which is proved for epsilon below 1 alone and accepted here for any; the sensitivity is typed in.
Guarantee: unit client, against the server: each message is a Gaussian mechanism with noise on an update clipped to
`update_norm`. Neighbours differ in the data of one client, replaced by any others, which moves its update by up to
twice the norm; messages of all rounds compose. The promised epsilon and delta are those of one message at the
sensitivity that was typed in: at the filter's usual sensitivity, the norm itself, half of what a replacement needs.
Caveat: the promise is in the settings, the proof in the claim; they differ.
"""

from __future__ import annotations

import math

from .core import Defense, Federated, Whole, clip, refuse_norm
from .sgd import sgd


def promised_std(epsilon: float, delta: float, sensitivity: float) -> float:
    """Computes the noise standard deviation of the classic formula, sqrt(2 ln(1.25 / delta)) sensitivity / epsilon."""
    return math.sqrt(2 * math.log(1.25 / delta)) * sensitivity / epsilon


def local_noise_filter(
    *,
    update_norm: float = 1.0,
    sensitivity: float = 1.0,
    promised_epsilon: float = 1.0,
    promised_delta: float = 1e-5,
) -> Federated:
    """Federated averaging of plain SGD with Flower's filter of clipping and noise at every client.

    Args:
        update_norm: S, largest norm of a client's displacement, L2 over all tensors, in units of the parameters.
        sensitivity: sensitivity as typed in, L2, in units of the parameters.
        promised_epsilon: epsilon that the filter promises, nats, positive.
        promised_delta: delta that the filter promises, in (0, 1).
    """
    for name, value in (("update_norm", update_norm), ("sensitivity", sensitivity)):
        refuse_norm(name, value)
    refuse_norm("promised_epsilon", promised_epsilon)
    if not 0 < promised_delta < 1:
        raise ValueError(f"promised_delta must be in (0, 1), got {promised_delta}")
    multiplier = promised_std(promised_epsilon, promised_delta, sensitivity) / update_norm
    update = Defense(Whole(bound=clip(update_norm)), multiplier, name="local_noise")
    return Federated(client=sgd(), update=update, name="local_noise_filter")
