"""Results folder of a run: its records, each checked against the digest of its arrays, and its missing cells.

A record whose arrays are missing, cut or altered counts as failed, with a sentence that says so: its numbers can no
longer be recomputed, so they are not shown. So does a record that differs from the manifest's cell of its id, or that
shares its arrays with another seed. Numbers whose arrays were left out of published records (`left_out`) are shown with
a flag, unless they ought to be verified. Standard library only.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from .files import digest_of_bytes, read_bytes
from .left_out import FLAG, REASON, Coverage, read_coverage
from .manifest import Expected, Manifest, contradicted_fields, missing_from, read_manifests
from .record import Record, folder_of, read_all
from .validation import RecordError

ScoreCheck = Callable[[Record, Path], str]
"""(record, folder) -> sentence on how the record's numbers differ from its scores; empty if they agree."""

ArraysKey = tuple[str, str | None]
"""Id of a record and digest of its arrays: records of strangers may have any id."""

ArraysFolder = Path | Mapping[ArraysKey, Path]
"""Folder of the arrays of all records, or that of each record, for records of several folders."""


@dataclass(frozen=True)
class Completeness:
    """Manifests of a results folder, which list the cells that ought to have a record.

    Attributes:
        manifests: requests; None if there are none, so that completeness is unknown.
        results: folder named in the command that computes missing cells.
    """

    manifests: tuple[Manifest, ...] | None = None
    results: Path = Path("results")

    @property
    def known(self) -> bool:
        """True if there is any manifest."""
        return bool(self.manifests)

    def missing(self, records: Iterable[Record]) -> list[tuple[Manifest, list[Expected]]]:
        """Returns the requested cells without a record, by request."""
        return missing_from(self.manifests or (), (record.id for record in records))

    def uncovered(self, records: Iterable[Record]) -> list[Record]:
        """Returns the records that no manifest lists; the rest of their run is unknown."""
        requested = {cell.id for manifest in self.manifests or () for cell in manifest.cells}
        return [record for record in records if record.id not in requested]


def folders_below(path: Path) -> list[Path]:
    """Returns the folders of records in a folder of published suites, by name; any other path by itself.

    Args:
        path: of records, or of published suites: with a README and folders that have `records/`, and nothing else.
    """
    if path.is_symlink() or not path.is_dir() or (path / "records").exists():
        return [path]
    entries = [entry for entry in sorted(path.iterdir()) if entry.name != "README.md"]
    suites = all(
        not entry.is_symlink() and not entry.name.startswith(".") and (entry / "records").is_dir() for entry in entries
    )
    return entries if entries and suites else [path]


@dataclass(frozen=True)
class Folder:
    """Contents of a results folder.

    Attributes:
        records: ordered by id; a record whose arrays are missing or altered counts as failed and has no numbers.
        complete: manifests that list the records that ought to exist.
        path: folder of records and arrays.
    """

    records: list[Record]
    complete: Completeness
    path: Path


def read_folder(results: str | os.PathLike[str], verify: ScoreCheck | None = None) -> Folder:
    """Reads a folder of results and checks every record against its cell in a manifest, and its arrays.

    Args:
        results: output of the run, with its records in `records/`, or that folder itself.
        verify: compares a record's numbers with those recomputed from its scores; None to skip that.

    Raises:
        RecordError: as `read_all`, or a bad manifest or list of left out arrays.
    """
    path = folder_of(results)
    manifests = tuple(read_manifests(path))
    cells = {cell.id: (manifest.suite, cell) for manifest in manifests for cell in manifest.cells}
    read, records = read_all(results), []
    copies, coverage = copied_arrays(read), read_coverage(path)
    for record in read:
        if record.id in cells and (fault := _cell_fault(record, *cells[record.id])):
            records.append(spoiled(_in_its_cell(record, *cells[record.id]), fault))
            continue
        left_out = is_left_out(record, path, coverage)
        fault = copies.get(record.id) or ("" if left_out else arrays_fault(record, path))
        if left_out and not fault:
            record = replace(record, flags=tuple(dict.fromkeys((*record.flags, FLAG))))
            if verify is not None:
                fault = f"{REASON}, so its numbers cannot be computed again"
        elif not fault and verify is not None and record.status == "ok":
            fault = verify(record, path)
        records.append(spoiled(record, fault) if fault else record)
    # `--out` is the folder above `records/`, so the command that an incomplete board prints must name it too.
    out = path.parent if path.name == "records" else path
    return Folder(records, Completeness(manifests, out), path)


def arrays_key(record: Record) -> ArraysKey:
    """Returns the key of a record's folder among those of several."""
    return record.id, record.arrays_digest


def arrays_path(record: Record, folder: ArraysFolder) -> Path:
    """Returns the path of a record's arrays.

    Args:
        record: that names arrays.
        folder: of its arrays.
    """
    return (folder if isinstance(folder, Path) else folder[arrays_key(record)]) / (record.arrays or "")


def _cell_fault(record: Record, suite: str, cell: Expected) -> str:
    """Reason why a record cannot be that of the manifest's cell of its id; empty if it can."""
    requested = {name: getattr(cell, name) for name in ("kind", "control", "seed", "budget")}
    methods = {"defense": asdict(cell.defense), "attack": None if cell.attack is None else asdict(cell.attack)}
    return "; ".join(contradicted_fields(record, requested | methods | {"suite": suite}))


def _in_its_cell(record: Record, suite: str, cell: Expected) -> Record:
    """Returns the record with the fields of its cell, so that a control that was edited still counts as a control."""
    record = replace(record, suite=suite, control=cell.control, defense=cell.defense, seed=cell.seed)
    # The attack and the budget of another kind might not fit the record's task.
    return replace(record, attack=cell.attack, budget=dict(cell.budget)) if record.kind == cell.kind else record


def copied_arrays(records: Iterable[Record]) -> dict[str, str]:
    """Returns, by id, the reason why records of several seeds are one run; splits and scores differ between seeds."""
    seeds: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        # Arrays of other kinds may be equal by chance, as the label of a batch of one example, and so may scores from
        # labels alone, of two models that are right on the same candidates.
        labels_only = record.requires is not None and record.requires.access == "LABEL_ONLY"
        if record.arrays_digest is not None and record.kind in ("membership", "canaries") and not labels_only:
            seeds.setdefault((record.kind, record.arrays_digest), []).append(record)
    faults = {}
    for equal in seeds.values():
        for record in equal:
            copies = [copy for copy in equal if copy.seed != record.seed]
            if copies:
                faults[record.id] = f"its arrays are those of record {copies[0].id}, of seed {copies[0].seed}"
    return faults


def is_left_out(record: Record, folder: Path, coverage: Coverage) -> bool:
    """True if a record's arrays are not beside it, and a list of left out arrays names them."""
    path = folder / (record.arrays or "")
    return coverage.of(record) is not None and not path.exists() and not path.is_symlink()


def arrays_fault(record: Record, folder: Path) -> str:
    """Reason why a record's arrays are missing or altered; empty if they are intact, or the record names none."""
    if record.arrays is None or record.arrays_digest is None:
        return ""
    path = folder / record.arrays
    # `exists` is False for a dangling link, which is refused below with the sentence about links.
    if not path.exists() and not path.is_symlink():
        return f"its arrays {record.arrays} are not beside it"
    try:
        content = read_bytes(path, "arrays")
    except RecordError as error:
        return str(error)
    if digest_of_bytes(content) != record.arrays_digest:
        return f"its arrays {record.arrays} are not those that it was written with: cut or altered"
    return ""


def spoiled(record: Record, fault: str) -> Record:
    """Returns the record as failed, without its numbers: the scores behind them are gone."""
    # Claim and settings stay, so the row still names the lost cell and counts it against its rank.
    return replace(record, status="failed", reason=fault, metrics={}, arrays=None, arrays_digest=None)
