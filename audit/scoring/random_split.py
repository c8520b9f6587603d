"""A lower bound on epsilon from a single run with a random split: the attack guesses the member of each pair.

Steinke, Nasr & Jagielski, "Privacy Auditing with One (1) Training Run", NeurIPS 2023, on pairs of a member and a
non-member. Members are a uniformly random part of the pool, so the member of a pair is decided by a fair coin, without
inserted records. The pairs with the largest score gaps are guessed, a number declared before any score is computed.

Guarantee:
    With confidence 0.95 the training is not (epsilon, delta)-private under replacement of a record, for any epsilon
    below the value. Assumes that members were drawn uniformly at random from the pool whose remainder are the
    non-members, and that the attack knew no membership: an informed attack's scores depend on the other pairs.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy import ndarray

from leakbench.leaderboard.records.details import ProvedDetail
from leakbench.leaderboard.records.record import Metric

from ..evidence.audit import audit_random_split
from ..evidence.pairs import seed_of_split

NAME = "epsilon_lower"
"""Name of the metric."""

LEVEL, SURE = 0.95, 1 - 1e-6
"""Confidence of the value, and confidence of a verdict, which is high because very many cells are tested."""

PAIRS_PER_GUESS = 10
"""Pairs of a member and a non-member for each guess."""


def epsilon_lower(
    ids: Int[ndarray, " n"], scores: Float[ndarray, " n"], members: Bool[ndarray, " n"], delta: float
) -> Metric:
    """Returns a lower bound on epsilon from the scores of a random split, under replacement.

    Args:
        ids: ids of the candidates; together with the truth they alone determine the pairing.
        scores: larger = more likely a member.
        members: the ground truth.
        delta: of the claim.

    Returns:
        The metric, in nats; `detail` has the numbers of pairs, guesses and right guesses, the largest bound provable
        with that many guesses (`ceiling`), and the bound at the confidence of a verdict (`value_at_verdict`).
    """
    order = np.argsort(ids)
    positives, negatives = scores[order][members[order]], scores[order][~members[order]]
    pairs = min(len(positives), len(negatives))
    if pairs < PAIRS_PER_GUESS:
        return unmeasured(len(ids), f"a random split must have at least {PAIRS_PER_GUESS} pairs, got {pairs}")
    seed = seed_of_split(ids, members)
    settings = {"method": "one_run", "answered": [pairs // PAIRS_PER_GUESS], "delta": delta, "seed": seed}
    estimate, sure = (audit_random_split(positives, negatives, level=level, **settings) for level in (LEVEL, SURE))
    return Metric(
        value=estimate.value,
        n=len(ids),
        better="lower",
        reason="it is a low end by itself: nothing but a proof gives an upper one",
        detail=ProvedDetail(
            {
                "pairs": pairs,
                "guessed": estimate.detail["guessed"],
                "correct": estimate.detail["correct"],
                "ceiling": estimate.ceiling,
                "value_at_verdict": sure.value,
                "delta": delta,
                "relation": "replace_one",
                "method": "one run, pairs of a random split (Steinke et al. 2023)",
            }
        ),
    )


def unmeasured(n: int, reason: str) -> Metric:
    """Returns the metric without a value, for scores that can prove nothing."""
    return Metric(value=None, n=n, better="lower", reason=reason)


def not_a_random_split(knows: Collection[str], flags: Collection[str]) -> str:
    """Returns the reason why pairs of scores prove nothing; empty if they do.

    Args:
        knows: names of the attack's knowledge.
        flags: flags of the record.
    """
    if "OTHERS" in knows:
        return "the attack was told who else took part, so its answers to pairs are no independent guesses"
    if "participation_known" in flags:
        return "the attack was asked about those who took part in one step, who are no random half of the candidates"
    if "non_members_are_test" in flags:
        return "non-members are the official test set, and no random part of the pool that members were drawn from"
    if "distribution_shift" in flags:
        return "members and non-members are told apart without the model, so the split was not drawn at random"
    return ""
