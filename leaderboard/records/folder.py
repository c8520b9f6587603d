"""Results folder of a run: its records, each checked against the digest of its arrays, and the cells that it lacks.

A record whose arrays are missing, cut or altered counts as one that failed, with the sentence that says so: its numbers
can no longer be computed again, so they are not shown. Standard library only.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from .files import digest_of_bytes, read_bytes
from .manifest import Expected, Manifest, missing_from, read_manifests
from .record import Record, folder_of, read_all
from .validation import RecordError

ScoreCheck = Callable[[Record, Path], str]
"""(record, folder) -> in a sentence, where its numbers are not those of its scores; empty where they are."""


@dataclass(frozen=True)
class Completeness:
    """The manifests beside the records, which say which cells ought to have one.

    Attributes:
        manifests: what was asked for; None where nothing says it, so that completeness is unknown.
        results: the folder, for the command that computes what is missing.
    """

    manifests: tuple[Manifest, ...] | None = None
    results: Path = Path("results")

    @property
    def known(self) -> bool:
        """Whether there is any manifest."""
        return bool(self.manifests)

    def missing(self, records: Iterable[Record]) -> list[tuple[Manifest, list[Expected]]]:
        """What was asked for and has no record, by request."""
        return missing_from(self.manifests or (), (record.id for record in records))

    def uncovered(self, records: Iterable[Record]) -> list[Record]:
        """Records that no request asked for, so that nobody knows what else belongs to them."""
        asked = {cell.id for manifest in self.manifests or () for cell in manifest.cells}
        return [record for record in records if record.id not in asked]


@dataclass(frozen=True)
class Folder:
    """What lies in a folder of results.

    Attributes:
        records: in the order of their ids; one whose arrays are missing or altered has failed and has no numbers.
        complete: the manifests that say which records ought to be there.
        path: where records and arrays lie.
    """

    records: list[Record]
    complete: Completeness
    path: Path


def read_folder(results: str | os.PathLike[str], verify: ScoreCheck | None = None) -> Folder:
    """Reads a folder of results and checks every record's arrays.

    Args:
        results: the run's output, with its records in `records/`, or that folder itself.
        verify: also recomputes numbers from scores.

    Raises:
        RecordError: as `read_all`, or a bad manifest.
    """
    path = folder_of(results)
    records = []
    for record in read_all(results):
        fault = arrays_fault(record, path)
        if not fault and verify is not None and record.status == "ok":
            fault = verify(record, path)
        records.append(spoiled(record, fault) if fault else record)
    # `--out` names the folder above `records/`, and so must the command that an incomplete board prints.
    out = path.parent if path.name == "records" else path
    return Folder(records, Completeness(tuple(read_manifests(path)), out), path)


def arrays_fault(record: Record, folder: Path) -> str:
    """Why the arrays beside a record are not those that it was written with; empty where they are, or it names none."""
    if record.arrays is None or record.arrays_digest is None:
        return ""
    path = folder / record.arrays
    # A dangling link does not exist either, and is refused below with the sentence about links.
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
    """The record as one that failed, without its numbers: the scores that they were computed from are gone."""
    # Metrics go, claim and settings stay: the row still says which cell is lost, and counts it against its rank.
    return replace(record, status="failed", reason=fault, metrics={}, arrays=None, arrays_digest=None)
