"""Index of a zoo: the names of its checkpoints, each with the SHA-256 of its manifest, which has those of its files.

A zoo is a folder with an `index.json` and a folder for each checkpoint. The environment variable `LEAKBENCH_ZOO` names
a folder of your own, whose checkpoints come before those of this distribution. An entry with a `url` is downloaded at
its first use.
"""

from __future__ import annotations

import importlib.resources
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from leakbench.leaderboard.records.files import read_bytes, write_bytes
from leakbench.leaderboard.records.validation import OPTIONAL, CheckedFields, RecordError, build, json_values

from ..catalog.messages import no_such

VARIABLE = "LEAKBENCH_ZOO"
INDEX = "index.json"
SCHEMA = 1

_MOST_BYTES = 4 << 20
_PART = r"[a-z0-9][a-z0-9_.+-]*"
_DIGEST = re.compile(r"[0-9a-f]{64}")


class ZooError(RecordError):
    """A checkpoint that does not exist, cannot be obtained, or does not have the digest of its index."""


@dataclass(frozen=True, kw_only=True)
class Pinned(CheckedFields):
    """A checkpoint in an index.

    Attributes:
        sha256: of its manifest.
        url: address of its folder, without the last slash; None for a folder beside the index.
    """

    sha256: str
    url: str | None = field(default=None, metadata=OPTIONAL)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not _DIGEST.fullmatch(self.sha256):
            raise RecordError(f"sha256 must be 64 hexadecimal digits in lower case, got {self.sha256!r}")


@dataclass(frozen=True, kw_only=True)
class Index(CheckedFields):
    """Content of an `index.json`."""

    schema: int = SCHEMA
    checkpoints: dict[str, Pinned]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.schema != SCHEMA:
            raise RecordError(f"schema must be {SCHEMA} for this version of the code, got {self.schema}")
        for name in self.checkpoints:
            check_name(name)


@dataclass(frozen=True, kw_only=True)
class ZooEntry:
    """A checkpoint of a zoo.

    Attributes:
        name: as `digits_mlp/dp_sgd/eps3/seed0`.
        pinned: its digest, and its address.
        zoo: folder of the index.
    """

    name: str
    pinned: Pinned
    zoo: Path


def check_name(name: str) -> None:
    """Refuses a name that is no path of at least two plain parts, and so might lead out of its folder.

    Raises:
        RecordError: names the rule.
    """
    if not re.fullmatch(rf"{_PART}(/{_PART})+", name) or len(name) > 200:
        raise RecordError(f"a checkpoint's name must be written as digits_mlp/dp_sgd/eps3/seed0, got {name[:200]!r}")


def folders() -> tuple[Path, ...]:
    """Returns the folders of all zoos, in the order in which names are looked up.

    Raises:
        ZooError: the variable does not name a folder.
    """
    own = Path(str(importlib.resources.files("leakbench.benchmarks.zoo")))
    named = os.environ.get(VARIABLE)
    if not named:
        return (own,)
    folder = Path(named).expanduser().absolute()
    if not folder.is_dir():
        raise ZooError(f"{VARIABLE} must name a folder that exists, got {folder}")
    return (folder, own)


def read_index(zoo: Path) -> dict[str, Pinned]:
    """Returns the checkpoints of a zoo by name; empty without an index.

    Raises:
        ZooError: a malformed index.
    """
    path = zoo / INDEX
    if not path.exists() and not path.is_symlink():
        return {}
    try:
        return build(Index, json.loads(read_limited(path, _MOST_BYTES))).checkpoints
    except (ValueError, RecursionError) as error:  # RecordError is a ValueError
        raise ZooError(f"cannot read the zoo's {path}: {error}") from None


def write_index(zoo: Path, checkpoints: Mapping[str, Pinned]) -> Path:
    """Writes the index of a zoo, sorted by name."""
    index = Index(checkpoints=dict(sorted(checkpoints.items())))
    return write_bytes(zoo / INDEX, json.dumps(json_values(index), indent=1).encode() + b"\n")


def names() -> tuple[str, ...]:
    """Returns the names of all checkpoints, sorted; those that have to be downloaded are included."""
    return tuple(sorted({name for zoo in folders() for name in read_index(zoo)}))


def find(name: str) -> ZooEntry:
    """Returns the entry of a checkpoint.

    Raises:
        ZooError: no zoo has it; the message has the nearest name.
    """
    for zoo in folders():
        if (pinned := read_index(zoo).get(name)) is not None:
            return ZooEntry(name=name, pinned=pinned, zoo=zoo)
    raise ZooError(no_such("checkpoint", name, names()))


def read_limited(path: Path, most: int) -> bytes:
    """Reads a regular file of limited size.

    Raises:
        RecordError: a link, a special or missing file, or a larger one.
    """
    try:
        size = path.lstat().st_size
    except OSError as error:
        raise RecordError(f"cannot read {path}: {error.strerror}") from None
    if size > most:
        raise RecordError(f"{path} must have at most {most} bytes, got {size}")
    return read_bytes(path)
