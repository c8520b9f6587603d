"""`leakbench audit scores`: measures the leakage in a table of scores, without a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..options import Json, grouped
from .option_groups import JudgementOptions
from .results import finish


@grouped
def scores(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="CSV or Parquet: member, and score, loss, or label and logit_0, ..."),
    ],
    judgement: JudgementOptions,
    as_json: Json = False,
) -> int:
    """Audits a table of scores, losses or logits, without a model.

    Exit 1 if a rule is broken or the claim is refuted.
    """
    from ...external.request import ScoresAuditRequest
    from ...external.scores.command import audit_scores, rules_of_scores
    from ...external.text import audit_text

    request = ScoresAuditRequest(
        scores=file, settings=judgement.settings(), rules=rules_of_scores(judgement.fail_if or [])
    )
    report = audit_scores(request)
    return finish(report, audit_text, as_json=as_json, rules=report.rules, refuted=report.verdict.refuted)
