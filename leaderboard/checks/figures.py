"""Numbers of a record against one another: shares, halves, bounds on epsilon, claims, budgets, flags."""

import math
from collections.abc import Iterator

from ..kinds import KINDS
from ..metrics import METRICS
from ..records.details import CALIBRATION, REPORT, AucDetail, CountDetail, ProvedDetail
from ..records.fields import SLACK, Metric
from ..records.record import Record
from .fault import Fault, Severity

TOLERANCE = 1e-6
"""Relative tolerance of numbers that follow from one another."""

SHIFTED = 0.01
"""Largest p-value of a shift between members and non-members that is flagged, as of `leakbench.audit.scoring.shift`."""

VIOLATED = "claim_violated"

TOGETHER = {
    "accuracy": ("loss",),
    "auc": ("tpr_at_1pct_fpr", "advantage", "balanced_accuracy", "implied_epsilon", "epsilon_lower"),
    "psnr": ("psnr_floor", "mse", "ssim"),
    "label_overlap": ("label_overlap_floor",),
    "classes_named": ("classes_named_floor",),
    "bytes_up": ("bytes_down", "epsilon_worst"),
}
"""Main metric of a kind -> metrics that its scorer computes from the same arrays, null with a reason where it cannot:
a record without them hides a number."""

CHOICE = "prior_success"
"""Main metric of an attack that chooses among candidates."""


def figure_faults(record: Record, file: str) -> list[Fault]:
    """Returns the contradictions between the numbers of a record.

    Args:
        record: valid by itself.
        file: its path below the checked folder.
    """
    if record.status != "ok":
        parts = (_nothing(record), _arrays(record))
    else:
        parts = (_arrays(record), _together(record), _metrics(record), _bounds(record), _claim(record), _flags(record))
    return [
        Fault(file=file, field=field, problem=problem, severity=severity)
        for part in parts
        for field, problem, severity in part
    ]


_Contradictions = Iterator[tuple[str, str, Severity]]


def _nothing(record: Record) -> _Contradictions:
    if record.metrics:
        problem = f"metrics must be empty when status is {record.status!r}, got {', '.join(sorted(record.metrics))}"
        yield "metrics", problem, "refused"


def _arrays(record: Record) -> _Contradictions:
    if record.arrays is None and record.status == "ok":
        yield "arrays", "arrays must name the file of the scores behind the numbers, got null", "refused"
    if record.arrays not in (None, f"{record.id}.parquet"):
        yield "arrays", f"arrays must be {record.id}.parquet, got {record.arrays}", "refused"


def _together(record: Record) -> _Contradictions:
    main = KINDS[record.kind].main
    if main not in record.metrics and not (record.kind == "reconstruction" and CHOICE in record.metrics):
        yield f"metrics.{main}", f"a record of {record.kind} must have {main}, its main metric", "refused"
    for name in TOGETHER.get(main, ()) if main in record.metrics else ():
        if name not in record.metrics:
            yield f"metrics.{name}", f"{name} must stand beside {main}: both are of the same scores", "refused"


def _metrics(record: Record) -> _Contradictions:
    for name, metric in record.metrics.items():
        stated, field = METRICS.get(name), f"metrics.{name}"
        if metric.value is None:
            continue
        if metric.n is None and stated is not None:
            yield f"{field}.n", "n must be the number of examples behind a value, got null", "refused"
        elif metric.n == 0:
            yield f"{field}.n", f"n must be at least 1 for a value, and {metric.value:g} is of 0 examples", "refused"
        if stated is None:
            continue
        for end in ("low", "high"):
            value, slack = getattr(metric, end), SLACK * max(1.0, abs(metric.value))
            if value is not None and not stated.least - slack <= value <= stated.most + slack:
                problem = f"{end} must be in the range of {name}, [{stated.least:g}, {stated.most:g}], got {value}"
                yield f"{field}.{end}", problem, "refused"
        if isinstance(metric.detail, CountDetail) and "correct" in metric.detail and metric.n:
            share = metric.detail.correct / metric.n
            if not math.isclose(share, metric.value, rel_tol=TOLERANCE, abs_tol=TOLERANCE):
                problem = f"value must be correct / n = {share:.6g}, got {metric.value}"
                yield f"{field}.value", problem, "refused"
        yield from _halves(metric, field)


def _halves(metric: Metric, field: str) -> _Contradictions:
    for half in (CALIBRATION, REPORT):
        number = metric.detail.on(half)
        if number.value is None or number.low is None or number.high is None:
            continue
        slack = SLACK * max(1.0, abs(number.value))
        if not number.low - slack <= number.value <= number.high + slack:
            problem = f"{half}_value must lie in its interval [{number.low}, {number.high}], got {number.value}"
            yield f"{field}.detail.{half}_value", problem, "refused"


def _bounds(record: Record) -> _Contradictions:
    """Proved lower bounds on epsilon against the claim."""
    claim = record.claim
    for name, metric in record.metrics.items():
        stated = METRICS.get(name)
        if stated is None or not stated.proved or metric.value is None or not isinstance(metric.detail, ProvedDetail):
            continue
        if claim is None or claim.epsilon is None or claim.unit == "client":
            continue  # no finite claim, or a claim about another unit than a record of the attack
        field, detail = f"metrics.{name}", metric.detail
        if record.kind == "canaries" and claim.relation != detail.relation:
            continue  # a bound for another relation of neighbors
        if lacking := [key for key in ("value_at_verdict", "claimed") if key not in detail]:
            yield f"{field}.detail", f"{lacking[0]} must be beside a proved bound, which it is judged by", "refused"
            continue
        allowed = claim.epsilon if detail.claimed is None else detail.claimed
        # The bound is for replacing a record, or at a smaller delta, where the same claim allows at least as much.
        if allowed < claim.epsilon * (1 - TOLERANCE):
            problem = f"claimed must be at least the epsilon of the claim, {claim.epsilon:.6g}, got {allowed:.6g}"
            yield f"{field}.detail.claimed", problem, "refused"
        proved = detail.value_at_verdict
        if VIOLATED in record.flags or metric.value <= allowed * (1 + TOLERANCE):
            continue
        bound = f"the proved lower bound {metric.value:.4g} is above the claim of {allowed:.4g}"
        if proved is not None and proved <= allowed * (1 + TOLERANCE):
            yield f"{field}.value", f"{bound}, and at the confidence of a verdict it is not: {proved:.4g}", "flagged"
        else:
            yield f"{field}.value", f"{bound}, and flags lack {VIOLATED}", "refused"


def _claim(record: Record) -> _Contradictions:
    claim, budget = record.claim, record.budget
    if claim is None:
        return
    if claim.unit not in ("example", "record", "client"):
        yield "claim.unit", f"unit must be example, record or client, got {claim.unit!r}", "refused"
    if budget.delta is not None and claim.epsilon is not None and claim.delta != budget.delta:
        yield "claim.delta", f"delta must be that of the budget, {budget.delta:g}, got {claim.delta:g}", "refused"
    requested = budget.noise_multiplier
    noiseless = KINDS[record.kind].variants and record.task.noise == "none"
    if requested is not None and record.noise_multiplier != requested and not noiseless:
        problem = f"noise_multiplier must be that of the budget, {requested:g}, got {record.noise_multiplier}"
        yield "noise_multiplier", problem, "refused"
    if claim.epsilon is None:
        return
    # The claim about a shared update is for its step alone and for another relation, and no budget limits it.
    limit = None if KINDS[record.kind].own_task or VIOLATED in record.flags else budget.epsilon
    if limit is not None and claim.epsilon > limit * (1 + TOLERANCE):
        problem = f"epsilon {claim.epsilon:.6g} is above the budget of {limit:g}, and flags lack {VIOLATED}"
        yield "claim.epsilon", problem, "refused"
    if record.control != "public_only" and not record.noise_multiplier:
        problem = (
            f"a finite epsilon, {claim.epsilon:.4g}, needs noise, and noise_multiplier is {record.noise_multiplier}"
        )
        yield "claim.epsilon", problem, "refused"
    if record.noise_multiplier and record.noise == "none":
        yield "noise", "noise must be seeded, os or secure when noise was added, got none", "refused"


def _flags(record: Record) -> _Contradictions:
    for i, flag in enumerate(record.flags):
        if flag in record.flags[:i]:
            yield f"flags[{i}]", f"a flag must occur once, and {flag!r} occurs again", "refused"
    if record.changes and record.reported:
        problem = "a paper's figure is of the unchanged suite, and changes has overrides of this cell"
        yield "reported", problem, "refused"
    auc = record.metrics.get("auc")
    if auc is None or not isinstance(auc.detail, AucDetail) or "shift_p_value" not in auc.detail:
        return
    p_value = auc.detail.shift_p_value
    if ("distribution_shift" in record.flags) != (p_value is not None and p_value < SHIFTED):
        yield (
            "flags",
            f"distribution_shift must be flagged for p below {SHIFTED}, and only then; p is {p_value}",
            "refused",
        )
