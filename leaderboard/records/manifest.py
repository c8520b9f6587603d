"""Manifest of a run: every cell of the resolved suite, written beside the records before anything is computed.

Without it, an interrupted run would look like a complete run that never tried a strong attack. Each request has its own
file, named by its content, so a folder may hold several: part of a suite and then the whole, two suites, or runs of
several machines copied into a folder. The folder ought to hold the cells of all of them. Standard library only.
"""

import dataclasses
import functools
import json
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..kinds import KINDS, ControlRole
from .fields import MethodUsed, check_kind
from .files import digest_of_bytes, read_bytes, write_bytes
from .labels import key_of, public
from .record import Record
from .task import TrainingTask, UpdateTask
from .validation import RecordError, build, conform, json_values

SCHEMA = 2
SUFFIX = ".manifest"


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Cell of a request, which a complete folder has a record of.

    Attributes:
        id: of its record.
        kind: of its record.
        control: role as a control; None for a contestant.
        defense: with complete settings.
        attack: the same; None for utility.
        budget: as requested.
        training: task as requested; values that depend on the data are None.
        noise: variant, if its kind has several (`KindOfResult.variants`); None otherwise.
        secure: whether the run uses secure noise (`--secure-noise`); such cells have a row of their own.
        seed: of the cell.
        skip: reason why it cannot be run; empty if it can.
    """

    id: str
    kind: str
    control: ControlRole | None
    defense: MethodUsed
    attack: MethodUsed | None
    budget: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    noise: str | None = None
    secure: bool = False
    seed: int
    skip: str = ""

    def __post_init__(self) -> None:
        conform(self)
        check_kind(self.kind)
        names = [variant.name for variant in KINDS[self.kind].variants]
        if self.noise is not None and self.noise not in names:
            raise RecordError(f"noise must be one of {', '.join(names) or 'none at all'}, got {self.noise!r}")

    @property
    def words(self) -> str:
        """Cell in words, without its seed."""
        control = f" ({self.control} control)" if self.control else ""
        noise = KINDS[self.kind].noise_words(self.noise)
        return f"{self.defense.name}{control} x {self.attack.name if self.attack else self.kind}{noise}"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Request of a run.

    Attributes:
        schema: version of this layout.
        suite: name.
        suite_digest: of the suite file.
        command: that made the request, word by word, without the results folder.
        cells: all cells of the request.
    """

    schema: int = SCHEMA
    suite: str
    suite_digest: str
    command: tuple[str, ...]
    cells: tuple[Expected, ...]

    def __post_init__(self) -> None:
        conform(self)
        if self.schema != SCHEMA:
            raise RecordError(f"schema must be {SCHEMA} for this version of the code, got {self.schema}")

    @functools.cached_property  # digests of ten thousand cells take seconds
    def name(self) -> str:
        """File name: the suite's digest and a digest of the manifest's own content, which exposes later edits."""
        # Sorted keys, so that the name depends on the content and not on the file's layout.
        content = json.dumps(dataclasses.asdict(self), sort_keys=True).encode()
        return f"{self.suite_digest[:16]}-{digest_of_bytes(content)[:16]}{SUFFIX}"

    def command_for(self, results: Path) -> str:
        """Shell command that computes the missing cells."""
        return shlex.join([*self.command, "--out", str(results)])


def write_manifest(manifest: Manifest, folder: Path) -> Path:
    """Writes a request beside the records.

    Args:
        manifest: request to write.
        folder: of the records.

    Returns:
        The path of its file.
    """
    path = folder / manifest.name
    content = json.dumps(dataclasses.asdict(manifest), indent=1).encode() + b"\n"
    # A resumed run makes the same request; the file is left as it is, with its modification time.
    if path.is_file() and not path.is_symlink() and path.read_bytes() == content:
        return path
    return write_bytes(path, content)


def read_manifests(folder: Path) -> list[Manifest]:
    """Reads every manifest of a folder of records, by name; empty if there is none.

    Raises:
        RecordError: a bad manifest, which the message names.
    """
    return [_read(path) for path in sorted(folder.glob(f"*{SUFFIX}")) if not path.name.startswith(".")]


def _read(path: Path) -> Manifest:
    try:
        manifest = build(Manifest, json.loads(read_bytes(path, "manifest")))
    # A thousand nested brackets exhaust the stack of `json`. RecordError is a ValueError.
    except (ValueError, RecursionError) as error:
        raise RecordError(f"bad manifest {path}: {error}; delete it and run its suite again") from None
    if manifest.name != path.name:
        raise RecordError(f"bad manifest {path}: it was edited after it was written; delete it and run its suite again")
    return manifest


def missing_from(manifests: Iterable[Manifest], recorded: Iterable[str]) -> list[tuple[Manifest, list[Expected]]]:
    """Returns the requested cells that have no record.

    Args:
        manifests: of a folder.
        recorded: ids of its records, of any status.

    Returns:
        Each request that lacks cells, with these cells; a cell is listed once, and requests that add nothing are left
        out.
    """
    known, incomplete = set(recorded), []
    # Largest first: its command computes the rest too.
    for manifest in sorted(manifests, key=lambda manifest: (-len(manifest.cells), manifest.name)):
        # A cell missing from two requests is listed under the larger, whose command computes it.
        lacks = [cell for cell in manifest.cells if cell.id not in known]
        known |= {cell.id for cell in lacks}
        if lacks:
            incomplete.append((manifest, lacks))
    return incomplete


def contradicted_fields(record: Record, cell: Mapping[str, Any]) -> list[str]:
    """Returns the fields in which a record differs from its cell, in words.

    Args:
        record: of the cell's id.
        cell: values by field of the record, as in JSON.
    """
    # Only these fields: the metrics are most of a record, and a board has ten thousand of them.
    content = {key: json_values(getattr(record, key)) for key in cell}  # where dataclasses are dictionaries
    return [f"its {key} is not that of its cell" for key, value in cell.items() if not equal_json(content[key], value)]


def equal_json(a: Any, b: Any) -> bool:
    """True if values are equal in JSON, in which a tuple is a list and true is not 1."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(equal_json(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(equal_json, a, b))
    return isinstance(a, bool) == isinstance(b, bool) and a == b


def belongs(cell: Expected, suite: str, record: Record, task: TrainingTask | UpdateTask) -> bool:
    """Returns whether a missing cell's record would be in the same board row as another record.

    Args:
        cell: without a record.
        suite: name of the cell's suite.
        record: of the row.
        task: of the row, resolved.
    """
    mine = (suite, cell.defense.name, cell.defense.settings, cell.budget, cell.control, cell.secure)
    row = (record.suite, record.defense.name, record.defense.settings, record.budget, record.control)
    if key_of(mine) != key_of((*row, record.noise == "secure")):
        return False
    # None stands for values that depend on the data. A row without a training has the task of its shared update, with
    # which a training's task cannot be compared.
    requested_task = {key: value for key, value in public(cell.training).items() if value is not None}
    return isinstance(task, UpdateTask) or all(
        key_of(task.get(key, value)) == key_of(value) for key, value in requested_task.items()
    )
