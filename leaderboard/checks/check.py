"""Check of a folder of records before its numbers join a board.

The folder may come from a stranger: nothing in it is executed or followed, sizes are limited before a file is read, and
a bad file is a fault by its name, beside which the others are checked all the same. A seal is a checksum, so figures
that were forged and sealed again contradict one another here, or their arrays where `recompute` is given.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..board.controls import check_controls
from ..board.rows import rows_from
from ..kinds import JUDGED, KINDS
from ..metrics import METRICS
from ..records.folder import Completeness
from ..records.left_out import REASON, Coverage, LeftOut
from ..records.left_out import SUFFIX as LEFT_OUT
from ..records.manifest import SUFFIX as MANIFEST
from ..records.manifest import Manifest
from ..records.record import Record
from .cells import against_cell, doubled, requested_faults, unit_faults
from .fault import Fault, Severity
from .figures import figure_faults
from .files import arrays_faults, read_left_out, read_manifest, read_record
from .limits import LIMITS, Limits
from .listing import ARRAYS, RECORD, listed
from .suites import KnownSuites, checkpoint_faults, suite_faults
from .text import printable

CONTROLS = "controls"
"""Field of faults of controls."""

Recompute = Callable[[Record, Path], str]
"""(record, folder of its arrays) -> sentence on how its numbers differ from its arrays; empty if they agree."""


@dataclass
class CheckedFolder:
    """Contents of a folder that can be read, and the faults of all of it.

    Attributes:
        records: valid by themselves, by their path below the checked folder.
        manifests: the same.
        left_out: lists of arrays that are not beside their records, the same.
        faults: ordered by file and field.
        folder: of the records.
    """

    folder: Path
    records: dict[str, Record] = field(default_factory=dict)
    manifests: dict[str, Manifest] = field(default_factory=dict)
    left_out: dict[str, LeftOut] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)

    @property
    def refused(self) -> bool:
        """True if a fault keeps a file off a board."""
        return any(fault.severity == "refused" for fault in self.faults)


def check_folder(folder: Path, recompute: Recompute | None = None) -> list[Fault]:
    """Returns the faults of a folder of records, ordered by file and field; empty for a clean one.

    Args:
        folder: output of a run, with its records in `records/`, or that folder itself.
        recompute: compares a record's numbers with those of its arrays; None to skip that.

    Raises:
        RecordError: no such folder, or it is a symbolic link.
    """
    return examine(folder, recompute).faults


def examine(
    folder: Path,
    recompute: Recompute | None = None,
    *,
    known: KnownSuites | None = None,
    limits: Limits = LIMITS,
    failed_control: Severity = "refused",
    left_out: Severity = "flagged",
) -> CheckedFolder:
    """Reads and checks a folder of records.

    Args:
        folder: output of a run, with its records in `records/`, or that folder itself.
        recompute: compares a record's numbers with those of its arrays; None to skip that.
        known: suites of this version, with which requests are compared; None to skip that.
        limits: of sizes.
        failed_control: severity of a measured control that does not show what it must; a control that is missing or was
            not measured is refused.
        left_out: severity of arrays that were left out of published records, by a list beside them.

    Raises:
        RecordError: no such folder, or it is a symbolic link.
    """
    listing = listed(folder, limits)
    checked = CheckedFolder(listing.folder, faults=[*listing.faults])
    prefix = listing.prefix
    for name in listing.names[MANIFEST]:
        manifest, faults = read_manifest(listing.folder / name, prefix + name, limits)
        checked.faults += faults
        if manifest is not None:
            checked.manifests[prefix + name] = manifest
    for name in listing.names[LEFT_OUT]:
        arrays_list, faults = read_left_out(listing.folder / name, prefix + name, limits)
        checked.faults += faults
        if arrays_list is not None and not faults:
            checked.left_out[prefix + name] = arrays_list
    coverage = Coverage(checked.left_out.values())
    # Before the records, which take memory, because the suites' cells take much of it for a while.
    manifests = checked.manifests
    suites = {} if known is None else dict(zip(manifests, known(list(manifests.values())), strict=True))
    cells = {cell.id: (manifest, cell) for manifest in checked.manifests.values() for cell in manifest.cells}
    arrays, existing = set(listing.names[ARRAYS]), set()
    for name in listing.names[RECORD]:
        file = prefix + name
        existing.add(Path(name).stem)
        read = read_record(listing.folder / name, file, limits)
        checked.faults += read.faults
        record = read.record
        if record is None or read.data is None or Path(name).stem != record.id:
            continue
        checked.records[file] = record
        checked.faults += figure_faults(record, file)
        if record.id in cells:
            checked.faults += against_cell(read.data, *cells[record.id], file)
        if record.arrays in arrays:
            faults = arrays_faults(record, listing.folder, prefix, limits)
            if not faults and recompute is not None and record.status == "ok":
                problem = recompute(record, listing.folder)
                faults = [Fault(file=file, field=_recomputed(problem), problem=printable(problem, 400))] * bool(problem)
            checked.faults += faults
        elif (omitted := coverage.of(record)) is not None:
            problem = f"{REASON} ({omitted.bytes} bytes), so its numbers cannot be computed again here"
            checked.faults.append(Fault(file=file, field="arrays", problem=problem, severity=left_out))
        elif record.arrays is not None:
            problem = f"its arrays {printable(record.arrays)} are not beside it"
            checked.faults.append(Fault(file=file, field="arrays", problem=problem))
    for name in sorted(arrays - {f"{identifier}{ARRAYS}" for identifier in existing}):
        checked.faults.append(Fault(file=prefix + name, field="", problem="no record beside it names these arrays"))
    checked.faults += _of_the_lists(checked, arrays)
    checked.faults += _of_the_whole(checked, existing, prefix, failed_control)
    checked.faults += suite_faults(checked.manifests, list(checked.records.values()), suites)
    checked.faults += checkpoint_faults(
        checked.records, {suite.digest: suite.checkpoints for suite in suites.values() if suite is not None}
    )
    checked.faults.sort()
    return checked


def _recomputed(problem: str) -> str:
    """Field that a sentence of `Recompute` is about."""
    match = re.match(r"(?:the (\w+) of )?its ([\w.]+) is (?!epsilon)", problem)
    if match is None or match.group(2) not in METRICS:
        return "claim" if re.match(r"its (epsilon|delta|noise|claim)|the \w+ of its claim", problem) else "metrics"
    return f"metrics.{match.group(2)}" + (f".detail.{match.group(1)}" if match.group(1) else "")


def _of_the_lists(checked: CheckedFolder, beside: set[str]) -> Iterator[Fault]:
    """Yields the entries of lists of left out arrays that contradict the records, or the arrays beside them."""
    records = {record.arrays: record for record in checked.records.values()}
    for file, arrays_list in checked.left_out.items():
        for i, arrays in enumerate(arrays_list.arrays):
            if arrays.name not in records:
                yield Fault(file=file, field=f"arrays[{i}]", problem=f"no record beside it names {arrays.name}")
            elif problem := arrays.contradiction(records[arrays.name]):
                yield Fault(file=file, field=f"arrays[{i}].{problem.split()[0]}", problem=problem)
            elif arrays.name in beside:
                problem = f"{arrays.name} is beside its record, and was not left out; publish its run again"
                yield Fault(file=file, field=f"arrays[{i}]", problem=problem, severity="flagged")


def _of_the_whole(checked: CheckedFolder, existing: set[str], prefix: str, failed_control: Severity) -> list[Fault]:
    """Returns the faults of records beside one another and of the requests."""
    records = list(checked.records.values())
    files = {record.id: file for file, record in checked.records.items()}
    place = prefix.rstrip("/") or "."
    if not existing:
        return [Fault(file=place, field="", problem="there is no record in it")]
    if not checked.manifests:
        problem = "there is no manifest in it, so what was requested is unknown; add that of its run"
        return [Fault(file=place, field="", problem=problem), *doubled(records, files), *unit_faults(records, files)]
    faults = requested_faults(checked.manifests, records, existing, files)
    repeated = doubled(records, files)
    return [*faults, *repeated, *unit_faults(records, files), *_controls(checked, records, repeated, failed_control)]


def _controls(
    checked: CheckedFolder, records: Sequence[Record], repeated: Sequence[Fault], failed: Severity
) -> list[Fault]:
    """Returns the controls that are missing or do not show what they must."""
    twice = {fault.file for fault in repeated if not fault.field}
    measured = [record for file, record in checked.records.items() if file not in twice]
    suites = {manifest.suite: file for file, manifest in checked.manifests.items()}
    requested = {m.suite for m in checked.manifests.values() for cell in m.cells if cell.control in JUDGED}
    faults = [*_unrequested(checked, suites)]
    try:
        complete = Completeness(tuple(checked.manifests.values()))
        results = check_controls(rows_from(measured, complete), measured)
    except Exception as error:  # records of strangers may be valid by themselves and make no board
        return [
            *faults,
            Fault(file="", field=CONTROLS, problem=f"no board can be made: {printable(str(error), 400)}"),
        ]
    for result in results:
        suite = max((s for s in suites if result.name.startswith(s)), key=len, default="")
        if not result.ok and suite in requested:
            problem = f"{result.name}: it must show {result.expected}, and shows {result.measured}"
            severity = "refused" if result.measured.startswith("nothing") else failed
            faults.append(Fault(file=suites[suite], field=CONTROLS, problem=printable(problem, 400), severity=severity))
    return faults


def _unrequested(checked: CheckedFolder, suites: Mapping[str, str]) -> Iterator[Fault]:
    """Yields the controls that no request has: a suite may do without any, and not without a single one."""
    cells = [(manifest.suite, cell) for manifest in checked.manifests.values() for cell in manifest.cells]
    for suite, file in suites.items():
        kinds = {cell.kind for name, cell in cells if name == suite and not cell.skip}
        controls = {(cell.kind, cell.control) for name, cell in cells if name == suite and cell.control in JUDGED}
        if any(KINDS[kind].controls for kind in kinds) and not controls:
            problem = "it requests no controls, so nothing shows that its attacks work and its splits are fair"
            yield Fault(file=file, field=CONTROLS, problem=problem, severity="flagged")
        lacking = [(kind, role) for kind in kinds for role in KINDS[kind].controls if (kind, role) not in controls]
        for kind, role in lacking if controls else ():
            problem = f"it requests no {role} control of {kind} beside its other controls; run the whole suite"
            yield Fault(file=file, field=CONTROLS, problem=problem)
