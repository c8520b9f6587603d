"""Arrays left out of published records because of their size: lists of their names, sizes and digests.

A repository of records must stay small, and pictures are most of its weight. Records are published as they were
written, so some name arrays that are not beside them: their numbers are shown with a flag, because they cannot be
computed again. Small arrays, thus the scores of most membership tests, may not be left out. Like a manifest, a list is
named by its content, so folders with lists can be merged. Standard library only.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..kinds import KINDS
from .files import digest_of_bytes, read_bytes
from .record import Record
from .validation import CheckedFields, RecordError, build, json_values, parse_json

SCHEMA = 1
SUFFIX = ".left_out"

LEAST = 64 * 1024
"""Bytes above which arrays may be left out."""

FLAG = "arrays_left_out"
"""Flag of a record whose arrays were left out; given while a folder is read."""

REASON = "its arrays were left out of the published records"

_PER_EXAMPLE = ("utility", "membership", "canaries")
"""Kinds whose arrays have a row of at most four numbers for each of the n examples behind their main metric."""

_ROW, _FOOTER = 48, 16 * 1024  # bytes of such a row with its index, and of what Parquet adds to a file


@dataclass(frozen=True, kw_only=True)
class ArraysLeftOut(CheckedFields):
    """Arrays that are not beside their record.

    Attributes:
        name: of the file.
        bytes: its size.
        sha256: its digest, which the record has too.
    """

    name: str
    bytes: int
    sha256: str

    def __post_init__(self) -> None:
        super().__post_init__()
        if not re.fullmatch(r"[0-9a-f]{16,128}\.parquet", self.name):
            raise RecordError(f"name must be a record's id followed by .parquet, got {self.name[:60]!r}")
        if not re.fullmatch(r"[0-9a-f]{64}", self.sha256):
            raise RecordError(f"sha256 must be of 64 digits from 0-9a-f, got {self.sha256[:70]!r}")
        if self.bytes <= LEAST:
            raise RecordError(f"bytes must be above {LEAST}, because smaller arrays lie beside their record; "
                              f"got {self.bytes}")  # fmt: skip

    def contradiction(self, record: Record) -> str:
        """Returns how the entry contradicts the record of its name; empty if it does not."""
        if self.sha256 != record.arrays_digest:
            return f"sha256 must be the arrays_digest of {record.id}.json, {record.arrays_digest}, got {self.sha256}"
        main = record.metrics.get(KINDS[record.kind].main)
        if record.kind in _PER_EXAMPLE and main is not None and main.n is not None:
            most = _ROW * main.n + _FOOTER
            if self.bytes > most:
                return f"bytes must be at most {most} for a row for each of {main.n} examples, got {self.bytes}"
        return ""


@dataclass(frozen=True, kw_only=True)
class LeftOut(CheckedFields):
    """List of arrays that were left out.

    Attributes:
        schema: version of this layout.
        arrays: ordered by name.
    """

    schema: int = SCHEMA
    arrays: tuple[ArraysLeftOut, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.schema != SCHEMA:
            raise RecordError(f"schema must be {SCHEMA} for this version of the code, got {self.schema}")
        names = [arrays.name for arrays in self.arrays]
        if not names or names != sorted(set(names)):
            raise RecordError("arrays must be at least one, ordered by name, each once")

    @property
    def content(self) -> bytes:
        """Its file."""
        return json.dumps(json_values(self), indent=1).encode() + b"\n"

    @property
    def name(self) -> str:
        """File name: a digest of the content."""
        return f"{digest_of_bytes(self.content)[:16]}{SUFFIX}"


class Coverage:
    """Lists of a folder, looked up by record."""

    def __init__(self, lists: Iterable[LeftOut]) -> None:
        # By digest too: two lists may name a file, and the record decides which of them is right.
        self._arrays = {(arrays.name, arrays.sha256): arrays for listed in lists for arrays in listed.arrays}

    def of(self, record: Record) -> ArraysLeftOut | None:
        """Returns the entry of a record's arrays; None without one that agrees with the record."""
        arrays = self._arrays.get((record.arrays or "", record.arrays_digest or ""))
        return None if arrays is None or arrays.contradiction(record) else arrays


def read_coverage(folder: Path) -> Coverage:
    """Reads every list of a folder of records.

    Raises:
        RecordError: a bad list, which the message names.
    """
    lists = []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        if path.name.startswith("."):
            continue
        try:
            listed = build(LeftOut, parse_json(read_bytes(path, "list").decode()))
        except (ValueError, RecursionError) as error:
            raise RecordError(f"bad list of arrays {path}: {error}; publish its run again") from None
        if listed.name != path.name:
            raise RecordError(f"bad list of arrays {path}: it was edited after it was written; publish its run again")
        lists.append(listed)
    return Coverage(lists)
