"""Likelihood ratio of membership from messages of a federated client, accumulated over rounds.

A message shows w = sum_t a_t S_t, the weighted sum of its local steps' noisy sums. Less the contributions of others it
is noise of variance s^2 = std^2 sum_t a_t^2, plus A v for a record with contribution v, where A is the sum of the
weights of the steps that the record joined. Ratios of rounds multiply, because the noise of a round is fresh.
"""

import math

import torch
from torch import Tensor

from ..targets.messages import SeenMessage
from ..targets.results import MembershipScores
from ..targets.target import Examples
from ..threat_model.attack_errors import NotApplicable
from ..threat_model.requires import granted

_AT_ONCE = 64  # candidates whose rows exist at a time
_ATOMS = 4096  # values of A, up to which they are enumerated


class MessageEvidence:
    """Evidence for the membership of candidates, accumulated over messages.

    Args:
        candidates: of the membership test.
    """

    def __init__(self, candidates: Examples) -> None:
        self._candidates = candidates
        self._scores = torch.zeros(len(candidates), dtype=torch.float64, device=candidates.inputs.device)
        self._exact = True
        self._noisy: bool | None = None

    def add(self, message: SeenMessage) -> None:
        """Adds the evidence of a message, which grants OTHERS and DEFENSE.

        Raises:
            NotApplicable: it does not show the sum of its local steps, its weights have too many sums, or it has noise
                where earlier messages have none.
        """
        if message.sums is None:
            raise NotApplicable(f"messages do not show the sums of local steps: {message.why_no_sums}")
        noisy = granted(message.noise_std) > 0
        if self._noisy is not None and self._noisy != noisy:
            raise NotApplicable("messages must have noise in all rounds or in none")
        self._noisy, candidates = noisy, self._candidates
        self._exact = self._exact and len(message.weights) == 1 and message.participation != "dependent"
        for start in range(0, len(candidates), _AT_ONCE):
            part = slice(start, start + _AT_ONCE)
            own = message.contributions(candidates.inputs[part], candidates.labels[part]).double()
            remaining = granted(message.others_removed)(part)
            products, squares = (own * remaining).sum(dim=1), own.square().sum(dim=1)
            if noisy:
                self._scores[part] += log_ratio(message, products, squares)
            else:
                shown = products / squares.clamp(min=torch.finfo(torch.float64).tiny)
                # Rounded, because of a non-participant rounding error is left, which ranks nobody.
                self._scores[part] = torch.maximum(self._scores[part], shown.round(decimals=3))

    def result(self) -> MembershipScores:
        """Returns log likelihood ratios in nats; without noise, the largest share of a contribution that is shown."""
        noisy = bool(self._noisy)
        return MembershipScores(
            ids=self._candidates.ids,
            scores=self._scores,
            exact=self._exact and noisy,
            deterministic=not noisy,
            dependence="per_model",
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
