"""CheckpointManifest of a checkpoint: what was trained, its record with the claim, and the digests of all its files.

The record is that of the model's utility in the suite that trained it, so its claim, provenance and flags are written
and checked as those of any record.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from leakbench.leaderboard.records.files import digest_of_bytes
from leakbench.leaderboard.records.record import Record
from leakbench.leaderboard.records.validation import OPTIONAL, CheckedFields, RecordError, build

from .index import ZooEntry, ZooError, check_name, read_limited

MANIFEST = "manifest.json"
WEIGHTS, SPLIT, SHADOWS = "weights.safetensors", "split.json", "shadows.safetensors"
FILES = frozenset({WEIGHTS, SPLIT, SHADOWS})
SCHEMA = 1

MOST_MANIFEST_BYTES = 4 << 20
MOST_FILE_BYTES = 1 << 30
"""Largest file of a checkpoint; a larger one is neither read nor downloaded."""


@dataclass(frozen=True, kw_only=True)
class StoredFile(CheckedFields):
    """Digest and size of a file."""

    sha256: str
    bytes: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if not re.fullmatch(r"[0-9a-f]{64}", self.sha256):
            raise RecordError(f"sha256 must be 64 hexadecimal digits in lower case, got {self.sha256!r}")
        if not 0 < self.bytes <= MOST_FILE_BYTES:
            raise RecordError(f"bytes must be in [1, {MOST_FILE_BYTES}], got {self.bytes}")


@dataclass(frozen=True, kw_only=True)
class StoredShadows(CheckedFields):
    """Shadow models whose outputs are stored.

    Attributes:
        models: number of models; attacks may use the first ones of them.
        views: augmented views of each candidate.
        dtype: of the stored logits.
        checkpoint: name of the checkpoint that has the file; None for this one. A negative control shares the shadow
            models of its defense.
    """

    models: int
    views: int
    dtype: Literal["float16", "float32"]
    checkpoint: str | None = field(default=None, metadata=OPTIONAL)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.checkpoint is not None:
            check_name(self.checkpoint)


@dataclass(frozen=True, kw_only=True)
class CheckpointManifest(CheckedFields):
    """Content of a `manifest.json`.

    Attributes:
        name: of the checkpoint.
        request: canonical form of the training's request, from which its seeds derive.
        record: of the model's utility, as in a folder of records.
        files: by name, all of the folder's but the manifest.
        shadows: None without outputs of shadow models.
    """

    schema: int = SCHEMA
    name: str
    request: dict[str, Any]
    record: dict[str, Any]
    files: dict[str, StoredFile]
    shadows: StoredShadows | None = field(default=None, metadata=OPTIONAL)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.schema != SCHEMA:
            raise RecordError(f"schema must be {SCHEMA} for this version of the code, got {self.schema}")
        check_name(self.name)
        for file in self.files:
            if file not in FILES:
                raise RecordError(f"files must be of {', '.join(sorted(FILES))}, got {file[:200]!r}")
        if missing := {WEIGHTS, SPLIT} - self.files.keys():
            raise RecordError(f"files must have {', '.join(sorted(missing))}, and have none")
        if (SHADOWS in self.files) != (self.shadows is not None and self.shadows.checkpoint is None):
            raise RecordError(f"shadows must be described if and only if {SHADOWS} is in files")

    def stored_record(self) -> Record:
        """Returns the record.

        Raises:
            RecordError: it was edited, or is of another kind or without a claim.
        """
        record = Record.from_json(json.dumps(self.record), source=f"of checkpoint {self.name}")
        if record.status != "ok" or record.kind != "utility" or record.claim is None:
            raise RecordError(f"the record of checkpoint {self.name} must be of its utility, and have a claim")
        return record


def read_manifest(folder: Path, entry: ZooEntry) -> CheckpointManifest:
    """Returns the manifest of a checkpoint whose digest is that of the index.

    Args:
        folder: of the checkpoint.
        entry: its entry.

    Raises:
        RecordError: another digest, a malformed manifest, or none.
    """
    path = folder / MANIFEST
    return parsed(read_limited(path, MOST_MANIFEST_BYTES), entry, str(path))


def parsed(content: bytes, entry: ZooEntry, source: str) -> CheckpointManifest:
    """Returns the manifest in a file's content; the digest is compared before anything is parsed.

    Raises:
        ZooError: another digest, or a malformed manifest.
    """
    if (digest := digest_of_bytes(content)) != entry.pinned.sha256:
        raise ZooError(
            f"{source} must have the SHA-256 {entry.pinned.sha256} of checkpoint {entry.name!r}, got {digest}: it was "
            "changed, or is another's"
        )
    try:
        manifest = build(CheckpointManifest, json.loads(content))
    except (ValueError, RecursionError) as error:
        raise ZooError(f"bad manifest {source}: {error}") from None
    if manifest.name != entry.name:
        raise ZooError(f"{source} must be of checkpoint {entry.name!r}, got {manifest.name!r}")
    return manifest


def read_file(folder: Path, manifest: CheckpointManifest, file: str) -> bytes:
    """Returns a file's content, of the size and digest of the manifest.

    Raises:
        RecordError: as `checked_file`, or a link, a missing or a larger file.
    """
    return checked_file(read_limited(folder / file, manifest.files[file].bytes), manifest, file)


def checked_file(content: bytes, manifest: CheckpointManifest, file: str) -> bytes:
    """Returns a file's content whose digest is that of the manifest.

    Raises:
        ZooError: another digest.
    """
    if (digest := digest_of_bytes(content)) != (pinned := manifest.files[file].sha256):
        raise ZooError(
            f"{file} of checkpoint {manifest.name!r} must have the SHA-256 {pinned} of its manifest, got {digest}: it "
            "was changed, or is another's"
        )
    return content
