"""Report of an audit as files: `audit.json` with all numbers, scores and pictures as Parquet, leaderboard records.

The page and the Markdown summary are rendered from these files alone (`leakbench.leaderboard.page.checkpoint`), so they
can be rendered again from the folder.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from leakbench.leaderboard.records.files import digest_of_bytes, write_bytes
from leakbench.leaderboard.records.record import MethodUsed, Record, RecordedClaim, write

from ..run.arrays import write_arrays
from ..run.provenance import library
from .model.audit import ModelAudit
from .model.findings import EpsilonBound

SCHEMA = "leakbench-audit/1"

DEFENSE = "trained elsewhere"
"""Name of the defense in the records of a model that was trained elsewhere."""

DOCUMENT, SCORES, PICTURES = "audit.json", "scores.parquet", "pictures.parquet"


def document(found: ModelAudit, about: Mapping[str, Any], names: Mapping[int, str] | None = None) -> dict[str, Any]:
    """Returns the whole report as plain JSON values.

    Args:
        found: the audit.
        about: sections that the command adds: `model`, `data`, `preflight`, `claim`, `transcript`, `rules`,
            `not_tested`, `command`.
        names: maps ids to the owner's ids of examples; None to show the ids themselves.
    """
    bound, shape = found.bound, list(found.audited.members.inputs.shape[1:])
    exposed = found.exposure
    origin = library()
    return {
        "schema": SCHEMA,
        "verdict": found.verdict.to_dict(),
        "groups": {
            "members": len(found.audited.members),
            "non_members": len(found.audited.non_members),
            "population": 0 if found.audited.population is None else len(found.audited.population),
            "input_shape": shape,
            "input_range": [found.audited.world.low, found.audited.world.high],
            "classes": found.audited.classes,
            "split": found.settings.split,
        },
        "accuracy": {name: asdict(metric) for name, metric in found.accuracy.items()},
        "attacks": [
            {
                "name": one.name,
                "settings": dict(one.settings),
                "requires": dict(one.requires),
                "metrics": {name: asdict(metric) for name, metric in one.metrics.items()},
                "why_not": one.why_not,
                "failed": one.failed,
                "seconds": round(one.seconds, 3),
            }
            for one in found.outcomes
        ],
        "strongest": [asdict(one) | {"found": one.found} for one in found.strongest],
        "epsilon": bound.to_dict() if isinstance(bound, EpsilonBound) else {"why_not": bound},
        "shift": found.shift.to_detail()
        | {"found": found.shift.found, "words": found.shift.words if found.shift.found else ""},
        "exposure": None
        if exposed is None
        else {
            "attack": exposed.attack,
            "nobody": exposed.nobody,
            "examples": [
                {"id": i, "name": (names or {}).get(i, str(i)), "label": y, "score": s, "false_positive_rate": a}
                for i, y, s, a in zip(exposed.ids, exposed.labels, exposed.scores, exposed.above, strict=True)
            ],
            "classes": {str(kind): asdict(metric) for kind, metric in exposed.classes.items()},
        },
        "gradients": {
            "ranks": found.ranks if isinstance(found.ranks, str) else [one.to_dict() for one in found.ranks],
            "attacks": [
                {
                    "name": one.name,
                    "settings": dict(one.settings),
                    "psnr": list(one.psnr),
                    "why_not": one.why_not,
                    "seconds": round(one.seconds, 3),
                }
                for one in found.shared
            ],
        },
        "settings": {
            "delta": found.settings.delta,
            "level": found.settings.level,
            "seed": found.settings.seed,
        },
        "provenance": asdict(origin),
        "claim": None if found.settings.claim is None else found.settings.claim.to_dict(),
        "device": _device(found.audited.members.inputs.device),
        **about,
    }


def write_report(
    found: ModelAudit, about: Mapping[str, Any], folder: Path, names: Mapping[int, str] | None = None
) -> dict[str, Any]:
    """Writes the report's files, the document last: once it exists, all other files do.

    Args:
        found: the audit.
        about: see `document`.
        folder: created if absent.
        names: see `document`.

    Returns:
        The document.
    """
    table = _scores(found, names or {})
    path, digest = write_arrays(table, folder, Path(SCORES).stem)
    pictures, picture_digest = write_arrays(_pictures(found), folder, Path(PICTURES).stem)
    told = document(found, about, names) | {"files": {path.name: digest, pictures.name: picture_digest}}
    for record, columns in _records(found, about, told):
        if columns:
            arrays, own = write_arrays(columns, folder / "records", record.id)
            record = Record(**{**_fields(record), "arrays": arrays.name, "arrays_digest": own})
        write(record, folder / "records")
    write_bytes(folder / DOCUMENT, (json.dumps(told, indent=1, allow_nan=False) + "\n").encode())
    return told


def _scores(found: ModelAudit, names: Mapping[int, str]) -> dict[str, Any]:
    """Returns the score table, a row per candidate: id, membership, label, the score of every attack that ran."""
    groups = (found.audited.members, found.audited.non_members)
    ids = torch.cat([group.ids for group in groups]).cpu()
    order = ids.argsort()
    labels = torch.cat([group.labels for group in groups]).cpu()[order]
    member = torch.isin(ids[order], found.audited.members.ids.cpu())
    columns: dict[str, Any] = {
        "id": ids[order].numpy(),
        "name": [names.get(int(i), str(int(i))) for i in ids[order]],
        "member": member.numpy(),
        "label": labels.numpy(),
    }
    for one in found.outcomes:
        if one.scores is not None:
            own = one.scores.ids.cpu().argsort()
            columns[f"score_{one.name}"] = one.scores.scores.cpu()[own].double().numpy()
    return columns


def _pictures(found: ModelAudit) -> dict[str, Any]:
    """Returns the page's pictures: the most exposed members, inputs of shared gradients and their reconstructions."""
    rows: list[tuple[str, int, Tensor]] = []
    if found.exposure is not None:
        members = found.audited.members
        places = {int(i): place for place, i in enumerate(members.ids.tolist())}
        rows += [("exposed", i, members.inputs[places[i]]) for i in found.exposure.ids]
    if found.shared_inputs is not None:
        rows += [("shared", place, one) for place, one in enumerate(found.shared_inputs)]
        for attack in found.shared:
            if attack.found is not None:
                rows += [(f"found {attack.name}", place, one) for place, one in enumerate(attack.found)]
    return {
        "kind": [kind for kind, _, _ in rows],
        "place": np.array([place for _, place, _ in rows], dtype=np.int64),
        "values": [one.detach().float().cpu().flatten().numpy() for _, _, one in rows],
    }


def _records(
    found: ModelAudit, about: Mapping[str, Any], told: Mapping[str, Any]
) -> list[tuple[Record, dict[str, Any]]]:
    """Returns the leaderboard records: utility, and a record per attack, whether it ran or not."""
    digest = digest_of_bytes(
        json.dumps([told["groups"], about.get("model"), about.get("data")], sort_keys=True).encode()
    )
    model = about.get("model", {})
    task = {
        "data": str(about.get("data", {}).get("name", "user data")),
        "model": str(model.get("architecture", type(found.audited.model).__name__)),
        "private": len(found.audited.members),
        "non_members": len(found.audited.non_members),
        "parameters": sum(p.numel() for p in found.audited.model.parameters()),
        "digest": digest,
    }
    claim = RecordedClaim(
        epsilon=None,
        delta=found.settings.delta_of_bounds,
        relation="add_remove",
        sampling="unknown",
        accountant="none",
        reason="the model was trained elsewhere: no step of it was executed here, so nothing is proved of it",
    )
    common: dict[str, Any] = {
        "suite": "audit",
        "suite_digest": digest,
        "defense": MethodUsed(name=DEFENSE, settings={}),
        "task": task,
        "claim": claim,
        "seed": found.settings.seed,
        "device": told["device"],
        "provenance": library(),
    }
    flags = ["distribution_shift"] if found.shift.found else []
    made = [
        (
            Record(
                id=_id(digest, "utility"),
                kind="utility",
                metrics={"accuracy": found.accuracy["non_members"]},
                seconds=0.0,
                flags=tuple(flags),
                **common,
            ),
            {},
        )
    ]
    for one in found.outcomes:
        columns: dict[str, Any] = {}
        if one.scores is not None:
            ids = one.scores.ids.cpu()
            member = torch.isin(ids, found.audited.members.ids.cpu())
            columns = {"id": ids.numpy(), "score": one.scores.scores.cpu().numpy(), "member": member.numpy()}
        record = Record(
            id=_id(digest, json.dumps([one.name, dict(one.settings)], sort_keys=True)),
            kind="membership",
            attack=MethodUsed(name=one.name, settings=dict(one.settings)),
            requires=dict(one.requires) or None,
            metrics=one.metrics,
            status="ok" if one.scores is not None else "failed" if one.failed else "skipped",
            reason=one.why_not or None,
            seconds=round(one.seconds, 3),
            flags=tuple(flags),
            **common,
        )
        made.append((record, columns))
    return made


def _fields(record: Record) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


def _id(digest: str, what: str) -> str:
    return hashlib.sha256(f"audit {digest} {what}".encode()).hexdigest()[:32]


def _device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({platform.machine()})"
