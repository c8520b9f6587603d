"""Verdict of an audit in a word and a sentence: the evidence with its interval, or the leak that would have shown.

"no leak found" is given only if a leak of the stated size would have shown: not if a classifier separates the groups
without the model, if scores rank non-members above members, or if there are so few candidates that a large number
proves nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Int
from numpy import ndarray

from leakbench.leaderboard.records.audit_findings import AuditVerdict, EpsilonBound, Strongest

from ...scoring.shift import Shift
from .attacks import AttackOutcome
from .findings import epsilon_bound

_SURE = 0.99
"""Confidence of the test on wrong answers, higher than for a leak: it errs for 1 % of models without a leak."""


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
    """Returns the verdict of an audit.

    A model that leaks nothing is called leaking in at most one audit of ten: AUC and TPR err in 2.5 % each, the bound
    in 5 % at its usual level. A value that proves no leak, yet exceeds the limit of "no leak found", gives "cannot be
    told".

    Args:
        by: the strongest attack by each metric.
        bound: on epsilon, or why there is none.
        shift: distribution shift between members and non-members, without the model.
        refuted: sentences on evidence that refutes the claim, in addition to the bound.
        detectable: AUC that these candidates would have distinguished from chance in four audits of five.
        reverse: evidence that scores rank non-members above members, by `backwards`.
        pairs: result of `right_answers`, which depends neither on the claim nor on the level of the bound; None for
            that of the bound.
        weak: count of attacks that ran, as "3 of 10 attacks", if none had shadow models; empty otherwise.
        tied: why tied scores could show no leak, by `why_tied`; empty if they could.
    """
    refutations = list(refuted)
    proof, answered = _proof(bound, bound if pairs is None else pairs)
    by_pairs = ""
    if isinstance(bound, EpsilonBound) and bound.refutes:
        refutations.append(f"{proof} where the claim allows {bound.claimed:.2f}")
        by_pairs = bound.attack
    if refutations:
        return AuditVerdict(
            word="claim refuted",
            sentence=f"The claim is refuted: {'; '.join(refutations)}.",
            by=by_pairs,
            how="pairs" if by_pairs else "",
        )
    leaks = [best for best in by if best.found]
    if (leaks or proof) and not shift.found:
        return _leak(by, leaks, bound, proof, answered)
    if unknown := _why_unknown(by, shift, detectable, reverse, tied):
        return AuditVerdict(word="cannot be told", sentence=unknown)
    most = next((best for best in by if best.metric == "auc"), by[0])
    ran = f"{weak} ran, none of them with shadow models, which find most. None" if weak else "No attack that ran"
    return AuditVerdict(
        word="no leak found",
        sentence=(
            f"{ran} told members from non-members: {_words(most)}. From an AUC of {detectable:.3f} on a leak would "
            "have shown in four audits of five; smaller leaks, and stronger attacks, are not excluded."
        ),
        weak=weak,
    )


def _proof(bound: EpsilonBound | str, pairs: EpsilonBound | str) -> tuple[str, str]:
    """Returns the evidence of right answers about pairs, with the attack that gave them; empty if there is none."""
    best = next((each for each in (bound, pairs) if isinstance(each, EpsilonBound) and each.value > 0), None)
    if best is None:
        return "", ""
    proof = f"{best.attack} was right in {best.correct} of {best.guessed} answers to which of two was trained on"
    # More right answers than by chance count for any split; they prove an epsilon only if the split was random.
    if best is bound and best.split == "random":
        proof += f", which proves an epsilon of at least {best.value:.2f} (replace-one, {best.percent} confidence)"
    return proof, best.attack


def _leak(
    by: Sequence[Strongest], leaks: Sequence[Strongest], bound: EpsilonBound | str, proof: str, answered: str
) -> AuditVerdict:
    """Returns the verdict on a leak: within the claim, or not.

    Args:
        by: the strongest attack by each metric.
        leaks: those that prove a leak.
        bound: on epsilon, or why there is none.
        proof: evidence of right answers about pairs; empty if there is none.
        answered: the attack that gave them.
    """
    averages = next((best for best in leaks if best.metric == "auc"), None)
    decided: dict[str, Any] = {"by": answered or leaks[0].attack, "how": "pairs" if answered else "averages"}
    if averages:
        decided = {"by": averages.attack, "how": "averages"}
    # The deciding evidence goes first, and an average that misses it is explained.
    parts = [*map(_words, leaks), *([proof] if proof else [])]
    shown = "; ".join(parts if averages else parts[::-1])
    # The owner has declared a finite epsilon: a leak within it is no alarm, and no proof of the claim either.
    within = by and by[0].allowed is not None and all(best.value <= (best.allowed or 0.0) for best in leaks)
    # If the split is not stated to be random, a bound proves no epsilon, and is no evidence for the claim either.
    if within and (not proof or _within(bound)):
        sentence = f"What attacks find is no more than the claim allows, and no proof of it: {shown}."
        return AuditVerdict(word="within the claim", sentence=sentence, **decided)
    sentence = f"This model leaks who was trained on: {shown}.{_missed(by, averages)}"
    return AuditVerdict(word="leaks", sentence=sentence, **decided)


def _why_unknown(by: Sequence[Strongest], shift: Shift, detectable: float, reverse: str, tied: str) -> str:
    """Returns why nothing can be said of leaks; empty if "no leak found" would mean something."""
    if shift.found:
        return (
            f"Members and non-members differ even without the model ({shift.words}), so no number here says whether "
            "the model leaks: take both from one pool at random."
        )
    if not by:
        return "No attack could be measured, so nothing is known of leaks."
    if reverse:
        return (
            f"Non-members look more like members than members do: {reverse}. Whoever turns such scores around tells "
            "who was trained on: are the two groups exchanged, or is a score smaller for members?"
        )
    if not tied and (large := [best for best in by if _undecided(best, detectable)]):
        return (
            f"So few candidates decide nothing: {'; '.join(map(_words, large))}, which is no proof of a leak, and "
            f"more than what is called none (an AUC below {detectable:.3f}); take 1,000 of each."
        )
    return tied


def why_tied(outcomes: Sequence[AttackOutcome], members: int, detectable: float) -> str:
    """Returns why tied scores could show no leak; empty if they could.

    The largest AUC with these ties is reached with members at the top: then a and b of the p members and q non-members
    share the score at the boundary, and the AUC is 1 - a b / (2 p q).

    Args:
        outcomes: of all attacks.
        members: number of members among the candidates.
        detectable: AUC that is called a leak.
    """
    most, ran = 0.5, False
    for outcome in outcomes:
        if outcome.scores is not None:
            _, counts = np.unique(-outcome.scores.scores.cpu().numpy(), return_counts=True)
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


def _missed(by: Sequence[Strongest], averages: Strongest | None) -> str:
    """Returns why an average over all candidates misses the evidence; empty if it does not."""
    most = next((best for best in by if best.metric == "auc"), None)
    if averages or most is None:
        return ""
    return (
        f" An AUC is an average over all candidates, here {most.value:.3f} by {most.attack}, and misses what is leaked "
        "of the few that an attack is surest of."
    )


def backwards(outcomes: Sequence[AttackOutcome], members: Int[ndarray, " m"], detectable: float) -> str:
    """Describes the evidence that scores rank non-members above members; empty if there is none.

    Such scores separate the groups as well as others do: the groups are exchanged, or a score is smaller for members.
    The evidence is the lowest AUC, chosen on one half and measured on the other, or wrong guesses of pairs' members.

    Args:
        outcomes: of all attacks.
        members: ids of members.
        detectable: AUC that is called a leak in four audits of five; a value as far below chance is evidence, too.
    """
    details = [(outcome.name, outcome.metrics["auc"].detail) for outcome in outcomes if "auc" in outcome.metrics]
    halves = [(value, name, detail) for name, detail in details if (value := detail.calibration_value) is not None]
    if halves:
        _, name, detail = min(halves, key=lambda half: half[:2])
        value, low, most = (end or 0.0 for end in (detail.report_value, detail.report_low, detail.report_high))
        if most < 0.5 and 1 - value >= detectable:
            return f"{name} has an AUC of {value:.3f} [{low:.3f}, {most:.3f}], below chance"
    turned = [
        outcome
        if outcome.scores is None
        else replace(outcome, scores=replace(outcome.scores, scores=-outcome.scores.scores))
        for outcome in outcomes
    ]
    bound = epsilon_bound(turned, members, delta=0.0, level=_SURE, split="unknown")
    if isinstance(bound, str) or bound.value <= 0:
        return ""
    return f"{bound.attack} was wrong in {bound.correct} of {bound.guessed} answers to which of two was trained on"


def right_answers(outcomes: Sequence[AttackOutcome], members: Int[ndarray, " m"]) -> EpsilonBound | str:
    """Returns the best attack's guesses of the member of each pair, tested at 95 % over all attacks.

    A bound above 0 is evidence of a leak. Delta is 0, and the level is independent of the audit's: at the delta that a
    large claim implies for replacement, no number of right guesses proves any epsilon, although the model leaks.

    Args:
        outcomes: of all attacks.
        members: ids of members.
    """
    return epsilon_bound(outcomes, members, delta=0.0, level=0.95, split="unknown")


def _within(bound: EpsilonBound | str) -> bool:
    # A large claim implies nothing under replacement, so no answers exceed it.
    return isinstance(bound, str) or (bound.claimed is not None and bound.value <= bound.claimed)


def _undecided(best: Strongest, detectable: float) -> bool:
    """Returns whether a value that proves no leak is too large for "no leak found"."""
    # The largest of several attacks' values on all candidates is biased: it proves nothing, and excludes nothing.
    if best.of_all and best.low is not None and best.low > best.chance:
        return True
    return best.metric == "auc" and best.value >= detectable


def _words(best: Strongest) -> str:
    ends = "" if best.low is None or best.high is None else f" [{best.low:.3f}, {best.high:.3f}]"
    if best.metric == "auc":
        most = "" if best.allowed is None else f", the claim allows {best.allowed:.3f}"
        return f"{best.attack} has an AUC of {best.value:.3f}{ends} (0.5 is chance{most})"
    most = "" if best.allowed is None else f", the claim allows {best.allowed:.1%}"
    return f"{best.attack} finds {best.value:.1%} of members at 1 % false alarms{_percent(best)} (1 % is chance{most})"


def _percent(best: Strongest) -> str:
    return "" if best.low is None or best.high is None else f" [{best.low:.1%}, {best.high:.1%}]"
