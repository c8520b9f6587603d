"""`leakbench audit scores`: audit of scores in a table, without a model."""

from __future__ import annotations

from collections.abc import Sequence

from leakbench.leaderboard.records.audit_findings import EpsilonBound, NoBound
from leakbench.leaderboard.records.audit_report import ScoreMetric, ScoresFile, ScoresReport, ScoresResult
from leakbench.leaderboard.records.record import Metric

from ...scoring.shift import Shift
from ..gate import Rule, rules
from ..model.audit import epsilon_metric
from ..model.findings import COMPARED, allowed_by, epsilon_bound, strongest
from ..model.sizes import smallest_leak
from ..model.verdict import backwards, right_answers, verdict, why_tied
from ..request import ScoresAuditRequest
from ..rule_numbers import judged, numbers_of_rules, unless_proved
from .score_files import COLUMNS, read_scores


def rules_of_scores(texts: Sequence[str]) -> list[Rule]:
    """Parses the rules of `--fail-if`, in which columns of scores take the place of attacks."""
    return rules(texts, COLUMNS)


def audit_scores(request: ScoresAuditRequest) -> ScoresReport:
    """Audits scores without a model.

    Raises:
        ValueError: no table of scores.
    """
    settings = request.settings
    delta = settings.delta_of_bounds
    table = read_scores(request.scores, delta=delta)
    claim = settings.claim
    allowed = {} if claim is None else allowed_by(claim.trade_off)
    compared = (strongest(table.outcomes, metric, allowed.get(metric)) for metric in COMPARED)
    by = tuple(best for best in compared if best is not None)
    members = table.ids[table.member].numpy()
    bound = epsilon_bound(
        table.outcomes,
        members,
        delta=delta,
        level=settings.level,
        split=settings.split,
        claim=None if claim is None else claim.of_replacement,
    )
    # Without inputs, a distribution shift cannot be tested.
    unknown = Shift(p_value=None, auc=None, members=0, non_members=0, detectable=None)
    sizes = smallest_leak(len(members), len(table.ids) - len(members), delta, settings.level, len(table.outcomes))
    reverse = backwards(table.outcomes, members, sizes.auc)
    right = right_answers(table.outcomes, members)
    tied = why_tied(table.outcomes, len(members), sizes.auc)
    decided = verdict(by, bound, unknown, claim.errors if claim else (), sizes.auc, reverse, right, tied=tied)
    whole = {"epsilon_lower": epsilon_metric(bound), "accuracy_gap": NO_MODEL}
    outcomes = unless_proved(table.outcomes, settings.split, unknown)
    return ScoresReport(
        verdict=decided,
        scores=ScoresFile(file=request.scores.name, sha256=table.sha256, members=len(members), rows=len(table.ids)),
        attacks=tuple(
            ScoresResult(name=outcome.name, metrics={name: _plain(metric) for name, metric in outcome.metrics.items()})
            for outcome in outcomes
        ),
        epsilon=bound if isinstance(bound, EpsilonBound) else NoBound(why_not=bound),
        smallest_leak=sizes,
        claim=None if claim is None else claim.report,
        rules=judged(request.rules, numbers_of_rules(outcomes, by, whole), decided),
    )


NO_MODEL = Metric(value=None, better="lower", reason="a table of scores has no model that answers")
"""Metric for quantities that need a model."""


def _plain(metric: Metric) -> ScoreMetric:
    return ScoreMetric(value=metric.value, low=metric.low, high=metric.high, n=metric.n, reason=metric.reason)
