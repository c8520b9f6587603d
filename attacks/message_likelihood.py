"""Likelihood-ratio membership test on all messages of a federated client.

Neyman & Pearson 1933 for the test; Nasr et al., "Tight Auditing of Differentially Private Machine Learning", USENIX
Security 2023 (arXiv:2302.07956) for the adversary that knows all other contributions and the scale of the noise. A
message of tau local steps is w = sum_t a_t S_t, the weighted sum of their noisy sums; w less the contributions of
others is noise of variance s^2 = std^2 sum_t a_t^2, plus A v for a record with contribution v, where A is the sum of
the weights of the steps that the record joined, each with probability q:

    log sum_A P(A) exp(A <v, w> / s^2 - A^2 |v|^2 / (2 s^2)),

with A binomial(tau, q) for equal weights. Ratios of rounds multiply, because the noise of a round is fresh. With one
local step this is the ratio of `likelihood_ratio`, and no test is more powerful.
Deviation (own derivation for the sum): with several local steps v is taken at the global model, while the client takes
it at its local models, and others' contributions are held fixed although they depend on the record through them. The
score is then an approximation, and flagged so.
"""

import torch

from .core import Access, Knows, MembershipScores, SeenMessages, attack, granted
from .core.membership.message_evidence import MessageEvidence


@attack(access=Access.FEDERATED, knows=Knows.OTHERS | Knows.DEFENSE)
def message_likelihood(target: SeenMessages, generator: torch.Generator) -> MembershipScores:
    """Sums the log likelihood ratio of "a record of the client" against "not" over all its messages.

    Args:
        target: the client's messages.
        generator: not used.

    Returns:
        Log likelihood ratios in nats, exact where every message is of a single local step at a known or independent
        participation; without noise the largest share of a candidate's contribution that a message shows.

    Raises:
        NotApplicable: a message does not show the sum of its local steps, or its weights have too many sums.
    """
    evidence = MessageEvidence(granted(target.candidates))
    for message in target.messages:
        evidence.add(message)
    return evidence.result()
