"""Records published in a repository: byte for byte in a folder for each suite, without their largest arrays.

Arrays that are left out were compared with their records before, and are listed (`records.left_out`). A suite's folder
is replaced as a whole, and an equal folder is not written to.
"""

import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ..records.files import digest_of_bytes, read_bytes, refuse_links, write_bytes
from ..records.left_out import LEAST, ArraysLeftOut, LeftOut
from ..records.left_out import SUFFIX as LEFT_OUT
from ..records.record import read
from ..records.validation import RecordError, parse_json
from .check import CheckedFolder, Recompute, examine
from .fault import Fault, Severity
from .limits import LIMITS, MIB
from .listing import ARRAYS, RECORD, listed
from .suites import KnownSuites
from .text import PATH, printable, text_faults

MOST = 2 * MIB
"""Bytes of the largest arrays that are published, unless the publisher sets another limit."""

_SEARCH = re.compile(r"[0-9a-f]{16,128}\.json")


class PublishError(RecordError):
    """Folders that cannot be published; nothing was written.

    Attributes:
        faults: of all folders, of all severities; files are prefixed by their folder.
    """

    def __init__(self, faults: Sequence[Fault]) -> None:
        self.faults = tuple(faults)
        refused = [fault for fault in faults if fault.severity == "refused"]
        more = f", and {len(refused) - 1} more" if len(refused) > 1 else ""
        super().__init__(f"nothing was published: {refused[0]}{more}")


@dataclass(frozen=True, kw_only=True)
class Published:
    """Folder of a suite.

    Attributes:
        suite: name.
        folder: with its files.
        state: of the folder before: absent, equal, or replaced by other files.
        records: number of records.
        bytes: of all files.
        left_out: number of arrays that were left out.
        changes: replaced records in words; empty without a change.
        faults: that are flagged.
    """

    suite: str
    folder: Path
    state: Literal["new", "unchanged", "replaced"]
    records: int
    bytes: int
    left_out: int
    changes: str
    faults: tuple[Fault, ...]


def publish(
    results: Sequence[Path],
    out: Path,
    *,
    most: int = MOST,
    known: KnownSuites | None = None,
    recompute: Callable[[Path], Recompute] | None = None,
    failed_control: Severity = "refused",
) -> list[Published]:
    """Publishes folders of records, each of a single suite.

    Args:
        results: outputs of runs.
        out: folder of the suites' folders.
        most: bytes of the largest arrays that are published.
        known: suites of this version, with which requests are compared; None to skip that.
        recompute: returns for a folder the comparison of a record's numbers with those of its arrays; None to skip it.
        failed_control: severity of a measured control that does not show what it must.

    Returns:
        The suites' folders, in the order of their results.

    Raises:
        PublishError: a fault that keeps a file off a board, or a path of a machine.
        RecordError: two folders are of one suite, or the folder of a suite in `out` has other files.
        WriteError: the disk is full, or the system reports another error.
    """
    if most < LEAST:
        raise ValueError(f"arrays of up to {LEAST} bytes must lie beside their records, got a limit of {most}")
    refuse_links(out)
    contents: dict[str, dict[str, bytes | Path]] = {}
    faults: list[Fault] = []
    for folder in results:
        checked = examine(
            folder, None if recompute is None else recompute(folder), known=known, failed_control=failed_control
        )
        of_searches = list(_faults_of_searches(folder))
        faults += [_located(fault, folder) for fault in (*checked.faults, *of_searches)]
        if not checked.refused:
            suite = _suite_of(checked, folder)
            if suite in contents:
                raise RecordError(f"results of suite {suite} are given twice; publish those of one run")
            contents[suite] = _content(folder, checked, most)
    if any(fault.severity == "refused" for fault in faults):
        raise PublishError(faults)
    drafts: dict[str, Path] = {}
    try:
        for suite, content in contents.items():
            _refuse_others(out / suite)
            # A folder in `out` is in the same file system, where renaming is whole or not at all.
            draft = drafts[suite] = _beside(out / suite)
            for name, source in content.items():
                write_bytes(draft / name, source if isinstance(source, bytes) else read_bytes(source))
        published = {suite: _compared(suite, draft, out / suite, failed_control) for suite, draft in drafts.items()}
        for suite, draft in drafts.items():
            if published[suite].state != "unchanged":
                _put(draft, out / suite)
    finally:
        for draft in drafts.values():
            shutil.rmtree(draft, ignore_errors=True)
    return list(published.values())


def _located(fault: Fault, folder: Path) -> Fault:
    # A check flags paths; a repository is public, so they are refused.
    severity = "refused" if fault.problem.startswith(PATH) else fault.severity
    return replace(fault, file=f"{printable(str(folder))}/{fault.file}", severity=severity)


def _suite_of(checked: CheckedFolder, folder: Path) -> str:
    """Name of the suite of a folder, which is that of its published folder."""
    suites = sorted({manifest.suite for manifest in checked.manifests.values()})
    if len(suites) != 1:
        raise RecordError(f"{folder} must have the records of a single suite, got {printable(', '.join(suites))}")
    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,59}", suites[0]):
        raise RecordError(f"a suite's name must be of a-z, 0-9, _ and - to be a folder's, got {printable(suites[0])!r}")
    return suites[0]


def _searches(folder: Path) -> Iterator[Path]:
    """Yields the searches for settings of a run, without the points that they tried."""
    tuning = folder / "tuning"
    refuse_links(tuning)
    if tuning.is_dir():
        yield from (path for path in sorted(tuning.iterdir()) if _SEARCH.fullmatch(path.name))


def _faults_of_searches(folder: Path) -> Iterator[Fault]:
    for path in _searches(folder):
        file = f"tuning/{path.name}"
        try:
            yield from text_faults(parse_json(read_bytes(path).decode()), file, LIMITS)
        except (ValueError, RecursionError):
            yield Fault(file=file, field="", problem="it is not a whole JSON document")


def _content(folder: Path, checked: CheckedFolder, most: int) -> dict[str, bytes | Path]:
    """Returns the files of a published folder, by their path in it."""
    names = listed(folder, LIMITS).names
    content: dict[str, bytes | Path] = {f"tuning/{path.name}": path for path in _searches(folder)}
    # Lists of a folder that is published again name arrays that stay left out.
    omitted = {arrays.name: arrays for earlier in checked.left_out.values() for arrays in earlier.arrays}
    digests = {record.arrays: record.arrays_digest for record in checked.records.values()}
    for suffix, own in names.items():
        for name in own if suffix != LEFT_OUT else ():
            path = checked.folder / name
            size = path.stat().st_size
            if suffix == ARRAYS and size > most:
                omitted[name] = ArraysLeftOut(name=name, bytes=size, sha256=digests[name] or "")
                continue
            omitted.pop(name, None)
            content[f"records/{name}"] = path
    if omitted:
        left_out = LeftOut(arrays=tuple(omitted[name] for name in sorted(omitted)))
        content[f"records/{left_out.name}"] = left_out.content
    return content


def _refuse_others(folder: Path) -> None:
    """Raises RecordError if a suite's folder has files that would be lost."""
    refuse_links(folder)
    others = (
        [path.name for path in folder.iterdir() if path.name not in ("records", "tuning")] if folder.exists() else []
    )
    if others:
        raise RecordError(f"{folder} must have records and tuning alone, and has {printable(others[0])}; move it")


def _beside(folder: Path) -> Path:
    return folder.absolute().parent / f".{folder.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp"


def _compared(suite: str, draft: Path, folder: Path, failed_control: Severity) -> Published:
    """Checks a draft as it will be published, and compares it with the folder that it replaces."""
    checked = examine(draft, failed_control=failed_control)
    if checked.refused:
        raise PublishError([_located(fault, folder) for fault in checked.faults])
    new, old = _digests(draft), _digests(folder)
    state = "unchanged" if new == old else "replaced" if old else "new"
    return Published(
        suite=suite,
        folder=folder,
        state=state,
        records=len(checked.records),
        bytes=sum(path.stat().st_size for path in draft.rglob("*") if path.is_file()),
        left_out=sum(len(left_out.arrays) for left_out in checked.left_out.values()),
        changes=_changes(new, old, draft, folder) if state == "replaced" else "",
        faults=tuple(checked.faults),
    )


def _digests(folder: Path) -> dict[str, str]:
    paths = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return {path.relative_to(folder).as_posix(): digest_of_bytes(read_bytes(path)) for path in paths}


def _changes(new: Mapping[str, str], old: Mapping[str, str], draft: Path, folder: Path) -> str:
    """Returns the records that are added, removed and changed, and the code of both sides, in words."""
    after, before = ({name for name in side if name.endswith(RECORD)} for side in (new, old))
    changed = {name for name in after & before if new[name] != old[name]}
    counts = f"{len(after - before)} added, {len(before - after)} removed, {len(changed)} changed"
    return f"records and searches: {counts}; code {_code(folder)} -> {_code(draft)}"


def _code(folder: Path) -> str:
    """Commits of the records of a folder, in words."""
    commits = set()
    for path in (folder / "records").glob(f"*{RECORD}"):
        try:
            commits.add((read(path).provenance.commit or "unknown")[:12])
        except RecordError:  # of another version, which is replaced
            commits.add("unreadable")
    return ", ".join(sorted(commits)) or "none"


def _put(draft: Path, folder: Path) -> None:
    """Puts a draft into its place, and then removes the folder that it replaces."""
    if not folder.exists():
        draft.rename(folder)
        return
    old = _beside(folder)
    folder.rename(old)
    try:
        draft.rename(folder)
    except OSError:
        old.rename(folder)
        raise
    shutil.rmtree(old)
