"""Report of an audit as files: `audit.json` with all numbers, scores and pictures as Parquet, leaderboard records.

The page and the Markdown summary are rendered from these files alone (`leakbench.leaderboard.page.checkpoint`), so they
can be rendered again from the folder.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from leakbench.attacks.core.closed_form.recursion.ranks import RankReport
from leakbench.leaderboard.records.audit_findings import NoBound
from leakbench.leaderboard.records.audit_report import (
    AttackRequires,
    AuditedGroups,
    AuditReport,
    BoundSettings,
    ExposedExample,
    ExposureReport,
    GradientAttackResult,
    GradientsReport,
    GroupAccuracy,
    MembershipResult,
    ShiftReport,
)
from leakbench.leaderboard.records.files import digest_of_bytes
from leakbench.leaderboard.records.record import MethodUsed, Record, RecordedClaim, write
from leakbench.leaderboard.records.report import LayerRank
from leakbench.leaderboard.records.task import TrainingTask
from leakbench.leaderboard.records.validation import build, json_values

from ..run.arrays import write_arrays
from ..run.provenance import library
from .model.attacks import AttackOutcome
from .model.audit import ModelAudit
from .model.findings import Exposure

DEFENSE = "trained elsewhere"
"""Name of the defense in the records of a model that was trained elsewhere."""


def audit_report(audit: ModelAudit, names: Mapping[int, str], **sections: Any) -> AuditReport:
    """Returns the report of an audit.

    Args:
        audit: the audit.
        names: maps ids to the owner's ids of examples.
        **sections: fields of `AuditReport` from `model` to `command`, which the command knows.
    """
    audited, exposed, settings, shift = audit.audited, audit.exposure, audit.settings, audit.shift
    return AuditReport(
        verdict=audit.verdict,
        groups=AuditedGroups(
            members=len(audited.members),
            non_members=len(audited.non_members),
            population=0 if audited.population is None else len(audited.population),
            input_shape=tuple(audited.members.inputs.shape[1:]),
            input_range=(audited.public_knowledge.low, audited.public_knowledge.high),
            classes=audited.classes,
            split=settings.split,
        ),
        accuracy=GroupAccuracy(**audit.accuracy),
        attacks=tuple(
            MembershipResult(
                name=outcome.name,
                settings=dict(outcome.settings),
                requires=build(AttackRequires, dict(outcome.requires)),
                metrics=outcome.metrics,
                why_not=outcome.why_not,
                failed=outcome.failed,
                seconds=round(outcome.seconds, 3),
            )
            for outcome in audit.outcomes
        ),
        strongest=audit.strongest,
        epsilon=NoBound(why_not=audit.bound) if isinstance(audit.bound, str) else audit.bound,
        shift=ShiftReport(**shift.to_detail(), found=shift.found, words=shift.words if shift.found else ""),  # pyright: ignore[reportArgumentType] -- a detail holds numbers and words
        exposure=None if exposed is None else _exposure(exposed, names),
        gradients=GradientsReport(
            ranks=ranks_report(audit.ranks),
            attacks=tuple(
                GradientAttackResult(
                    name=attack.name,
                    settings=dict(attack.settings),
                    psnr=attack.psnr,
                    why_not=attack.why_not,
                    seconds=round(attack.seconds, 3),
                )
                for attack in audit.shared
            ),
        ),
        settings=BoundSettings(delta=settings.delta, level=settings.level, seed=settings.seed),
        provenance=library(),
        claim=None if settings.claim is None else settings.claim.report,
        device=_device(audited.members.inputs.device),
        **sections,
    )


def ranks_report(ranks: Sequence[RankReport] | str) -> str | tuple[LayerRank, ...]:
    """Returns the ranks of a gradient's equations as they appear in a report; else why they are unknown."""
    return ranks if isinstance(ranks, str) else tuple(LayerRank(**rank.to_dict()) for rank in ranks)


def _exposure(exposed: Exposure, names: Mapping[int, str]) -> ExposureReport:
    rows = zip(exposed.ids, exposed.labels, exposed.scores, exposed.above, strict=True)
    return ExposureReport(
        attack=exposed.attack,
        nobody=exposed.nobody,
        examples=tuple(
            ExposedExample(id=i, name=names.get(i, str(i)), label=label, score=score, false_positive_rate=rate)
            for i, label, score, rate in rows
        ),
        classes={str(label): metric for label, metric in exposed.classes.items()},
    )


def write_report(report: AuditReport, audit: ModelAudit, names: Mapping[int, str], folder: Path) -> AuditReport:
    """Writes the report's files, the document last: once it exists, all other files do.

    Args:
        report: of the audit.
        audit: the audit.
        names: maps ids to the owner's ids of examples.
        folder: created if absent.

    Returns:
        The report with the digests of the files.
    """
    tables = {AuditReport.SCORES: _scores(audit, names), AuditReport.PICTURES: _pictures(audit)}
    files = {name: write_arrays(table, folder, Path(name).stem)[1] for name, table in tables.items()}
    report = replace(report, files=files)
    for record, columns in _records(audit, report):
        if columns:
            arrays, digest = write_arrays(columns, folder / "records", record.id)
            record = replace(record, arrays=arrays.name, arrays_digest=digest)
        write(record, folder / "records")
    report.write(folder)
    return report


def _scores(audit: ModelAudit, names: Mapping[int, str]) -> dict[str, Any]:
    """Returns the score table, a row per candidate: id, membership, label, the score of every attack that ran."""
    groups = (audit.audited.members, audit.audited.non_members)
    ids = torch.cat([group.ids for group in groups]).cpu()
    order = ids.argsort()
    labels = torch.cat([group.labels for group in groups]).cpu()[order]
    member = torch.isin(ids[order], audit.audited.members.ids.cpu())
    columns: dict[str, Any] = {
        "id": ids[order].numpy(),
        "name": [names.get(int(i), str(int(i))) for i in ids[order]],
        "member": member.numpy(),
        "label": labels.numpy(),
    }
    for outcome in audit.outcomes:
        if outcome.scores is not None:
            own = outcome.scores.ids.cpu().argsort()
            columns[f"score_{outcome.name}"] = outcome.scores.scores.cpu()[own].double().numpy()
    return columns


def _pictures(audit: ModelAudit) -> dict[str, Any]:
    """Returns the page's pictures: the most exposed members, inputs of shared gradients and their reconstructions."""
    rows: list[tuple[str, int, Tensor]] = []
    if audit.exposure is not None:
        members = audit.audited.members
        places = {int(i): place for place, i in enumerate(members.ids.tolist())}
        rows += [("exposed", i, members.inputs[places[i]]) for i in audit.exposure.ids]
    if audit.shared_inputs is not None:
        rows += [("shared", place, picture) for place, picture in enumerate(audit.shared_inputs)]
        for attack in audit.shared:
            if attack.reconstructions is not None:
                rows += [
                    (f"found {attack.name}", place, picture) for place, picture in enumerate(attack.reconstructions)
                ]
    return {
        "kind": [kind for kind, _, _ in rows],
        "place": np.array([place for _, place, _ in rows], dtype=np.int64),
        "values": [picture.detach().float().cpu().flatten().numpy() for _, _, picture in rows],
    }


def _records(audit: ModelAudit, report: AuditReport) -> list[tuple[Record, dict[str, Any]]]:
    """Returns the leaderboard records: utility, and a record per attack, whether it ran or not."""
    contents = json_values([report.groups, report.model, report.data])
    digest = digest_of_bytes(json.dumps(contents, sort_keys=True).encode())
    content = {
        "data": report.data.name,
        "model": report.model.architecture,
        "private": len(audit.audited.members),
        "non_members": len(audit.audited.non_members),
        "parameters": sum(p.numel() for p in audit.audited.model.parameters()),
        "digest": digest,
    }
    claim = RecordedClaim(
        epsilon=None,
        delta=audit.settings.delta_of_bounds,
        relation="add_remove",
        sampling="unknown",
        accountant="none",
        reason="the model was trained elsewhere: no step of it was executed here, so nothing is proved of it",
    )
    common: dict[str, Any] = {
        "suite": "audit",
        "suite_digest": digest,
        "defense": MethodUsed(name=DEFENSE, settings={}),
        "task": TrainingTask(content),
        "claim": claim,
        "seed": audit.settings.seed,
        "device": report.device,
        "provenance": library(),
        "flags": ("distribution_shift",) if audit.shift.found else (),
    }
    utility = Record(
        id=_id(digest, "utility"),
        kind="utility",
        metrics={"accuracy": audit.accuracy["non_members"]},
        seconds=0.0,
        **common,
    )
    members = audit.audited.members.ids.cpu()
    return [(utility, {}), *((_record(outcome, common), _columns(outcome, members)) for outcome in audit.outcomes)]


def _record(outcome: AttackOutcome, common: Mapping[str, Any]) -> Record:
    attack = MethodUsed(name=outcome.name, settings=dict(outcome.settings))
    return Record(
        id=_id(common["suite_digest"], json.dumps([attack.name, attack.settings], sort_keys=True)),
        kind="membership",
        attack=attack,
        requires=outcome.requires or None,
        metrics=outcome.metrics,
        status="ok" if outcome.scores is not None else "failed" if outcome.failed else "skipped",
        reason=outcome.why_not or None,
        seconds=round(outcome.seconds, 3),
        **common,
    )


def _columns(outcome: AttackOutcome, members: Tensor) -> dict[str, Any]:
    """Returns the arrays beside an attack's record: its scores with ids and membership; empty if it did not run."""
    if outcome.scores is None:
        return {}
    ids = outcome.scores.ids.cpu()
    member = torch.isin(ids, members)
    return {"id": ids.numpy(), "score": outcome.scores.scores.cpu().numpy(), "member": member.numpy()}


def _id(digest: str, measurement: str) -> str:
    return hashlib.sha256(f"audit {digest} {measurement}".encode()).hexdigest()[:32]


def _device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({platform.machine()})"
