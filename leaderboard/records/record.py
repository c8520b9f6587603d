"""Record of a suite's cell: the run, its claim and its measurements, or the reason why there are none.

Boards show nothing but these files, so a record is validated when it is made and again when it is read, and a file is
written whole or not at all. JSON has no infinity: an infinite epsilon is null with its reason, and a metric that could
not be measured is null with its reason, never 0. Standard library only.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..kinds import KINDS, ControlRole
from .fields import (
    MethodUsed,
    Metric,
    Provenance,
    RecordedClaim,
    RecordedRequirements,
    Reported,
    RequestedBudget,
    check_kind,
    known_metric,
)
from .files import digest_of_bytes, read_bytes, refuse_links, write_bytes
from .task import TrainingTask, UpdateTask, task_of
from .validation import RecordError, build, conform, json_values, parse_json

__all__ = [
    "SCHEMA",
    "MethodUsed",
    "Metric",
    "Provenance",
    "Record",
    "RecordError",
    "RecordedClaim",
    "RecordedRequirements",
    "Reported",
    "RequestedBudget",
    "read",
    "read_all",
    "write",
]

# Plain mappings are accepted too: `conform` gives them their type.
if TYPE_CHECKING:
    AnyTask = TrainingTask | UpdateTask
    AnyBudget = RequestedBudget
    AnyRequirements = RecordedRequirements
else:
    AnyTask = TrainingTask | UpdateTask | Mapping[str, Any]
    AnyBudget = RequestedBudget | Mapping[str, Any]
    AnyRequirements = RecordedRequirements | Mapping[str, Any]

SCHEMA = 2

DOES_NOT_APPLY = "does not apply: "
"""Prefix, after the attack's name, of the reason of a skipped record whose attack was called and refused: the network
or the release is outside its scope. Other skipped attacks were never called, for example because an extra is
missing."""

ADDED: dict[str, Any] = {"changes": []}
"""Defaults of fields that older records of this schema lack."""

SEAL = "seal"
"""Key of the SHA-256 over the rest of a record's file: it exposes numbers edited by hand."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """Cell of a suite: a defense, at most one attack, a task, a seed. `leaderboard/README.md` explains all fields."""

    schema: int = SCHEMA
    id: str
    suite: str
    suite_digest: str
    kind: str
    control: ControlRole | None = None
    defense: MethodUsed
    attack: MethodUsed | None = None
    task: AnyTask
    budget: AnyBudget = field(default_factory=lambda: RequestedBudget({}))
    requires: AnyRequirements | None = None
    claim: RecordedClaim | None = None
    noise_multiplier: float | None = None
    noise: Literal["none", "seeded", "os", "secure"] = "none"
    metrics: dict[str, Metric] = field(default_factory=dict)
    status: Literal["ok", "skipped", "failed"] = "ok"
    reason: str | None = None
    seed: int
    engine: str | None = None
    device: str
    provenance: Provenance
    seconds: float
    flags: tuple[str, ...] = ()
    reported: tuple[Reported, ...] = ()
    changes: tuple[str, ...] = ()
    arrays: str | None = None
    arrays_digest: str | None = None

    @property
    def attack_refused(self) -> bool:
        """True if the attack was called and answered that it does not apply."""
        words = f"{self.attack.name if self.attack else ''} {DOES_NOT_APPLY}"
        return self.status == "skipped" and (self.reason or "").startswith(words)

    @property
    def active_server(self) -> bool:
        """True if its attacker chose the model that a client trained from, and is ranked with no honest one."""
        requires = self.requires
        return requires is not None and ("MODEL" in requires.controls or requires.access == "ACTIVE_SERVER")

    def __post_init__(self) -> None:
        object.__setattr__(self, "task", task_of(self.kind, self.task))
        conform(self)
        if self.schema != SCHEMA:
            raise RecordError(f"schema must be {SCHEMA} for this version of the code, got {self.schema}")
        # The id names the record's file; lower case, because some file systems do not distinguish `A` and `a`.
        if not re.fullmatch(r"[0-9a-f]{16,128}", self.id):
            raise RecordError(f"id must be 16 or more hexadecimal digits in lower case, got {self.id!r}")
        if not self.suite:
            raise RecordError("suite must not be empty, got ''")
        check_kind(self.kind)
        kind = KINDS[self.kind]
        if (self.attack is not None) != kind.attacked:
            without = " or ".join(unattacked.name for unattacked in KINDS.values() if not unattacked.attacked)
            raise RecordError(f"attack must be null in {without} records only, got kind {self.kind!r}")
        if self.status != "ok" and not self.reason:
            raise RecordError(f"reason must be given when status is {self.status!r}, got nothing")
        if self.status == "ok" and not self.metrics:
            raise RecordError("metrics must not be empty when status is 'ok', got none")
        # Only for measured records: a cell may fail before its task is resolved.
        if self.status == "ok" and kind.variants and kind.variant(noise := self.task.noise) is None:
            names = " or ".join(repr(variant.name) for variant in kind.variants)
            raise RecordError(f"task.noise must be {names} here, got {noise!r}")
        if self.noise_multiplier is not None and self.noise_multiplier < 0:
            raise RecordError(f"noise_multiplier must not be negative, got {self.noise_multiplier}")
        if self.seconds < 0:
            raise RecordError(f"seconds must not be negative, got {self.seconds}")
        # Readers join the name to the record's directory, so it must not lead elsewhere.
        if self.arrays is not None and not re.fullmatch(r"\w[\w.-]*", self.arrays):
            raise RecordError(f"arrays must be the name of a file beside the record, got {self.arrays!r}")
        if (self.arrays is None) != (self.arrays_digest is None):
            raise RecordError(f"arrays and arrays_digest must come together, got {self.arrays} without the other")
        if self.arrays_digest is not None and not re.fullmatch(r"[0-9a-f]{64}", self.arrays_digest):
            raise RecordError(f"arrays_digest must be a SHA-256 in hexadecimal digits, got {self.arrays_digest!r}")
        metrics = {name: known_metric(name, metric, self.kind) for name, metric in self.metrics.items()}
        object.__setattr__(self, "metrics", metrics)

    def to_json(self) -> str:
        """Returns the record as an indented JSON document, which `from_json` reads back equal."""
        content = json_values(self)
        return json.dumps(content | {SEAL: _seal(content)}, indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str, *, source: str = "") -> "Record":
        """Parses a record.

        Args:
            text: the JSON document.
            source: path of the file, for the message.

        Returns:
            The validated record.

        Raises:
            RecordError: torn JSON, a missing or unknown key, a wrong type or schema, NaN or infinity, or a file edited
            after it was written.
        """
        try:
            try:
                data = parse_json(text)
            except RecordError:
                raise
            except (ValueError, RecursionError) as error:
                raise RecordError(f"not a whole JSON document ({error}); delete it and run again") from None
            return cls.from_values(data)
        except (RecordError, RecursionError) as error:
            raise RecordError(f"bad record {source}: {error}" if source else f"bad record: {error}") from None

    @classmethod
    def from_values(cls, data: Any) -> "Record":
        """Builds a record from its parsed JSON document.

        Args:
            data: of `parse_json`; unchanged.

        Raises:
            RecordError: as `from_json`; the message begins with the field, where it is about a field.
        """
        schema = data.get("schema", SCHEMA) if isinstance(data, dict) else SCHEMA
        if schema != SCHEMA:  # checked before the keys, which differ between schemas
            raise RecordError(
                f"schema must be {SCHEMA} for this version of the code, got {schema!r}; compute it again by "
                "leakbench run with --recompute, or show it with the version that wrote it"
            )
        content = {key: value for key, value in data.items() if key != SEAL} if isinstance(data, dict) else data
        record = build(cls, ADDED | content if isinstance(content, dict) else content)
        # The seal has no secret: it exposes edits by hand, not a forger who computes it anew.
        if data.get(SEAL) != _seal(content):
            raise RecordError("it was edited after it was written; compute it again by leakbench run --recompute")
        return record


def write(record: Record, directory: str | os.PathLike[str]) -> Path:
    """Writes `<id>.json` atomically: a reader sees the old file or the whole new file, even after a power cut.

    Args:
        record: record to write.
        directory: folder of the file; created if absent.

    Returns:
        The path of the file.

    Raises:
        WriteError: the file cannot be written, for example on a full disk.
    """
    return write_bytes(Path(directory) / f"{record.id}.json", record.to_json().encode())


def read(path: str | os.PathLike[str]) -> Record:
    """Reads a record file.

    Args:
        path: a file named `<id>.json`.

    Returns:
        The validated record.

    Raises:
        RecordError: the file is absent, torn or not a record, or its name is not the record's id.
    """
    path = Path(path)
    try:
        text = read_bytes(path, "record").decode()
    except UnicodeDecodeError:
        raise RecordError(f"bad record {path}: not UTF-8 text; delete it and run again") from None
    record = Record.from_json(text, source=str(path))
    # A copy under another name would be counted twice.
    if path.stem != record.id:
        raise RecordError(f"bad record {path}: its id is {record.id}; name it {record.id}.json or delete it")
    return record


def folder_of(directory: str | os.PathLike[str]) -> Path:
    """Returns the folder with the records of a run.

    Args:
        directory: output of the run, with its records in `records/`, or that folder itself.

    Raises:
        RecordError: no such directory, or `records` is a symbolic link.
    """
    folder = Path(directory)
    refuse_links(folder / "records")
    if (folder / "records").is_dir():
        folder = folder / "records"
    if not folder.is_dir():
        raise RecordError(f"no results in {folder}: there is no such directory")
    return folder


def read_all(directory: str | os.PathLike[str]) -> list[Record]:
    """Reads every record of a run; `folder.read_folder` also checks them against their arrays and manifests.

    Args:
        directory: output of the run, with its records in `records/`, or that folder itself.

    Returns:
        At least one record, ordered by id.

    Raises:
        RecordError: no such directory, no record in it, or a bad record, which the message names.
    """
    folder = folder_of(directory)
    # Names that start with a dot are drafts of an interrupted `write`.
    paths = sorted(path for path in folder.glob("*.json") if not path.name.startswith("."))
    if not paths:
        raise RecordError(f"no records in {folder}; run a suite with this directory as its output first")
    return [read(path) for path in paths]


def _seal(content: dict[str, Any]) -> str:
    """Digest of a record's content, independent of the layout of its file."""
    return digest_of_bytes(json.dumps(content, sort_keys=True, allow_nan=False).encode())
