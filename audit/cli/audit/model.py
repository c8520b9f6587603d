"""`leakbench audit model`: measures the leakage of a model trained elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from leakbench.leaderboard.records.audit_report import AuditReport

from ..options import Json, grouped, say
from .option_groups import (
    CHECKPOINT,
    AttackOptions,
    Describe,
    ExampleOptions,
    JudgementOptions,
    ModelOptions,
    ShadowOptions,
    SharedGradients,
)
from .results import finish, finish_plan


@grouped
def model(
    file: Annotated[Path, typer.Argument(metavar="FILE", help=CHECKPOINT)],
    model: ModelOptions,
    examples: ExampleOptions,
    shadows: ShadowOptions,
    attacking: AttackOptions,
    judgement: JudgementOptions,
    gradients: SharedGradients = True,
    describe: Describe = False,
    as_json: Json = False,
) -> int:
    """Audits a model that was trained elsewhere.

    Exit 1 if a rule is broken or the claim is refuted.
    """
    from ...external.model import command

    request = model_request(file, model, examples, shadows, attacking, judgement, gradients=gradients)
    if describe:
        return finish_plan(command.describe(request), as_json=as_json)
    return finish_model(command.audit_checkpoint(request, say), model.out, as_json=as_json)


def model_request(
    checkpoint: Path,
    model: ModelOptions,
    examples: ExampleOptions,
    shadows: ShadowOptions,
    attacking: AttackOptions,
    judgement: JudgementOptions,
    *,
    gradients: bool,
    transcript: bool = False,
) -> Any:
    """Returns the `ModelAuditRequest` of the options.

    Args:
        checkpoint: file of the model.
        model: how it is read.
        examples: members and non-members.
        shadows: shadow models.
        attacking: the attacks.
        judgement: claim and rules.
        gradients: whether shared gradients are attacked, too.
        transcript: whether there is a transcript of the training, for attacks that read updates.
    """
    from ...external.request import ModelAuditRequest, attacks_of_model, rules_of_model

    attacks = attacks_of_model(attacking.attacks, transcript=transcript)
    return ModelAuditRequest(
        **model.request(checkpoint),
        settings=judgement.settings(attacks=attacks, gradients=gradients, seed=attacking.seed),
        examples=examples.files(),
        shadows=shadows.models(),
        rules=rules_of_model(judgement.fail_if or [], transcript=transcript),
    )


def finish_model(report: AuditReport, out: Path | None, *, as_json: bool) -> int:
    """Writes the page of a model's report, prints the report, and returns the exit code.

    Args:
        report: of the audit.
        out: folder with its files; None for none.
        as_json: whether it is printed as JSON.
    """
    from ...external.text import audit_text

    page = None
    if out is not None:
        # Imported here, because only the command may combine audit and board.
        from leakbench.leaderboard.page.checkpoint import build_report

        page = build_report(out)
    return finish(report, audit_text, as_json=as_json, page=page, rules=report.rules, refuted=report.verdict.refuted)
