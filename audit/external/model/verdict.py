"""The verdict of an audit, in one word and one sentence: what shows it, with its interval, or what would have.

"no leak found" is said only where a leak of the size that is named would have shown: not of groups that a classifier
tells apart without the model, not of scores by which non-members look more like members, and not of candidates so few
that a large number proves nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
from jaxtyping import Int
from numpy import ndarray

from leakbench.leaderboard.metrics import CALIBRATION, REPORT, half_key

from ...scoring.shift import Shift
from .attacks import AttackOutcome
from .findings import EpsilonBound, Strongest, epsilon_bound

_SURE = 0.99
"""Confidence in wrong answers to pairs, above that of a leak: of a hundred models without one, one is called odd."""


@dataclass(frozen=True, kw_only=True)
class AuditVerdict:
    """The answer in one word and in one sentence.

    Attributes:
        word: the answer; `within the claim` where attacks find something, and no more than the owner's claim allows.
        sentence: what shows it, with its interval; where nothing does, what would have.
        by: the attack that decided; empty where none did.
        how: whether averages over all candidates decided, or answers to pairs, which are of the surest.
        weak: which attacks ran, where no leak was found and none of them had shadow models; empty elsewhere.
    """

    word: Literal["leaks", "within the claim", "no leak found", "cannot be told", "claim refuted"]
    sentence: str
    by: str = ""
    how: Literal["averages", "pairs", ""] = ""
    weak: str = ""

    @property
    def tone(self) -> Literal["bad", "good", "neutral", "warn"]:
        """How a page shows it: nothing is good news that weak attacks have not found."""
        if self.word in ("leaks", "claim refuted"):
            return "bad"
        if self.word == "cannot be told":
            return "warn"
        return "neutral" if self.weak else "good"

    @property
    def headline(self) -> str:
        """The word, with how many attacks it rests on where these are weak."""
        return f"{self.word} by {self.weak}" if self.weak else self.word

    def to_dict(self) -> dict[str, str]:
        """As a report has it."""
        return {**asdict(self), "tone": self.tone, "headline": self.headline}


def verdict(
    by: Sequence[Strongest],
    bound: EpsilonBound | str,
    shift: Shift,
    refuted: Sequence[str] = (),
    detectable: float = 1.0,
    reverse: str = "",
    pairs: EpsilonBound | str | None = None,
    weak: str = "",
    tied: str = "",
) -> AuditVerdict:
    """The verdict of an audit.

    A model that leaks nothing is called leaking in at most one audit of ten: AUC and TPR err in 2.5 % each, the bound
    in 5 % at its usual level. What is not shown, and yet larger than what is called no leak, is called neither.

    Args:
        by: the strongest attack by each metric.
        bound: on epsilon, or why there is none.
        shift: between members and non-members, without the model.
        refuted: sentences on what refutes the claim, beside the bound.
        detectable: AUC that so many candidates would have told from chance in four audits of five.
        reverse: what shows that non-members look more like members than members do, by `backwards`.
        pairs: answers to pairs by `right_answers`, which no claim and no level of a bound can hide; those of the bound
            where None.
        weak: which attacks ran, as "3 of 10 attacks", where none of them had shadow models; empty elsewhere.
        tied: why scores that tie could show nothing, by `why_tied`; empty where they could.
    """
    told, proof, answered = list(refuted), "", ""
    pairs = bound if pairs is None else pairs
    if isinstance(pairs, EpsilonBound) and pairs.value > 0:
        proof, answered = _answered(pairs), pairs.attack
    if isinstance(bound, EpsilonBound) and bound.value > 0:
        answered = bound.attack
        # More right answers than coins have, whatever the split; an epsilon where the split was random only.
        proof = _answered(bound)
        if bound.split == "random":
            proof += (
                f", which proves an epsilon of at least {bound.value:.2f} (replace-one, {bound.percent} confidence)"
            )
        if bound.refutes:
            told.append(f"{proof} where the claim allows {bound.claimed:.2f}")
    if told:
        by_pairs = bound.attack if isinstance(bound, EpsilonBound) and bound.refutes else ""
        return AuditVerdict(
            word="claim refuted",
            sentence=f"The claim is refuted: {'; '.join(told)}.",
            by=by_pairs,
            how="pairs" if by_pairs else "",
        )
    seen = [one for one in by if one.found]
    if shift.found:
        return AuditVerdict(
            word="cannot be told",
            sentence=(
                f"Members and non-members differ even without the model ({shift.words}), so no number here says "
                "whether the model leaks: take both from one pool at random."
            ),
        )
    if seen or proof:
        averages = next((one for one in seen if one.metric == "auc"), None)
        decided: dict[str, Any] = {"by": averages.attack, "how": "averages"} if averages else {}
        if not averages:
            decided = {"by": answered or seen[0].attack, "how": "pairs" if answered else "averages"}
        # What decided goes first, and an average that misses it is explained.
        parts = [*map(_words, seen), *([proof] if proof else [])]
        shown = "; ".join(parts if averages else parts[::-1])
        # A finite epsilon is a leak that the owner has declared: what is within it is no alarm, and no proof either.
        within = by and by[0].allowed is not None and all(one.value <= (one.allowed or 0.0) for one in seen)
        # Of a split that nobody calls random a bound proves no epsilon, and is no sign that the claim holds either.
        if within and (not proof or _within(bound)):
            return AuditVerdict(
                word="within the claim",
                sentence=f"What attacks find is no more than the claim allows, and no proof of it: {shown}.",
                **decided,
            )
        return AuditVerdict(
            word="leaks", sentence=f"This model leaks who was trained on: {shown}.{_missed(by, averages)}", **decided
        )
    if not by:
        return AuditVerdict(
            word="cannot be told", sentence="No attack could be measured, so nothing is known of leaks."
        )
    if reverse:
        return AuditVerdict(
            word="cannot be told",
            sentence=(
                f"Non-members look more like members than members do: {reverse}. Whoever turns such scores around "
                "tells who was trained on: are the two groups exchanged, or is a score smaller for members?"
            ),
        )
    if tied:
        return AuditVerdict(word="cannot be told", sentence=tied)
    most = next((one for one in by if one.metric == "auc"), by[0])
    if large := [one for one in by if _undecided(one, detectable)]:
        return AuditVerdict(
            word="cannot be told",
            sentence=(
                f"So few candidates decide nothing: {'; '.join(map(_words, large))}, which is no proof of a leak, and "
                f"more than what is called none (an AUC below {detectable:.3f}); take 1,000 of each."
            ),
        )
    ran = f"{weak} ran, none of them with shadow models, which find most. None" if weak else "No attack that ran"
    return AuditVerdict(
        word="no leak found",
        sentence=(
            f"{ran} told members from non-members: {_words(most)}. From an AUC of {detectable:.3f} on a leak would "
            "have shown in four audits of five; smaller leaks, and stronger attacks, are not excluded."
        ),
        weak=weak,
    )


def why_tied(outcomes: Sequence[AttackOutcome], members: int, detectable: float) -> str:
    """Why no leak could have shown, where candidates have equal scores; empty where one could.

    The most that scores with these ties could reach is reached with members at the top: then a and b of the p members
    and q non-members share the one score between them, and the AUC is 1 - a b / (2 p q).

    Args:
        outcomes: of all attacks.
        members: number of them among the candidates.
        detectable: AUC that is called a leak.
    """
    most, ran = 0.5, False
    for one in outcomes:
        if one.scores is not None:
            _, counts = np.unique(-one.scores.scores.cpu().numpy(), return_counts=True)
            ends = counts.cumsum()
            others, place, ran = int(ends[-1]) - members, int(np.searchsorted(ends, members)), True
            inside = members - int(ends[place] - counts[place])
            most = max(most, 1 - inside * (int(counts[place]) - inside) / max(1, 2 * members * others))
    if not ran or most >= detectable:
        return ""
    return (
        f"Scores tie: with as many equal ones no attack that ran could have an AUC above {most:.3f}, and a leak shows "
        f"from {detectable:.3f} on. Does the model answer with rounded numbers, or with labels?"
    )


def _missed(by: Sequence[Strongest], found: Strongest | None) -> str:
    """Why an average over all candidates misses what was shown; empty where it does not."""
    most = next((one for one in by if one.metric == "auc"), None)
    if found or most is None:
        return ""
    return (
        f" An AUC is an average over all candidates, here {most.value:.3f} by {most.attack}, and misses what is leaked "
        "of the few that an attack is surest of."
    )


def backwards(outcomes: Sequence[AttackOutcome], members: Int[ndarray, " m"], detectable: float) -> str:
    """What shows that non-members look more like members than members do; empty where nothing does.

    Such scores tell the two groups apart as well as others do: the groups are exchanged, or a score is smaller for a
    member. By the lowest AUC, chosen on one half and read on the other, and by wrong answers to pairs.

    Args:
        outcomes: of all attacks.
        members: ids of members.
        detectable: AUC that is called a leak in four audits of five: as far below chance something is as strange.
    """
    key = half_key(CALIBRATION, "value")
    halves = [(one.name, one.metrics["auc"].detail) for one in outcomes if "auc" in one.metrics]
    halves = [(name, detail) for name, detail in halves if key in detail]
    if halves:
        name, detail = min(halves, key=lambda pair: (float(pair[1][key] or 0.0), pair[0]))
        value, low, most = (float(detail[half_key(REPORT, what)] or 0.0) for what in ("value", "low", "high"))
        if most < 0.5 and 1 - value >= detectable:
            return f"{name} has an AUC of {value:.3f} [{low:.3f}, {most:.3f}], below chance"
    turned = [
        one if one.scores is None else replace(one, scores=replace(one.scores, scores=-one.scores.scores))
        for one in outcomes
    ]
    found = epsilon_bound(turned, members, delta=0.0, level=_SURE, split="unknown")
    if isinstance(found, str) or found.value <= 0:
        return ""
    return f"{found.attack} was wrong in {found.correct} of {found.guessed} answers to which of two was trained on"


def right_answers(outcomes: Sequence[AttackOutcome], members: Int[ndarray, " m"]) -> EpsilonBound | str:
    """The best answers to pairs against chance, at 95 % in all attacks: a bound above 0 is evidence of a leak.

    At a delta of 0 and a level of its own: at the delta that a large claim implies for replacement no number of right
    answers proves any epsilon, and the model leaks none the less.

    Args:
        outcomes: of all attacks.
        members: ids of members.
    """
    return epsilon_bound(outcomes, members, delta=0.0, level=0.95, split="unknown")


def _answered(found: EpsilonBound) -> str:
    return f"{found.attack} was right in {found.correct} of {found.guessed} answers to which of two was trained on"


def _within(bound: EpsilonBound | str) -> bool:
    # Where the claim implies nothing of replacement, as a large one does, no answers go beyond it.
    return isinstance(bound, str) or (bound.claimed is not None and bound.value <= bound.claimed)


def _undecided(one: Strongest, detectable: float) -> bool:
    """Whether a number that proves no leak is too large to be called none."""
    # Of several attacks' numbers of all candidates the largest proves nothing, and excludes nothing either.
    if one.of_all and one.low is not None and one.low > one.chance:
        return True
    return one.metric == "auc" and one.value >= detectable


def _words(one: Strongest) -> str:
    ends = "" if one.low is None or one.high is None else f" [{one.low:.3f}, {one.high:.3f}]"
    if one.metric == "auc":
        most = "" if one.allowed is None else f", the claim allows {one.allowed:.3f}"
        return f"{one.attack} has an AUC of {one.value:.3f}{ends} (0.5 is chance{most})"
    most = "" if one.allowed is None else f", the claim allows {one.allowed:.1%}"
    return f"{one.attack} finds {one.value:.1%} of members at 1 % false alarms{_percent(one)} (1 % is chance{most})"


def _percent(one: Strongest) -> str:
    return "" if one.low is None or one.high is None else f" [{one.low:.1%}, {one.high:.1%}]"
