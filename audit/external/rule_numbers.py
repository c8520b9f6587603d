"""The numbers that rules are held against, and what rules make of them.

An epsilon of one attack assumes a split that was drawn at random, as the bound of the whole audit does: where nobody
says so it is left out, of the report and of what rules see. A rule is kept only where the audit could tell: by numbers
of which the verdict itself says that they tell nothing, no rule is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from leakbench.leaderboard.metrics import METRICS
from leakbench.leaderboard.records.record import Metric

from ..scoring.random_split import NAME
from ..scoring.shift import Shift
from .gate import Rule
from .model.attacks import AttackOutcome
from .model.findings import SplitKind, Strongest, strongest
from .model.verdict import AuditVerdict


def unless_proved(outcomes: Sequence[AttackOutcome], split: SplitKind, shift: Shift) -> tuple[AttackOutcome, ...]:
    """Outcomes, their bounds on epsilon left out where the split was not random, or nobody says that it was.

    Args:
        outcomes: of all attacks.
        split: what the owner says of how members were drawn.
        shift: between members and non-members, without the model.
    """
    why = ""
    if split != "random":
        why = "the owner does not say that members were drawn at random of what non-members are the rest of"
    if shift.found:
        why = "members and non-members are told apart without the model, so the split was not drawn at random"
    if not why:
        return tuple(outcomes)
    withheld = Metric(value=None, better=METRICS[NAME].better, reason=why)
    return tuple(
        replace(one, metrics=one.metrics | {NAME: withheld}) if NAME in one.metrics else one for one in outcomes
    )


def numbers_of_rules(
    outcomes: Sequence[AttackOutcome], by: Sequence[Strongest], whole: Mapping[str, Metric]
) -> dict[tuple[str, str], Metric]:
    """(attack, metric) -> its number; under no attack those of the strongest and of the whole audit.

    Args:
        outcomes: of all attacks.
        by: the strongest by the metrics of the verdict; by others it is found here.
        whole: metric -> its number of the whole audit.
    """
    found = {(one.name, name): metric for one in outcomes for name, metric in one.metrics.items()}
    named = {one.metric: one for one in by}
    for name, row in METRICS.items():
        one = named.get(name) or (strongest(outcomes, name) if row.kind == "membership" and name != NAME else None)
        if one is None:
            # Where every attack lacks it, as with few non-members, for the reason that they have.
            if unmeasured := [outcome.metrics[name] for outcome in outcomes if name in outcome.metrics]:
                found["", name] = unmeasured[0]
            continue
        metric = found[one.attack, name]
        # The half that had no say in the choice: the attack's own number flatters whoever picked it.
        reason = None if one.low is not None else metric.reason or "so few candidates have no interval"
        found["", name] = Metric(
            value=one.value, low=one.low, high=one.high, n=one.n, better=metric.better, reason=reason
        )
    return found | {("", name): metric for name, metric in whole.items()}


def judged(
    rules: Sequence[Rule], numbers: Mapping[tuple[str, str], Metric], verdict: AuditVerdict
) -> list[dict[str, Any]]:
    """Each rule, and how it is broken; None where it is kept.

    Args:
        rules: as they were asked.
        numbers: by `numbers_of_rules`.
        verdict: of the audit.
    """
    doubt = "no rule is kept by an audit that cannot tell" if verdict.word == "cannot be told" else None
    return [
        {"text": rule.text, "broken": rule.broken(numbers) or (f"{rule.text}: {doubt}" if doubt else None)}
        for rule in rules
    ]
