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

import math

import torch
from torch import Tensor

from .core import Access, Knows, MembershipScores, NotApplicable, SeenMessage, SeenMessages, attack, granted

_AT_ONCE = 64  # candidates whose rows exist at a time
_ATOMS = 4096  # values of A, up to which they are enumerated


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
    candidates = granted(target.candidates)
    scores = torch.zeros(len(candidates), dtype=torch.float64, device=candidates.inputs.device)
    exact, noisy = True, None
    for message in target.messages:
        if message.sums is None:
            raise NotApplicable(f"messages do not show the sums of local steps: {message.why_no_sums}")
        if noisy is not None and noisy != (granted(message.noise_std) > 0):
            raise NotApplicable("messages must have noise in all rounds or in none")
        noisy = granted(message.noise_std) > 0
        exact = exact and len(message.weights) == 1 and message.participation != "dependent"
        for start in range(0, len(candidates), _AT_ONCE):
            part = slice(start, start + _AT_ONCE)
            own = message.contributions(candidates.inputs[part], candidates.labels[part]).double()
            remaining = granted(message.others_removed)(part)
            products, squares = (own * remaining).sum(dim=1), own.square().sum(dim=1)
            if noisy:
                scores[part] += log_ratio(message, products, squares)
            else:
                shown = products / squares.clamp(min=torch.finfo(torch.float64).tiny)
                # Rounded, because of a non-participant rounding error is left, which ranks nobody.
                scores[part] = torch.maximum(scores[part], shown.round(decimals=3))
    return MembershipScores(
        ids=candidates.ids, scores=scores, exact=exact and bool(noisy), deterministic=not noisy, dependence="per_model"
    )


def log_ratio(message: SeenMessage, products: Tensor, squares: Tensor) -> Tensor:
    """Returns the log likelihood ratio of a message, in nats.

    Args:
        message: grants DEFENSE.
        products: <v, w> [n], of each candidate's contribution with what others leave of the weighted sum.
        squares: |v|^2 [n].
    """
    variance = granted(message.noise_std) ** 2 * sum(weight**2 for weight in message.weights)
    totals, log_probabilities = joined_weights(message.weights, message.sample_rate)
    totals, log_probabilities = totals.to(products), log_probabilities.to(products)
    exponents = (products[:, None] * totals - squares[:, None] * totals.square() / 2) / variance
    return (exponents + log_probabilities).logsumexp(dim=1)


def joined_weights(weights: tuple[float, ...], sample_rate: float) -> tuple[Tensor, Tensor]:
    """Returns the values of the sum of the weights of the steps that a record joins, and their log probabilities.

    Args:
        weights: a_t of each local step.
        sample_rate: probability to join a step, independent of the others.

    Raises:
        NotApplicable: there are too many values.
    """
    atoms = {0.0: 1.0}
    for weight in weights:
        after: dict[float, float] = {}
        for total, probability in atoms.items():
            for value, share in ((total, 1 - sample_rate), (total + weight, sample_rate)):
                if share:
                    # Equal weights make equal sums, up to rounding.
                    key = round(value, 9)
                    after[key] = after.get(key, 0.0) + share * probability
        atoms = after
        if len(atoms) > _ATOMS:
            raise NotApplicable(
                f"the weights of {len(weights)} local steps have more than {_ATOMS} sums; take equal rates, or fewer "
                "steps"
            )
    totals, probabilities = zip(*atoms.items(), strict=True)
    logs = [math.log(p) if p > 0 else -math.inf for p in probabilities]
    return torch.tensor(totals, dtype=torch.float64), torch.tensor(logs, dtype=torch.float64)
