"""Records of a folder against its requests and one another: removed, doubled, copied, edited cells; mixed units."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ..kinds import KINDS
from ..records.folder import copied_arrays
from ..records.labels import key_of, public
from ..records.manifest import Expected, Manifest, equal_json
from ..records.record import Record
from .fault import Fault
from .text import printable

DERIVED_SIZES = ("private", "candidates", "non_member", "public")
"""Sizes of a task that a suite may leave to the data: a record has the resolved values."""


def cell_key(record: Record) -> str:
    """Identity of a cell and seed: two records that share it are the same measurement."""
    attack = None if record.attack is None else asdict(record.attack)
    who = (record.suite, asdict(record.defense), dict(record.budget), record.control, record.noise == "secure")
    return key_of((*who, record.kind, attack, public(record.task), record.seed))


def doubled(records: Sequence[Record], files: Mapping[str, str]) -> list[Fault]:
    """Returns a fault for every record of a cell that another record has too.

    Args:
        records: of a folder.
        files: id -> path below the checked folder.
    """
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(cell_key(record), []).append(record)
    faults = []
    for group in groups.values():
        for record in group if len(group) > 1 else ():
            copies = ", ".join(files[copy.id] for copy in group if copy is not record)
            problem = f"its cell and seed are recorded again in {copies}; remove one"
            faults.append(Fault(file=files[record.id], field="", problem=problem))
    for identifier, problem in copied_arrays(records).items():
        faults.append(Fault(file=files[identifier], field="arrays_digest", problem=problem))
    return faults


def against_cell(data: Mapping[str, Any], manifest: Manifest, cell: Expected, file: str) -> list[Fault]:
    """Returns the differences between a record and the cell that its id stands for.

    Args:
        data: the record's JSON document, valid.
        manifest: of the cell.
        cell: with the record's id.
        file: of the record.
    """
    expected: dict[str, Any] = {name: getattr(cell, name) for name in ("kind", "control", "seed", "budget")}
    expected |= {"defense": asdict(cell.defense), "attack": None if cell.attack is None else asdict(cell.attack)}
    expected["suite"] = manifest.suite
    wrong = [name for name, value in expected.items() if not equal_json(data[name], value)]
    task: Mapping[str, Any] = data["task"]
    if not KINDS[cell.kind].own_task and data["status"] == "ok":
        wrong += [
            f"task.{key}"
            for key, value in cell.training.items()
            if key not in DERIVED_SIZES and value is not None and not equal_json(task.get(key), value)
        ]
    if cell.noise is not None and data["status"] == "ok" and task.get("noise") != cell.noise:
        wrong.append("task.noise")
    if cell.secure != (data["noise"] == "secure") and data["status"] == "ok" and data["noise"] != "none":
        wrong.append("noise")
    return [Fault(file=file, field=name, problem="it is not that of the cell that its id stands for") for name in wrong]


def requested_faults(
    manifests: Mapping[str, Manifest], records: Sequence[Record], unread: Iterable[str], files: Mapping[str, str]
) -> list[Fault]:
    """Returns requested cells without a record, records that no request lists, and changed or skipped cells.

    Args:
        manifests: by path below the checked folder.
        records: of the folder, valid.
        unread: ids of records with faults, which exist all the same.
        files: id -> path of its record.
    """
    faults, recorded = [], {record.id: record for record in records}
    existing = {*recorded, *unread}
    cells: dict[str, tuple[Manifest, Expected]] = {}
    for file, manifest in manifests.items():
        for i, cell in enumerate(manifest.cells):
            if cell.id not in existing and not cell.skip and cell.id not in cells:
                problem = f"cell {cell.id} ({cell.words}, seed {cell.seed}) has no record; compute it or say why not"
                faults.append(Fault(file=file, field=f"cells[{i}]", problem=problem))
            cells.setdefault(cell.id, (manifest, cell))
        repeated = [identifier for identifier, n in Counter(cell.id for cell in manifest.cells).items() if n > 1]
        if repeated:
            faults.append(Fault(file=file, field="cells", problem=f"cell {repeated[0]} is requested twice"))
        if not manifest.cells:
            faults.append(Fault(file=file, field="cells", problem="a request must have cells, got none"))
    for record in records:
        file = files[record.id]
        if record.id not in cells:
            problem = "no manifest requests it, so the rest of its run is unknown; add the manifest of its run"
            faults.append(Fault(file=file, field="id", problem=problem))
            continue
        manifest, cell = cells[record.id]
        if record.suite_digest != manifest.suite_digest and not any(
            (request.suite, request.suite_digest) == (record.suite, record.suite_digest)
            for request in manifests.values()
        ):
            problem = "no manifest beside it is of the same suite file: the suite was changed between two runs"
            faults.append(_flagged(file, "suite_digest", problem))
        if record.status == "skipped" and not record.attack_refused and not cell.skip:
            problem = "it is skipped, and its request does not skip the cell; compute it again"
            faults.append(Fault(file=file, field="status", problem=problem))
        if record.status == "failed":
            why = f" ({printable(record.reason, 160)})" if record.reason else ""
            faults.append(_flagged(file, "status", f"it failed{why}, so its row is incomplete; run its suite again"))
    return [*faults, *_changed(manifests, records)]


def _changed(manifests: Mapping[str, Manifest], records: Iterable[Record]) -> Iterator[Fault]:
    """Yields a flag for each suite and set of overrides, at the suite's manifest."""
    files = {manifest.suite: file for file, manifest in manifests.items()}
    counts = Counter((record.suite, record.changes) for record in records if record.changes)
    for (suite, changes), n in counts.items():
        problem = f"{n} of its records are of a changed suite, another experiment: {'; '.join(changes)}"
        yield _flagged(files.get(suite, ""), "changes", printable(problem, 400))


def unit_faults(records: Iterable[Record], files: Mapping[str, str]) -> list[Fault]:
    """Returns records whose claim is about another privacy unit than those of the same training."""
    rows: dict[str, dict[str, list[Record]]] = {}
    for record in records:
        if record.claim is not None and record.status == "ok":
            row = (record.suite, asdict(record.defense), dict(record.budget), record.control)
            task = None if KINDS[record.kind].own_task else record.task.get("federated")
            rows.setdefault(key_of((*row, task)), {}).setdefault(record.claim.unit, []).append(record)
    faults = []
    for units in rows.values():
        if len(units) < 2:
            continue
        usual = max(units, key=lambda unit: len(units[unit]))
        for unit, odd in units.items():
            for record in odd if unit != usual else ():
                problem = f"unit must be one for all records of a row, got {unit!r} beside {usual!r}"
                faults.append(Fault(file=files[record.id], field="claim.unit", problem=problem))
    return faults


def _flagged(file: str, field: str, problem: str) -> Fault:
    return Fault(file=file, field=field, problem=problem, severity="flagged")
