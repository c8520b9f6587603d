"""Findings from the outcomes of attacks on a finished model: the strongest attack, a bound on epsilon, exposure.

The strongest attack is chosen on one half of the candidates and measured on the other, which the choice does not bias.
The bound on epsilon is from pairs of a member and a non-member (Steinke et al. 2023), a test per attack. The tests
share the error rate, so that taking the best of them stays valid. The bound assumes that members were drawn at random
from a pool whose rest are the non-members: unless the owner states that, it is reported as conditional on
exchangeability, and refutes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy import ndarray
from scipy import stats

from leakbench.defenses.core.privacy.tradeoff import TradeOff
from leakbench.leaderboard.metrics import METRICS
from leakbench.leaderboard.records.audit_findings import EpsilonBound, SplitKind, Strongest
from leakbench.leaderboard.records.details import CALIBRATION, REPORT
from leakbench.leaderboard.records.record import Metric

from ...evidence.audit import audit_random_split
from ...evidence.one_run import Guesses, one_run
from ...evidence.pairs import seed_of_split
from ...scoring.membership import auc
from ...scoring.random_split import PAIRS_PER_GUESS
from .attacks import AttackOutcome

COMPARED = ("auc", "tpr_at_1pct_fpr")
"""Metrics that show leaks, each with a strongest attack of its own; both have a value at chance."""

_ACCIDENT = 0.004
"""P-value below which the members with the highest scores are named. Several cut-offs are tried, so that members are
named by accident in 1 % of audits."""

POWER = 0.8
"""Power of the test at the share of right answers that a report states as needed to refute the claim."""


def strongest(outcomes: Sequence[AttackOutcome], metric: str, allowed: float | None = None) -> Strongest | None:
    """Returns the strongest attack by a metric; None if no attack has it.

    Args:
        outcomes: of all attacks.
        metric: a member of `COMPARED`.
        allowed: largest value that the claim allows any test; None without a claim.
    """
    known = METRICS[metric]
    measured = [(outcome, outcome.metrics[metric]) for outcome in outcomes if _value(outcome, metric) is not None]
    if not measured:
        return None
    chance = float(known.chance or 0.0)
    by_half = [(outcome, metric.detail.on(CALIBRATION), metric.detail.on(REPORT)) for outcome, metric in measured]
    # All or none: otherwise an attack without halves would compete with its number on all candidates.
    if all(calibration.value is not None for _, calibration, _ in by_half):
        # Ties go by name, so that the order of attacks does not matter.
        outcome, _, report = max(by_half, key=lambda half: (half[1].value or 0.0, half[0].name))
        return Strongest(
            metric=metric,
            attack=outcome.name,
            value=report.value or 0.0,
            low=report.low,
            high=report.high,
            n=report.n or 0,
            of_all=False,
            chance=chance,
            allowed=allowed,
        )
    outcome, measurement = max(measured, key=lambda pair: (float(pair[1].value or 0.0), pair[0].name))
    return Strongest(
        metric=metric,
        attack=outcome.name,
        value=float(measurement.value or 0.0),
        low=measurement.low,
        high=measurement.high,
        n=measurement.n or 0,
        of_all=len(measured) > 1,
        chance=chance,
        allowed=allowed,
    )


def epsilon_bound(
    outcomes: Sequence[AttackOutcome],
    members: Int[ndarray, " m"],
    *,
    delta: float,
    level: float,
    split: SplitKind,
    claim: tuple[float, float] | None = None,
) -> EpsilonBound | str:
    """Returns the largest lower bound on epsilon that attacks prove together; else a sentence on why there is none.

    Args:
        outcomes: of all attacks, whether they ran or not.
        members: ids of members.
        delta: of the bound if there is no claim.
        level: joint confidence over all attacks.
        split: the owner's statement on how members were drawn.
        claim: (epsilon, delta) that is claimed if one record replaces another.
    """
    ran = [outcome for outcome in outcomes if outcome.scores is not None]
    if not ran:
        return "no attack ran"
    claimed = None
    if claim is not None:
        claimed, delta = claim
        if delta >= 1:
            return "the claim implies nothing of replacing one record by another, which is what pairs test"
    # Failed attacks count as well: a failure may depend on the data.
    looks = sum(outcome.scores is not None or outcome.failed for outcome in outcomes)
    each = 1 - (1 - level) / looks
    best: tuple[float, str, Guesses, float] | None = None
    for outcome in ran:
        inside, outside, seed = _groups(outcome, members)
        pairs = min(len(inside), len(outside))
        if pairs < PAIRS_PER_GUESS:
            return f"a bound needs at least {PAIRS_PER_GUESS} pairs of a member and a non-member, got {pairs}"
        lower_bound = audit_random_split(
            inside, outside, method="one_run", answered=[pairs // PAIRS_PER_GUESS], delta=delta, level=each, seed=seed
        )
        guesses = Guesses(*(int(lower_bound.detail[key]) for key in ("coins", "guessed", "correct")))  # pyright: ignore[reportArgumentType] -- counts
        if best is None or lower_bound.value > best[0]:
            best = lower_bound.value, outcome.name, guesses, lower_bound.ceiling
    assert best is not None  # noqa: S101 -- `ran` is not empty
    value, name, guesses, ceiling = best
    return EpsilonBound(
        value=value,
        ceiling=ceiling,
        attack=name,
        pairs=guesses.canaries,
        guessed=guesses.guessed,
        correct=guesses.correct,
        looks=looks,
        level=level,
        delta=delta,
        split=split,
        claimed=claimed,
        needed=None if claimed is None else _needed(guesses, claimed, delta, each),
    )


def _needed(guesses: Guesses, claimed: float, delta: float, level: float) -> float | None:
    """Returns the true share of right answers at which the claim is refuted with `POWER`."""
    low, high = 0, guesses.guessed
    if high == 0 or one_run(guesses.perfect, delta, level) <= claimed:
        return None
    while low < high:  # the least number of right answers that refutes; the bound rises with it
        middle = (low + high) // 2
        refuted = one_run(Guesses(guesses.canaries, guesses.guessed, middle), delta, level) > claimed
        low, high = (low, middle) if refuted else (middle + 1, high)
    # P(Binomial(r, p) >= v) = P(Beta(v, r - v + 1) <= p), which is `POWER` at that distribution's quantile.
    return float(stats.beta.ppf(POWER, low, guesses.guessed - low + 1)) if low else 0.0


@dataclass(frozen=True, kw_only=True)
class Exposure:
    """Exposure of single examples and classes, by the scores of an attack.

    Attributes:
        attack: its name.
        ids: members, the most exposed first; empty unless some scores are those of members far more often than of
            non-members.
        labels: of these members.
        scores: of these members.
        above: share of non-members with at least the member's score: the false positive rate at which it is found.
        classes: maps each class to the AUC among its members and non-members.
        nobody: why no member is named; empty if some are.
    """

    attack: str
    ids: tuple[int, ...]
    labels: tuple[int, ...]
    scores: tuple[float, ...]
    above: tuple[float, ...]
    classes: Mapping[int, Metric]
    nobody: str = ""


def exposure(
    outcome: AttackOutcome, members: Int[ndarray, " m"], labels: Mapping[int, int], most: int = 12
) -> Exposure:
    """Returns the most exposed members, and exposure by class.

    Args:
        outcome: of an attack that ran.
        members: ids of members.
        labels: id -> class, of all candidates.
        most: largest number of members that are named.
    """
    assert outcome.scores is not None  # noqa: S101 -- by contract
    ids, values = outcome.scores.ids.cpu().numpy(), outcome.scores.scores.double().cpu().numpy()
    inside = np.isin(ids, members)
    outside = np.sort(values[~inside])
    own = values[inside]
    above = 1 - np.searchsorted(outside, own, side="left") / len(outside)
    count, nobody = _standing_out(own, outside, most)
    order = np.lexsort((ids[inside], -own))[:count]
    chosen = [int(ids[inside][i]) for i in order]
    kinds = np.array([labels[int(i)] for i in ids])
    return Exposure(
        attack=outcome.name,
        ids=tuple(chosen),
        labels=tuple(labels[i] for i in chosen),
        scores=tuple(float(own[i]) for i in order),
        above=tuple(float(above[i]) for i in order),
        classes={
            int(kind): auc(values[inside & (kinds == kind)], values[~inside & (kinds == kind)])
            for kind in np.unique(kinds)
        },
        nobody=nobody,
    )


def _standing_out(own: Float[ndarray, " p"], outside: Float[ndarray, " q"], most: int) -> tuple[int, str]:
    """Returns the number of highest scores of members that are named, and the reason if there are none.

    Members with equal scores are named together or not at all, and only at scores that members reach more often than by
    accident, given the non-members that reach them too (false alarms), by a binomial test.
    """
    share = len(own) / (len(own) + len(outside))
    best, named = (1.0, 0, 0), 0
    for score in np.unique(own)[::-1]:
        named = int((own >= score).sum())
        if named > most:
            break
        alarms = int((outside >= score).sum())
        chance = float(stats.binom.sf(named - 1, named + alarms, share))
        best = min(best, (chance, -named, alarms))
    chance, count, _ = best
    if count and chance < _ACCIDENT:
        return -count, ""
    highest = float(own.max())
    ties, alarms = int((own == highest).sum()), int((outside >= highest).sum())
    if ties > most:
        return 0, f"nobody stands out: {ties} members share the highest score, and {alarms} non-members have it or more"
    top = np.sort(np.concatenate([own, outside]))[-most:].min()
    inside, alarms = int((own >= top).sum()), int((outside >= top).sum())
    return 0, f"nobody stands out: of the {inside + alarms} highest scores {inside} are members' and {alarms} others'"


def allowed_by(curve: TradeOff) -> dict[str, float]:
    """Returns the largest values of `COMPARED` that a claim allows any test.

    Args:
        curve: trade-off curve of the claim.
    """
    return {"auc": curve.auc, "tpr_at_1pct_fpr": curve.tpr_at(0.01)}


def _groups(
    outcome: AttackOutcome, members: Int[ndarray, " m"]
) -> tuple[Float[ndarray, " p"], Float[ndarray, " q"], int]:
    """Returns scores of members and of non-members in the order of ids, and the seed of their matching."""
    assert outcome.scores is not None  # noqa: S101 -- by contract
    ids, values = outcome.scores.ids.cpu().numpy(), outcome.scores.scores.double().cpu().numpy()
    order = np.argsort(ids)
    ids, values = ids[order], values[order]
    inside: Bool[ndarray, " n"] = np.isin(ids, members)
    return values[inside], values[~inside], seed_of_split(ids, inside)


def _value(outcome: AttackOutcome, metric: str) -> float | None:
    measurement = outcome.metrics.get(metric)
    return None if measurement is None else measurement.value
