"""`leakbench audit transcript`: holds the updates of a training against its claim, with or without its model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..options import Json, grouped, say
from .model import finish_model, model_request
from .option_groups import (
    CHECKPOINT,
    AttackOptions,
    Describe,
    ExampleOptions,
    JudgementOptions,
    ModelOptions,
    ShadowOptions,
    SharedGradients,
    chosen_options,
)
from .results import finish, finish_plan


@grouped
def transcript(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Transcript that `leakbench.watch` wrote.")],
    model: ModelOptions,
    examples: ExampleOptions,
    shadows: ShadowOptions,
    attacking: AttackOptions,
    judgement: JudgementOptions,
    checkpoint: Annotated[
        Path | None, typer.Option(help=f"Finished model, audited with its transcript: {CHECKPOINT}")
    ] = None,
    canaries: Annotated[
        Path | None, typer.Option(help="safetensors with inputs, labels and included, by coins of the training.")
    ] = None,
    gradients: SharedGradients = True,
    describe: Describe = False,
    as_json: Json = False,
) -> int:
    """Audits the updates of a watched training against its claim.

    With --checkpoint the finished model is audited, too. Exit 1 if a rule is broken or the claim is refuted.
    """
    from ...external.request import TranscriptAuditRequest
    from ...external.text import transcript_text
    from ...external.transcript import command

    if checkpoint is None:
        options = [name for name in chosen_options(judgement) if name not in ("claim", "level", "delta")]
        options += chosen_options(model, examples, shadows, attacking) + ["describe"] * describe
        if options or not gradients:
            option = options[0].replace("_", "-") if options else "no-gradients"
            raise ValueError(f"--{option} is of the model, and a transcript alone has none; give --checkpoint")
        request = TranscriptAuditRequest(transcript=folder, settings=judgement.settings(), canaries=canaries)
        report = command.judge_alone(request, say)
        return finish(report, transcript_text, as_json=as_json, refuted=report.verdict.word == "violation")
    audited = model_request(
        checkpoint, model, examples, shadows, attacking, judgement, gradients=gradients, transcript=True
    )
    request = TranscriptAuditRequest(transcript=folder, settings=audited.settings, audited=audited, canaries=canaries)
    if describe:
        return finish_plan(command.describe_transcript(request), as_json=as_json)
    return finish_model(command.audit_transcript(request, say), model.out, as_json=as_json)
