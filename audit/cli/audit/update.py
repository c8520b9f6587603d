"""`leakbench audit update`: measures what a single shared update reveals of the batch behind it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from leakbench.leaderboard.records.update_report import UpdateReport

from ..options import Json, grouped, say
from .option_groups import CHECKPOINT, AttackOptions, ModelOptions
from .results import finish


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """Options on the batch behind the update, and on the step that it was taken in."""

    public: Annotated[str | None, typer.Option(help="Public examples; candidates are compared with half.")] = None
    candidates: Annotated[str | None, typer.Option(help="Examples that may have been in the batch.")] = None
    labels: Annotated[str | None, typer.Option(help="Labels of the batch, as 3,5,5, where known.")] = None
    lr: Annotated[
        float | None, typer.Option(help="Rate of the step, where the update holds weights or their difference.")
    ] = None
    update_is: Annotated[
        str | None, typer.Option(help="gradient (mean), sum, weights (after the step) or difference (after - before).")
    ] = None
    weight_decay: Annotated[float | None, typer.Option(help="Coefficient that the step added to the gradient.")] = None
    training_mode: Annotated[
        bool, typer.Option("--training-mode", help="Batch norms took the statistics of the batch.")
    ] = False
    clip_norm: Annotated[float | None, typer.Option(help="Of each example.")] = None
    noise_multiplier: Annotated[float, typer.Option(help="Noise / clip norm, on the sum.")] = 0.0


@grouped
def update(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Gradient, weights after the step, or a difference.")],
    checkpoint: Annotated[Path, typer.Option(help=f"Model before the step: {CHECKPOINT}")],
    batch_size: Annotated[int, typer.Option(min=1, help="Examples behind the update.")],
    batch: BatchOptions,
    model: ModelOptions,
    attacking: AttackOptions,
    as_json: Json = False,
) -> int:
    """Audits one shared update: the inputs of its batch, and who was in it."""
    from ...external.request import UpdateAuditRequest
    from ...external.text import update_text
    from ...external.update.command import audit_update
    from ...external.update.convention import named_convention

    request = UpdateAuditRequest(
        **model.request(checkpoint),
        update=file,
        batch_size=batch_size,
        attacks=attacking.attacks,
        seed=attacking.seed,
        **{**vars(batch), "update_is": named_convention(batch.update_is)},
    )
    report = audit_update(request, say)
    page = None
    if model.out is not None:
        # Imported here, because only the command may combine audit and board.
        from leakbench.leaderboard.page.shared_update import build_update_report

        _write_pictures(model.out, report)
        page = build_update_report(model.out)
    return finish(report, update_text, as_json=as_json, page=page)


def _write_pictures(out: Path, report: UpdateReport) -> None:
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
