"""Results of an audit on stdout, and its exit code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from leakbench.leaderboard.records.audit_findings import RuleOutcome
from leakbench.leaderboard.records.report import VersionedReport
from leakbench.leaderboard.records.validation import json_values

from ..options import FAILED, OK, print_json, say

R = TypeVar("R", bound=VersionedReport)


def finish(
    report: R,
    text: Callable[[R], str],
    *,
    as_json: bool,
    page: Path | None = None,
    rules: Sequence[RuleOutcome] = (),
    refuted: bool = False,
) -> int:
    """Prints a report, and returns the exit code: failure if a rule is broken or the claim is refuted.

    Args:
        report: of the audit.
        text: formats it.
        as_json: whether it is printed as JSON.
        page: of the report; None for none.
        rules: each with its outcome.
        refuted: whether the claim is refuted.
    """
    if page is not None:
        say(f"report: {page}")
    if as_json:
        print_json(report.to_dict())
    else:
        print(text(report))
    broken = [rule.broken for rule in rules if rule.broken]
    for sentence in broken:
        say(f"broken: {sentence}")
    return FAILED if broken or refuted else OK


def finish_plan(plan: Any, *, as_json: bool) -> int:
    """Prints the `AuditPlan` of `--describe`.

    (Any: the import of its type takes seconds, too long for a command's help.)
    """
    from ...external.text import plan_text

    if as_json:
        print_json(json_values(plan))
    else:
        print(plan_text(plan))
    return OK
