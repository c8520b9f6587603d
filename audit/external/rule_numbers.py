"""Measurements that rules are compared with, and the outcome of each rule.

The epsilon bound of a single attack assumes a random split, like the bound of the whole audit: unless the owner states
that, it is left out of the report and of the rules. If the verdict is "cannot be told", no rule is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from leakbench.leaderboard.metrics import METRICS
from leakbench.leaderboard.records.audit_findings import AuditVerdict, RuleOutcome, SplitKind, Strongest
from leakbench.leaderboard.records.record import Metric

from ..scoring.random_split import NAME
from ..scoring.shift import Shift
from .gate import Rule
from .model.attacks import AttackOutcome
from .model.findings import strongest


def unless_proved(outcomes: Sequence[AttackOutcome], split: SplitKind, shift: Shift) -> tuple[AttackOutcome, ...]:
    """Returns the outcomes, without their bounds on epsilon unless the split was random.

    Args:
        outcomes: of all attacks.
        split: the owner's statement on how members were drawn.
        shift: distribution shift between members and non-members, without the model.
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
        replace(outcome, metrics=outcome.metrics | {NAME: withheld}) if NAME in outcome.metrics else outcome
        for outcome in outcomes
    )


def numbers_of_rules(
    outcomes: Sequence[AttackOutcome], by: Sequence[Strongest], whole: Mapping[str, Metric]
) -> dict[tuple[str, str], Metric]:
    """Returns measurements by (attack, metric); attack is empty for the strongest attack and the whole audit.

    Args:
        outcomes: of all attacks.
        by: the strongest attacks by the verdict's metrics; for other metrics they are determined here.
        whole: measurements of the whole audit, by metric.
    """
    measurements = {(outcome.name, name): metric for outcome in outcomes for name, metric in outcome.metrics.items()}
    named = {best.metric: best for best in by}
    for name, row in METRICS.items():
        best = named.get(name) or (strongest(outcomes, name) if row.kind == "membership" and name != NAME else None)
        if best is None:
            # Without a measured value, as with few non-members, the reason given for the first attack is kept.
            if unmeasured := [outcome.metrics[name] for outcome in outcomes if name in outcome.metrics]:
                measurements["", name] = unmeasured[0]
            continue
        metric = measurements[best.attack, name]
        # Measured on the half that did not choose the attack: its number on all candidates is biased by the choice.
        reason = None if best.low is not None else metric.reason or "so few candidates have no interval"
        measurements["", name] = Metric(
            value=best.value, low=best.low, high=best.high, n=best.n, better=metric.better, reason=reason
        )
    return measurements | {("", name): metric for name, metric in whole.items()}


def judged(
    rules: Sequence[Rule], numbers: Mapping[tuple[str, str], Metric], verdict: AuditVerdict
) -> tuple[RuleOutcome, ...]:
    """Returns the outcome of each rule.

    Args:
        rules: as requested.
        numbers: by `numbers_of_rules`.
        verdict: of the audit.
    """
    doubt = "no rule is kept by an audit that cannot tell" if verdict.word == "cannot be told" else None
    return tuple(
        RuleOutcome(text=rule.text, broken=rule.broken(numbers) or (f"{rule.text}: {doubt}" if doubt else None))
        for rule in rules
    )
