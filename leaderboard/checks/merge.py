"""Folders of records merged into one: byte-identical copies, whole or not at all.

Several machines compute parts of a suite, and a board needs one folder. The same record in two folders is one record;
two records of one cell are a conflict, because a choice between them would choose a result.
"""

import os
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..records.files import digest_of_bytes, read_bytes, write_bytes
from ..records.validation import RecordError
from .check import CheckedFolder, examine
from .fault import Fault
from .limits import LIMITS, Limits
from .listing import listed
from .suites import KnownSuites
from .text import printable


class MergeError(RecordError):
    """Folders that cannot be merged; nothing was written.

    Attributes:
        faults: of all folders; files are prefixed by their folder, or are those of the merged folder.
    """

    def __init__(self, faults: Sequence[Fault]) -> None:
        self.faults = tuple(faults)
        refused = [fault for fault in faults if fault.severity == "refused"]
        more = f", and {len(refused) - 1} more" if len(refused) > 1 else ""
        super().__init__(f"nothing was merged: {refused[0]}{more}; see leakbench leaderboard check")


@dataclass(frozen=True)
class Merged:
    """Merged folder.

    Attributes:
        folder: with the files in `records/`.
        checked: its contents, and faults that are flagged.
        copies: number of files that more than one of the folders had.
    """

    folder: Path
    checked: CheckedFolder
    copies: int


def merge(folders: Sequence[Path], out: Path, *, known: KnownSuites | None = None, limits: Limits = LIMITS) -> Merged:
    """Merges folders of records.

    Cells that one folder lacks may be in another, so requests, controls and duplicates are checked on the whole.

    Args:
        folders: outputs of runs, or their folders of records.
        out: new folder; it must not exist, or be empty.
        known: suites of this version, with which requests are compared; None to skip that.
        limits: of sizes, for each folder and for the whole.

    Raises:
        MergeError: a conflict, or a fault that keeps a file off a board.
        RecordError: no such folder, or `out` is not new.
        WriteError: the disk is full, or the system reports another error.
    """
    if out.is_symlink() or (out.exists() and not (out.is_dir() and not any(out.iterdir()))):
        raise RecordError(f"out must be a new or empty folder, and {out} is not; name another")
    sources, faults, copies = _sources(folders, limits)
    if faults:
        raise MergeError(faults)
    if not sources:
        raise RecordError(f"there is no record in {', '.join(map(str, folders))}")
    # A folder beside `out` is in the same file system, where renaming is whole or not at all.
    draft = out.absolute().parent / f".{out.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp"
    try:
        for name, path in sources.items():
            write_bytes(draft / "records" / name, read_bytes(path))
        checked = examine(draft, known=known, limits=limits)
        if checked.refused:
            raise MergeError([_located(fault, sources) for fault in checked.faults])
        if out.is_dir():
            out.rmdir()
        draft.rename(out)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return Merged(out, replace(checked, folder=out / "records"), copies)


def _sources(folders: Sequence[Path], limits: Limits) -> tuple[dict[str, Path], list[Fault], int]:
    """Returns the files by name, conflicts and entries that are refused unread, and the number of equal files."""
    sources: dict[str, Path] = {}
    faults, digests, copies = [], {}, 0
    for folder in folders:
        listing = listed(folder, limits)
        faults += [replace(fault, file=f"{printable(str(folder))}/{fault.file}") for fault in listing.faults]
        for name in (name for names in listing.names.values() for name in names):
            path = listing.folder / name
            digest = digest_of_bytes(read_bytes(path))
            if digests.setdefault(name, digest) == digest:
                copies += name in sources
                sources.setdefault(name, path)
            else:
                problem = f"it differs from {printable(str(sources[name]))}, of the same cell; remove one of the two"
                faults.append(Fault(file=printable(str(path)), field="", problem=problem))
    return sources, faults, copies


def _located(fault: Fault, sources: dict[str, Path]) -> Fault:
    """Returns a fault of the merged folder with the path of the file that was given."""
    path = sources.get(fault.file.removeprefix("records/"))
    return fault if path is None else replace(fault, file=printable(str(path)))
