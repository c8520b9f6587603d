"""Rows of submissions as they will stand beside a published board, and the drift of the rows that both have."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from ..board.notes import alarms
from ..board.rows import CONTROL_FAILED, Row
from ..board.table import Board
from ..kinds import KINDS
from ..records.fields import Metric
from ..records.folder import Completeness, read_folder
from ..records.labels import key_of, public
from ..records.manifest import Expected, Manifest
from ..records.record import Record
from .agreement import Agreement, fresh_seeds_agree
from .attack_cells import AttackCell, attack_cells, attack_table
from .check import CheckedSubmission

R = TypeVar("R", Record, Expected)

DIGITS = 8
"""Digits of its digest by which a submission is named, if its handle has several of a suite."""


@dataclass(frozen=True)
class BoardRows:
    """Board of submissions beside a published board.

    Attributes:
        text: both for a terminal, with the drift.
        board: the board as JSON values; None without rows.
        drift: for each submission and cell that a published board has under other seeds, how they compare.
        attacks: path of a submission of an attack -> the attack's own numbers, beside the strongest other attack's.
    """

    text: str
    board: dict[str, Any] | None = None
    drift: list[dict[str, Any]] = field(default_factory=list)
    attacks: dict[str, tuple[AttackCell, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class NamedRecords:
    """Records and requests that a submission adds to a board, their defenses named with its handle."""

    records: tuple[Record, ...]
    manifests: tuple[Manifest, ...]


def rows_beside(submissions: Sequence[CheckedSubmission], published: Path | None) -> BoardRows:
    """Returns the rows that submissions add to a board.

    Defenses get the handle before their name, because the numbers are the submitter's, and the start of the digest if
    the handle has several submissions of the suite. A submission whose control failed has no rank.

    Args:
        submissions: those that count.
        published: folder of published records, in `records/` folders at any depth; None for none.

    Raises:
        RecordError: a published record is bad.
    """
    if not submissions:
        return BoardRows("no submission counts, so there is no row to show")
    suites = {record.suite for checked in submissions for record in checked.records}
    old, manifests = _published(published, suites)
    board = beside(
        Board.from_records(old, Completeness(tuple(manifests))) if old else None, named_records(submissions, old)
    )
    drift = [line for checked in submissions for line in drift_lines(checked, old)]
    attacks = {checked.path: cells for checked in submissions if (cells := attack_cells(checked))}
    place = f"beside {published}" if old else "beside no published board: none has these suites"
    differing = [line for line in drift if line["verdict"] == "differs"]
    lines = [board.to_text(), *board.of_submissions, f"rows of {len(submissions)} submissions {place}"]
    if old:
        lines.append(f"drift: {len(differing)} of {len(drift)} numbers of the suite's own methods differ")
        lines += [f"  {d['submission']}: {d['cell']}, {d['metric']}: {d['reason']}" for d in differing]
    lines += [attack_table(path, cells) for path, cells in attacks.items()]
    return BoardRows("\n".join(lines), board.to_dict(), drift, attacks)


def named_records(submissions: Sequence[CheckedSubmission], published: Sequence[Record]) -> Mapping[str, NamedRecords]:
    """Returns the records that each submission adds to a board, by its path.

    Args:
        submissions: those that count.
        published: records of the board.
    """
    names, published_ids = _names(submissions), {record.id for record in published}
    named = {}
    for checked in submissions:
        name = names[checked.path]
        requests = [replace(m, cells=tuple(_named(checked, cell, name) for cell in m.cells)) for m in checked.manifests]
        # Cells at a suite's own seeds, as of checkpoints, may be published already, and stay as they are there.
        own = {record.id for record in checked.own}
        shown = [record for record in checked.records if record.id in own or record.id not in published_ids]
        records = tuple(_flagged(checked, _named(checked, record, name)) for record in shown)
        ids = {record.id for record in records}
        manifests = tuple(replace(m, cells=tuple(cell for cell in m.cells if cell.id in ids)) for m in requests)
        named[checked.path] = NamedRecords(records, manifests)
    return named


def beside(published: Board | None, named: Mapping[str, NamedRecords]) -> Board:
    """Returns a board with the rows of submissions, each of which is compared and ranked within its own submission.

    Seeds of a submission are its own, and so may be its attacks: in a comparison with others, either would take the
    ranks of all rows of the suite, and anybody could do that by a submission. Its controls judge its own rows alone
    (`CONTROL_FAILED`): they neither vouch for a published board nor raise its alarm.

    Args:
        published: board of published records; None without any.
        named: of `named_records`.
    """
    submitted = {
        path: Board.from_records(n.records, Completeness(n.manifests)) for path, n in named.items() if n.records
    }
    boards = [*([published] if published is not None else []), *submitted.values()]
    vouched = [published] if published is not None else boards
    return Board(
        rows=tuple(sorted((row for board in boards for row in board.rows), key=Row.order)),
        controls=tuple(control for board in vouched for control in board.controls),
        violations=tuple(violation for board in vouched for violation in board.violations),
        unranked=tuple(record for board in boards for record in board.unranked),
        gaps=tuple(dict.fromkeys(gap for board in vouched for gap in board.gaps)),
        active=tuple(result for board in boards for result in board.active),
        of_submissions=tuple(
            f"Submission {path}: {sentence}"
            for path, board in (submitted.items() if published is not None else ())
            for sentence in alarms(board.controls, board.violations, board.gaps, of="its rows")
        ),
    )


def as_submitted(record: Record, handle: str, digest: str) -> Record:
    """Returns the record of a submission as its file has it: without the handle, and the flag of a failed control.

    Args:
        record: of `named_records`.
        handle: of the submission.
        digest: of its request.
    """
    name = submitted_name(record.defense.name, handle, digest)
    flags = tuple(flag for flag in record.flags if flag != CONTROL_FAILED)
    return replace(record, defense=replace(record.defense, name=name), flags=flags)


def submitted_name(name: str, handle: str, digest: str) -> str:
    """Returns the name of a defense without the handle that `named_records` puts before it.

    Args:
        name: of the defense.
        handle: of the submission.
        digest: of its request.
    """
    return name.removeprefix(f"{handle}/").removeprefix(f"{digest[:DIGITS]}/")


def _published(published: Path | None, suites: set[str]) -> tuple[list[Record], list[Manifest]]:
    records: list[Record] = []
    manifests: list[Manifest] = []
    folders = sorted(path for path in published.rglob("records") if path.is_dir()) if published is not None else []
    for path in folders:
        folder = read_folder(path)
        records += [record for record in folder.records if record.suite in suites]
        manifests += [m for m in folder.complete.manifests or () if m.suite in suites]
    return records, manifests


def _names(submissions: Sequence[CheckedSubmission]) -> dict[str, str]:
    """Returns the prefix of the rows of each submission, by its path: the handle, with the digest if it has several.

    Two requests of one handle are two methods, or two draws of seeds, which would otherwise be averaged in a row.
    """
    handles = Counter((checked.folder.parent.name, _suite(checked)) for checked in submissions)
    return {
        checked.path: handle if handles[handle, _suite(checked)] < 2 else f"{handle}/{checked.digest[:DIGITS]}"
        for checked in submissions
        if (handle := checked.folder.parent.name)
    }


def _suite(checked: CheckedSubmission) -> str:
    return checked.declaration.suite if checked.declaration is not None else ""


def _flagged(checked: CheckedSubmission, record: Record) -> Record:
    """Returns a record, flagged if a control of its submission failed."""
    return replace(record, flags=(*record.flags, CONTROL_FAILED)) if checked.failed_control else record


def _named(checked: CheckedSubmission, cell: R, name: str) -> R:
    """Returns a record or cell whose defense is named with the handle."""
    if checked.declaration is None:
        return cell
    return replace(cell, defense=replace(cell.defense, name=f"{name}/{cell.defense.name}"))


def drift_lines(checked: CheckedSubmission, old: Iterable[Record]) -> list[dict[str, Any]]:
    """Returns comparisons of the suite's own methods in a submission with the published ones, by their seeds.

    Args:
        checked: submission.
        old: published records.
    """
    if checked.declaration is None:
        return []
    method = checked.declaration.method
    foreign = {record.id for record in checked.own} if method is not None else set()
    mine = _by_cell(record for record in checked.records if record.id not in foreign)
    theirs = _by_cell(old)
    both = sorted(mine.keys() & theirs.keys())
    lines = []
    for key in both:
        first = mine[key][0]
        metric = KINDS[first.kind].main
        agreement: Agreement = fresh_seeds_agree(
            _metrics(theirs[key], metric), _metrics(mine[key], metric), looks=len(both)
        )
        cell = f"{first.defense.name} x {first.attack.name if first.attack else first.kind}"
        lines.append({"submission": checked.path, "cell": cell, "metric": metric, **asdict(agreement)})
    return lines


def _by_cell(records: Iterable[Record]) -> dict[str, list[Record]]:
    cells: dict[str, list[Record]] = {}
    for record in records:
        if record.status == "ok":
            attack = record.attack and asdict(record.attack)
            task = public(record.task)
            key = (record.suite, record.kind, record.control, asdict(record.defense), dict(record.budget), attack, task)
            cells.setdefault(key_of(key), []).append(record)
    return cells


def _metrics(records: Iterable[Record], name: str) -> list[Metric]:
    return [record.metrics[name] for record in records if name in record.metrics]
