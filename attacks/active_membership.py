"""Active membership inference: the server sends a model at which every record's gradient is large, then tests.

Nasr, Shokri & Houmansadr, "Comprehensive Privacy Analysis of Deep Learning", IEEE S&P 2019, for the active server that
changes the parameters that it sends; Neyman & Pearson 1933 for the test, the likelihood ratio of `message_likelihood`.
Under DP-SGD a record's contribution has a norm of at most C, and one that is learned has less: an honest model may
hide it. The model sent here gives every class the same logit, so that the gradient of the last layer is at least
(1 - 1 / classes)^(1/2) in norm for every record, and multiplies the parameters before it until nearly all gradients of
public examples exceed `norm`: contributions then have the norm C, and the ratio is as far from 1 as the claim allows.
Deviation: parameters are not moved up the loss of a candidate, which helps where losses are compared; the test here
knows all other contributions and needs a large norm alone. The model does not depend on the candidates, each of whom
is tested by an adversary of its own.
"""

import torch

from .core import (
    Access,
    ActiveServer,
    Controls,
    Knows,
    MembershipScores,
    NotApplicable,
    SeenMessage,
    attack,
    granted,
)
from .core.closed_form.last_layer import last_layer
from .core.membership.message_evidence import MessageEvidence

_DOUBLINGS = 12  # of the parameters before the last layer
_NEARLY_ALL = 0.01  # quantile of the gradient norms of public examples that must be large


@attack(
    access=Access.ACTIVE_SERVER,
    knows=Knows.OTHERS | Knows.DEFENSE | Knows.POPULATION,
    controls=Controls.MODEL,
)
def active_membership(target: ActiveServer, generator: torch.Generator, *, norm: float = 2.0) -> MembershipScores:
    """Sums the log likelihood ratio of "a record of the client" against "not", at a model of large gradients.

    Args:
        target: the client, asked as often as it answers.
        generator: not used.
        norm: L2 norm that gradients of nearly all public examples must exceed, in gradient units; above the clip norm.

    Returns:
        Log likelihood ratios in nats, exact for messages of a single local step at a known or independent
        participation; without noise the largest share of a candidate's contribution that a message shows.

    Raises:
        NotApplicable: the network ends in no linear layer, or a message does not show the sum of its local steps.
        ValueError: `norm` is not positive.
    """
    if not norm > 0:
        raise ValueError(f"norm must be positive, got {norm}")
    sent, public = dict(granted(target.parameters)), granted(target.population)
    weight, bias = last_layer(target.network(), tuple(sent))
    for name in (weight, bias):
        sent[name] = torch.zeros_like(sent[name])
    before = [name for name in sent if name not in (weight, bias)]
    best, largest = sent, -1.0
    for doubling in range(_DOUBLINGS):
        scaled = sent | {name: sent[name] * 2.0**doubling for name in before}
        norms = target.gradient_norms(scaled, public.inputs, public.labels)
        reached = float(norms.nan_to_num(0.0, 0.0, 0.0).quantile(_NEARLY_ALL))
        if reached > largest:
            best, largest = scaled, reached
        if largest > norm:
            break
    evidence = MessageEvidence(granted(target.candidates))
    for _ in range(target.calls):
        message = granted(target.release)(best, None)
        if not isinstance(message, SeenMessage):
            raise NotApplicable("the client's records are not asked about here, and its message shows no candidates")
        evidence.add(message)
    return evidence.result()
