"""What the outcomes of attacks on a finished model amount to: the strongest attack, a bound on epsilon, exposure.

The strongest attack is chosen on one half of the candidates and measured on the other, which had no say in the choice.
The bound on epsilon is of pairs of a member and a non-member (Steinke et al. 2023), one test an attack at a share of
the level, so that taking the best of them stays valid. It assumes that members were drawn at random of what non-members
are the rest of: who cannot say that gets the same number named "if exchangeable", and it refutes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy import ndarray
from scipy import stats

from leakbench.defenses.core.privacy.tradeoff import TradeOff
from leakbench.leaderboard.metrics import CALIBRATION, METRICS, REPORT, half_key
from leakbench.leaderboard.records.record import Metric

from ...evidence.audit import audit_random_split
from ...evidence.one_run import Guesses, one_run
from ...evidence.pairs import seed_of_split
from ...scoring.membership import auc
from ...scoring.random_split import SHARE
from .attacks import AttackOutcome

SplitKind = Literal["random", "unknown"]
"""What the owner says of how members were drawn."""

COMPARED = ("auc", "tpr_at_1pct_fpr")
"""Metrics by which a leak is looked for, each with a strongest attack of its own; both have a chance of their own."""

_ACCIDENT = 0.004
"""Chance of a number of members among the highest scores, below which they are named: by accident in 1 % of audits."""

POWER = 0.8
"""With which a violation would have been found, where the report says what would have been."""


@dataclass(frozen=True, kw_only=True)
class Strongest:
    """The strongest attack by one metric, and the number that had no say in the choice.

    Attributes:
        metric: by which.
        attack: its name.
        value: on the half that did not choose.
        low: lower end of its 95 % interval.
        high: upper end.
        n: candidates of that half.
        of_all: whether no half could choose, as with few candidates, so that the largest number of all is shown, which
            flatters the attack.
        chance: of an attack that knows nothing.
        allowed: the most that the claim allows any test, on average over runs; None without a claim.
    """

    metric: str
    attack: str
    value: float
    low: float | None
    high: float | None
    n: int
    of_all: bool
    chance: float
    allowed: float | None = None

    @property
    def found(self) -> bool:
        """Whether it is above chance by its interval, each side of which errs in 2.5 % of all audits."""
        return self.low is not None and not self.of_all and self.low > self.chance


@dataclass(frozen=True, kw_only=True)
class EpsilonBound:
    """The largest lower bound on epsilon of several attacks, replace-one, with what it rests on.

    Attributes:
        value: nats; 0 where nothing is shown.
        ceiling: that so many answers could have shown at most.
        attack: whose answers.
        pairs: of a member and a non-member.
        guessed: pairs that were answered, a number that was fixed before scores were seen.
        correct: of these.
        looks: attacks that were tried, among which the level is divided.
        level: confidence of the largest of them.
        delta: at which.
        split: what the owner says of the draw.
        claimed: epsilon that the claim implies where one record replaces another, at `delta`; None without a claim.
        needed: share of the answers that must be right in truth for the claim to be refuted with a power of 0.8; None
            without a claim, or where no answers could refute it.
    """

    value: float
    ceiling: float
    attack: str
    pairs: int
    guessed: int
    correct: int
    looks: int
    level: float
    delta: float
    split: SplitKind
    claimed: float | None = None
    needed: float | None = None

    @property
    def refutes(self) -> bool:
        """Whether it refutes the claim: only where the split is said to be random."""
        return self.split == "random" and self.claimed is not None and self.value > self.claimed

    @property
    def percent(self) -> str:
        """The level in words, never rounded up: 97.5 is not 98, and 99.99 not 100."""
        return f"{100 * self.level:.10g}%"

    def to_dict(self) -> dict[str, Any]:
        """As a report has it."""
        return asdict(self) | {"relation": "replace_one", "method": "one_run", "refutes": self.refutes}


def strongest(outcomes: Sequence[AttackOutcome], metric: str, allowed: float | None = None) -> Strongest | None:
    """The strongest attack by a metric; None where no attack has it.

    Args:
        outcomes: of all attacks.
        metric: one of `COMPARED`.
        allowed: the most that the claim allows any test; None without a claim.
    """
    known = METRICS[metric]
    measured = [(one, one.metrics[metric]) for one in outcomes if _value(one, metric) is not None]
    if not measured:
        return None
    key, chance = half_key(CALIBRATION, "value"), float(known.chance or 0.0)
    # All or none: an attack without halves would else compete with its number of all candidates.
    if all(isinstance(found.detail.get(key), float | int) for _, found in measured):
        # By name among equals, so that the order of attacks decides nothing.
        one, found = max(measured, key=lambda pair: (float(pair[1].detail[key] or 0.0), pair[0].name))
        numbers = {what: found.detail[half_key(REPORT, what)] for what in ("value", "low", "high", "n")}
        return Strongest(metric=metric, attack=one.name, of_all=False, chance=chance, allowed=allowed, **numbers)  # pyright: ignore[reportArgumentType] -- a detail holds numbers and words
    one, found = max(measured, key=lambda pair: (float(pair[1].value or 0.0), pair[0].name))
    return Strongest(
        metric=metric,
        attack=one.name,
        value=float(found.value or 0.0),
        low=found.low,
        high=found.high,
        n=found.n or 0,
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
    """The largest lower bound on epsilon that attacks prove together; else the sentence that says why there is none.

    Args:
        outcomes: of all attacks, whether they ran or not.
        members: ids of members.
        delta: where there is no claim.
        level: confidence in all attacks together.
        split: what the owner says of how members were drawn.
        claim: (epsilon, delta) that is claimed where one record replaces another.
    """
    ran = [one for one in outcomes if one.scores is not None]
    if not ran:
        return "no attack ran"
    claimed = None
    if claim is not None:
        claimed, delta = claim
        if delta >= 1:
            return "the claim implies nothing of replacing one record by another, which is what pairs test"
    # Those that failed count as well: whether one fails may depend on what it saw.
    looks = sum(one.scores is not None or one.failed for one in outcomes)
    each = 1 - (1 - level) / looks
    best: tuple[float, str, Guesses, float] | None = None
    for one in ran:
        inside, outside, seed = _groups(one, members)
        pairs = min(len(inside), len(outside))
        if pairs < SHARE:
            return f"a bound needs at least {SHARE} pairs of a member and a non-member, got {pairs}"
        found = audit_random_split(
            inside, outside, method="one_run", answered=[pairs // SHARE], delta=delta, level=each, seed=seed
        )
        guesses = Guesses(*(int(found.detail[key]) for key in ("coins", "guessed", "correct")))  # pyright: ignore[reportArgumentType] -- counts
        if best is None or found.value > best[0]:
            best = found.value, one.name, guesses, found.ceiling
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
    """Share of answers that must be right in truth, so that the claim is refuted with `POWER`."""
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
    """How exposed single examples and classes are, by the scores of one attack.

    Attributes:
        attack: whose scores.
        ids: members, the most exposed first; none where no score is one of members far more often than of non-members.
        labels: of these.
        scores: of these.
        above: share of the non-members whose score is at least theirs: a false positive rate at which each is found.
        classes: class -> AUC among its members and non-members.
        nobody: why nobody is named; empty where somebody is.
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
    """The most exposed members, and exposure by class.

    Args:
        outcome: of an attack that ran.
        members: ids of members.
        labels: id -> class, of all candidates.
        most: members that are named.
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
    """Returns the number of highest scores of members that are named, and the reason where none are.

    Members of one score are named together or not at all, and only those of scores that members have more often than
    an accident gives, beside the false alarms that come with them, by a binomial test.
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
    """The most that a claim allows any test, by each of `COMPARED`.

    Args:
        curve: of the claim.
    """
    return {"auc": curve.auc, "tpr_at_1pct_fpr": curve.tpr_at(0.01)}


def _groups(one: AttackOutcome, members: Int[ndarray, " m"]) -> tuple[Float[ndarray, " p"], Float[ndarray, " q"], int]:
    """Scores of members and of non-members in the order of ids, and the seed of their matching."""
    assert one.scores is not None  # noqa: S101 -- by contract
    ids, values = one.scores.ids.cpu().numpy(), one.scores.scores.double().cpu().numpy()
    order = np.argsort(ids)
    ids, values = ids[order], values[order]
    inside: Bool[ndarray, " n"] = np.isin(ids, members)
    return values[inside], values[~inside], seed_of_split(ids, inside)


def _value(one: AttackOutcome, metric: str) -> float | None:
    found = one.metrics.get(metric)
    return None if found is None else found.value
