"""`leakbench audit`: measures the leakage of a model trained elsewhere, what it proves, and the tests left out."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Annotated

import typer

from leakbench.leaderboard.records.audit_report import AuditReport, ScoresReport
from leakbench.leaderboard.records.update_report import UpdateReport

from .options import FAILED, OK, Json, print_json, say

OF_UPDATE = {
    *("update", "batch_size", "public", "candidates", "labels", "lr", "update_is", "weight_decay", "clip_norm"),
    *("noise_multiplier", "training_mode"),
}
"""Parameters of `--update` alone."""

WITH_UPDATE = OF_UPDATE | {
    *("checkpoint", "model", "attacks", "preprocess", "reading", "seed", "out", "device", "allow_pickle_tensors"),
    *("trust_code", "as_json"),
}
"""Parameters that `--update` uses."""

WITH_SCORES = {"scores", "split", "claim", "fail_if", "level", "delta", "as_json"}
"""Parameters that `--scores` uses."""


def audit(
    checkpoint: Annotated[
        Path | None,
        typer.Argument(help="safetensors, a PyTorch state dict, or a folder: image classifier, shards, LoRA adapter."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Architecture of `leakbench list models`, torchvision:NAME, or FILE.py:FUNCTION.")
    ] = None,
    members: Annotated[
        str | None, typer.Option(help="Examples that it was trained on: .npz, Parquet, or a folder of images by class.")
    ] = None,
    non_members: Annotated[str | None, typer.Option(help="Examples that it was not trained on.")] = None,
    population: Annotated[str | None, typer.Option(help="Public examples, neither of both.")] = None,
    data: Annotated[str | None, typer.Option(help="Instead of these: a data set of `leakbench list data`.")] = None,
    split_file: Annotated[
        Path | None, typer.Option(help="Of --data: CSV with id and group (member, non_member, population).")
    ] = None,
    scores: Annotated[
        Path | None, typer.Option(help="No model: CSV or Parquet with member and score, loss, or label and logits.")
    ] = None,
    split: Annotated[
        str, typer.Option(help="random, where members were drawn at random of what non-members are the rest of.")
    ] = "unknown",
    claim: Annotated[
        str | None,
        typer.Option(help="As epsilon=3,delta=1e-5; noise_multiplier, sample_rate, sampling and steps are checked."),
    ] = None,
    transcript: Annotated[
        Path | None, typer.Option(help="Of the training, as `leakbench.watch` writes it; held against --claim.")
    ] = None,
    canaries: Annotated[
        Path | None, typer.Option(help="Of --transcript: safetensors with inputs, labels and included.")
    ] = None,
    attacks: Annotated[str | None, typer.Option(help="Names with commas between; all that apply if not given.")] = None,
    shadows: Annotated[int, typer.Option(min=0, help="Shadow models, an even number; needs --train.")] = 0,
    train: Annotated[
        str | None, typer.Option(metavar="FILE.py:FUNCTION", help="train(inputs, labels, *, seed) -> model.")
    ] = None,
    bank: Annotated[
        Path | None,
        typer.Option(help="Instead of these: safetensors with logits and trained_on of shadow models."),
    ] = None,
    preprocess: Annotated[
        str | None, typer.Option(help="As mean=0.5,std=0.25; by channel with slashes between.")
    ] = None,
    drop_overlap: Annotated[
        bool, typer.Option("--drop-overlap", help="Leave out examples that are in two groups, instead of stopping.")
    ] = False,
    accept: Annotated[
        list[str] | None,
        typer.Option(help="Kind of a stop of the pre-flight that is meant to be so, as chance; may be repeated."),
    ] = None,
    reading: Annotated[
        str, typer.Option(help="How examples are stored: axes=nhwc,shape=1x28x28,resize=32,channels=3,labels=FILE.csv.")
    ] = "",
    fail_if: Annotated[
        list[str] | None,
        typer.Option(help="As 'tpr_at_1pct_fpr>0.05', by its lower end; 'auc.high>0.6' by the upper; repeat it."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the report.")] = None,
    most: Annotated[
        int, typer.Option(min=1, help="Most members, and most non-members, that are asked about.")
    ] = 10_000,
    update: Annotated[
        Path | None,
        typer.Option(help="Instead of members: one shared gradient of this model, safetensors."),
    ] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Of --update: examples behind it.")] = None,
    public: Annotated[
        str | None, typer.Option(help="Of --update: public examples; candidates are compared with half.")
    ] = None,
    candidates: Annotated[
        str | None, typer.Option(help="Of --update: examples that may have been in the batch.")
    ] = None,
    labels: Annotated[str | None, typer.Option(help="Of --update: labels of the batch, as 3,5,5, where known.")] = None,
    lr: Annotated[
        float | None, typer.Option(help="Of --update: rate of the step, where it holds weights or their difference.")
    ] = None,
    update_is: Annotated[
        str | None,
        typer.Option(
            help="Of --update: gradient (mean), sum, weights (after the step) or difference (after - before)."
        ),
    ] = None,
    weight_decay: Annotated[
        float | None, typer.Option(help="Of --update: coefficient that the step added to the gradient.")
    ] = None,
    training_mode: Annotated[
        bool, typer.Option("--training-mode", help="Of --update: batch norms took the statistics of the batch.")
    ] = False,
    clip_norm: Annotated[float | None, typer.Option(help="Of --update: of each example.")] = None,
    noise_multiplier: Annotated[float, typer.Option(help="Of --update: noise / clip norm, on the sum.")] = 0.0,
    level: Annotated[float, typer.Option(help="Confidence of the bound on epsilon.")] = 0.95,
    delta: Annotated[float, typer.Option(help="Of the bound on epsilon, where nothing is claimed.")] = 1e-5,
    gradients: Annotated[bool, typer.Option(help="Also attack shared gradients of this architecture.")] = True,
    seed: Annotated[int, typer.Option(min=0, help="Of orders, coins and draws.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    allow_pickle_tensors: Annotated[
        bool, typer.Option(help="Read .pt and .pth by PyTorch's restricted loader, in a process of its own.")
    ] = False,
    trust_code: Annotated[bool, typer.Option(help="Run the FILE.py of --model and --train.")] = False,
    describe: Annotated[bool, typer.Option(help="What would run, and what it could show; computes nothing.")] = False,
    as_json: Json = False,
) -> int:
    """Audits a trained model for leakage; exit 1 if a rule is broken or the claim is refuted."""
    values = locals()
    # An explicit default value counts as not given.
    usual = {name: parameter.default for name, parameter in inspect.signature(audit).parameters.items()}
    given = {name for name, value in values.items() if value != usual[name]}
    from ..external.claim import StatedClaim
    from ..external.examples.groups import Preprocess
    from ..external.examples.sources.raw import Reading
    from ..external.model import command
    from ..external.model.audit import AuditSettings
    from ..external.scores import command as scores_command
    from ..run.harness import pick_device

    if split not in ("random", "unknown"):
        raise ValueError(f"--split must be random or unknown, got {split!r}")
    if update is not None:
        from ..external.update import command as update_command
        from ..external.update.convention import named_convention

        if checkpoint is None or model is None or batch_size is None:
            raise ValueError("--update needs the checkpoint before the step, --model and --batch-size")
        if members or non_members or scores or shadows or bank or claim or fail_if:
            raise ValueError("--update asks about one step alone: give no members, scores, shadows, claim or rules")
        _refuse_others("--update", given - WITH_UPDATE)
        told = update_command.audit_update(
            update_command.AskedUpdate(
                checkpoint=checkpoint,
                model=model,
                update=update,
                batch_size=batch_size,
                public=public,
                candidates=candidates,
                labels=labels,
                lr=lr,
                update_is=named_convention(update_is),
                weight_decay=weight_decay,
                training_mode=training_mode,
                clip_norm=clip_norm,
                noise_multiplier=noise_multiplier,
                attacks=attacks,
                preprocess=Preprocess.parse(preprocess),
                reading=Reading.parse(reading),
                seed=seed,
                out=out,
                device=pick_device(device),
                allow_pickle_tensors=allow_pickle_tensors,
                trust_code=trust_code,
                command=("leakbench", *sys.argv[1:]),
            ),
            say,
        )
        if out is not None:
            _pictures(out, told)
            # Imported here, because only the command may combine audit and board.
            from leakbench.leaderboard.page.shared_update import build_update_report

            say(f"report: {build_update_report(out)}")
        if as_json:
            print_json(told.to_dict())
        else:
            from ..external.text import update_text

            print(update_text(told))
        return OK
    if given & OF_UPDATE:
        raise ValueError(
            "--batch-size, --public, --candidates, --labels, --lr, --update-is, --weight-decay, "
            "--training-mode, --clip-norm and --noise-multiplier are of --update"
        )
    settings = AuditSettings(
        attacks=command.attacks_asked(attacks, transcript=transcript is not None),
        split=split,
        claim=None if claim is None else StatedClaim.parse(claim),
        delta=delta,
        level=level,
        gradients=gradients,
        seed=seed,
    )
    if scores is not None:
        if checkpoint is not None or model is not None or members is not None:
            raise ValueError("--scores is instead of a checkpoint and its examples, got both")
        _refuse_others("--scores", given - WITH_SCORES)
        rules = scores_command.rules_of_scores(fail_if or [])
        return _end(scores_command.audit_scores(scores, settings, rules), None, as_json)
    if checkpoint is None or (model is None and not checkpoint.is_dir()):
        raise ValueError("a checkpoint and --model must be given, or --scores; see leakbench audit --help")
    asked = command.Asked(
        settings=settings,
        checkpoint=checkpoint,
        model=model or "",
        members=members,
        non_members=non_members,
        population=population,
        data=data,
        split_file=split_file,
        preprocess=Preprocess.parse(preprocess),
        reading=Reading.parse(reading),
        drop_overlap=drop_overlap,
        accept=accept or [],
        most=most,
        transcript=transcript,
        canaries=canaries,
        shadows=shadows,
        train=train,
        bank=bank,
        rules=command.rules_asked(fail_if or [], transcript=transcript is not None),
        out=out,
        device=pick_device(device),
        allow_pickle_tensors=allow_pickle_tensors,
        trust_code=trust_code,
        command=("leakbench", *sys.argv[1:]),
    )
    if describe:
        told = command.describe(asked)
        if as_json:
            from leakbench.leaderboard.records.validation import json_values

            print_json(json_values(told))
        else:
            from ..external.text import plan_text

            print(plan_text(told))
        return OK
    return _end(command.run_audit(asked, say), out, as_json)


def _refuse_others(what: str, others: Collection[str]) -> None:
    """Raises for options that would be ignored silently."""
    if others:
        option = min(others).replace("_", "-")
        raise ValueError(
            f"{what} makes no use of {'the checkpoint' if option == 'checkpoint' else f'--{option}'}; leave it out"
        )


def _pictures(out: Path, report: UpdateReport) -> None:
    """Writes the reconstructions from an update as pictures, if the inputs are images."""
    import base64

    import numpy as np

    # Imported here, because only the command may combine audit and board.
    from leakbench.leaderboard.page.images import png, unit_images
    from leakbench.leaderboard.records.files import write_bytes

    shape, (low, high) = report.input_shape, report.input_range
    if len(shape) != 3 or shape[0] not in (1, 3) or not high > low:
        return
    with np.load(out / "reconstructions.npz", allow_pickle=False) as arrays:
        for name in arrays.files:
            for place, image in enumerate(unit_images(arrays[name], low, high)):
                content = base64.b64decode(png(image).partition(",")[2])
                write_bytes(out / f"{name}_{place}.png", content)


def _end(report: AuditReport | ScoresReport, out: Path | None, as_json: bool) -> int:
    """Prints the results, and returns the exit code: failure if a rule is broken or the claim is refuted."""
    if out is not None:
        # Imported here, because only the command may combine audit and board.
        from leakbench.leaderboard.page.checkpoint import build_report

        say(f"report: {build_report(out)}")
    if as_json:
        print_json(report.to_dict())
    else:
        from ..external.text import audit_text

        print(audit_text(report))
    broken = [rule.broken for rule in report.rules if rule.broken]
    for sentence in broken:
        say(f"broken: {sentence}")
    return FAILED if broken or report.verdict.refuted else OK
