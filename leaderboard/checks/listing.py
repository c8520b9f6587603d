"""Files of a checked folder of records, listed without following a link or reading a file."""

import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..records.left_out import SUFFIX as LEFT_OUT
from ..records.manifest import SUFFIX as MANIFEST
from ..records.validation import RecordError
from .fault import Fault
from .limits import Limits
from .text import printable

RECORD, ARRAYS = ".json", ".parquet"
NAMES = {
    RECORD: re.compile(r"[0-9a-f]{16,128}\.json"),
    ARRAYS: re.compile(r"[0-9a-f]{16,128}\.parquet"),
    MANIFEST: re.compile(r"[\w-]{1,64}\.manifest", re.ASCII),
    LEFT_OUT: re.compile(r"[0-9a-f]{16}\.left_out"),
}
"""Names of the files of a folder of records, by suffix. A record's arrays have its name."""


@dataclass(frozen=True)
class Listing:
    """Regular files of a folder of records, within their limits.

    Attributes:
        folder: of the records.
        prefix: path from the checked folder to it, with `/` at its end; empty if it is the checked folder.
        names: by suffix, ordered.
        faults: of all other entries.
    """

    folder: Path
    prefix: str
    names: dict[str, list[str]]
    faults: Sequence[Fault]


def listed(checked: Path, limits: Limits) -> Listing:
    """Lists the records, arrays, manifests and lists of left out arrays of a folder.

    Args:
        checked: output of a run, with its records in `records/`, or that folder itself.
        limits: of sizes.

    Raises:
        RecordError: no such folder, or it is a symbolic link.
    """
    if checked.is_symlink():
        raise RecordError(f"{checked} is a symbolic link, and those are not followed; name where it leads")
    if not checked.is_dir():
        raise RecordError(f"no results in {checked}: there is no such directory")
    names: dict[str, list[str]] = {suffix: [] for suffix in NAMES}
    below = checked / "records"
    if below.is_symlink():
        problem = "it is a symbolic link, and those are not followed; copy the folder"
        return Listing(checked, "", names, [Fault(file="records", field="", problem=problem)])
    folder, prefix = (below, "records/") if below.is_dir() else (checked, "")
    faults, count = [], 0
    total = {True: 0, False: 0}  # bytes of arrays, and of documents
    most = {RECORD: limits.record, ARRAYS: limits.arrays, MANIFEST: limits.manifest, LEFT_OUT: limits.manifest}
    with os.scandir(folder) as entries:
        for entry in entries:
            count += 1
            if count > limits.files:
                problem = f"it must hold at most {limits.files} files, and holds more; check its suites one by one"
                faults.append(Fault(file=prefix.rstrip("/") or ".", field="", problem=problem))
                break
            status = entry.stat(follow_symlinks=False)
            suffix = next((suffix for suffix in NAMES if entry.name.endswith(suffix)), "")
            problem = _problem(entry.name, suffix, status, most.get(suffix, 0))
            together = limits.bytes if suffix == ARRAYS else limits.documents
            if not problem and total[suffix == ARRAYS] + status.st_size > together:
                noun = "arrays" if suffix == ARRAYS else "records and manifests"
                problem = f"all {noun} must be at most {together} bytes together, and this file exceeds it"
            if problem:
                faults.append(Fault(file=prefix + printable(entry.name), field="", problem=problem))
            else:
                total[suffix == ARRAYS] += status.st_size
                names[suffix].append(entry.name)
    return Listing(folder, prefix, {suffix: sorted(own) for suffix, own in names.items()}, faults)


def _problem(name: str, suffix: str, status: os.stat_result, most: int) -> str:
    """Reason why an entry of the folder is not read; empty if it is."""
    if stat.S_ISLNK(status.st_mode):
        return "it is a symbolic link, and those are not followed; copy the file"
    if name.startswith("."):
        return "it is hidden, as the draft of an interrupted run; remove it"
    if stat.S_ISDIR(status.st_mode):
        return (
            "it is a folder, and records lie side by side; move it, or if it is a published suite, move what lies "
            "beside the suites, README.md excepted"
        )
    if not stat.S_ISREG(status.st_mode):
        return "it is no regular file; remove it"
    if not suffix:
        return "it is no record (.json), arrays (.parquet), manifest (.manifest) or list (.left_out); remove it"
    if not NAMES[suffix].fullmatch(name):
        rules = {MANIFEST: "the suite's digest and its own", LEFT_OUT: "16 digits of its digest"}
        rule = rules.get(suffix, "its record's id, 16 or more of 0-9a-f,")
        return f"its name must be {rule} followed by {suffix}"
    if status.st_size > most:
        return f"it must have at most {most} bytes, got {status.st_size}"
    return ""
