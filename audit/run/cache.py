"""Contents of an artifact store: entries, their requests, whether they are usable, and which are removable.

Artifacts (outputs of shadow models, points of a hyperparameter search) are named by a hash of their full specification,
and kept for later runs into the same folder. This module only reads them.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from leakbench.leaderboard.records.files import read_bytes, refuse_links
from leakbench.leaderboard.records.record import Provenance, RecordError
from leakbench.leaderboard.records.validation import build

from .artifacts import sealed_as
from .provenance import library

STORES = ("artifacts", "tuning/points")
"""Folders of artifacts within a run's results."""

ArtifactState = Literal["usable", "of another code", "failed", "edited or torn"]


@dataclass(frozen=True, kw_only=True)
class Stored:
    """An artifact on disk.

    Attributes:
        path: of its file.
        size: bytes.
        state: whether a current run would use it.
        words: description from the progress output; empty if missing from its file.
        request: its specification; None if missing from its file.
        error: reason of its failure; empty on success.
        differs: differences from the current code.
    """

    path: Path
    size: int
    state: ArtifactState
    words: str = ""
    request: dict[str, Any] | None = None
    error: str = ""
    differs: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Hash of the request."""
        return self.path.stem


def stored(directory: Path) -> list[Stored]:
    """Returns every artifact of a results folder, the largest first.

    Args:
        directory: the folder given to `leakbench run --out`.

    Raises:
        RecordError: it is not a results folder, or one of its stores is a link.
    """
    folders = [directory / name for name in STORES]
    refuse_links(directory, *(directory / part for name in STORES for part in (*Path(name).parents, name)))
    if not directory.is_dir():
        raise RecordError(f"no folder of results {directory}; name what --out of leakbench run named")
    artifacts = [_read(path) for folder in folders for path in folder.glob("*.json") if _is_ours(path)]
    return sorted(artifacts, key=lambda artifact: (-artifact.size, artifact.name))


def one_of(directory: Path, name: str) -> Stored:
    """Returns the artifact whose name begins with `name`.

    Raises:
        RecordError: there is none, or several.
    """
    artifacts = [artifact for artifact in stored(directory) if name and artifact.name.startswith(name)]
    if len(artifacts) != 1:
        matches = "no artifact" if not artifacts else f"{len(artifacts)} artifacts"
        raise RecordError(
            f"{matches} of {directory} begin{'s' * (len(artifacts) < 2)} with {name!r}; see leakbench cache ls"
        )
    return artifacts[0]


def removable(directory: Path, *, everything: bool = False) -> list[Stored]:
    """Returns artifacts that no run would use: of other code, failed, edited or torn.

    Args:
        directory: results folder.
        everything: return all artifacts; records stay, and a recomputed cell recomputes its artifacts.
    """
    return [artifact for artifact in stored(directory) if everything or artifact.state != "usable"]


def _is_ours(path: Path) -> bool:
    """True if a file is named like an artifact, by a hash; other files are ignored."""
    return re.fullmatch(r"[0-9a-f]{16,128}", path.stem) is not None and (path.is_symlink() or path.is_file())


def _read(path: Path) -> Stored:
    size = path.lstat().st_size
    try:
        data = json.loads(read_bytes(path, "artifact"))
        words, request = data.get("words", ""), data.get("request")
        if "error" in data:
            return Stored(path=path, size=size, state="failed", words=words, request=request, error=data["error"])
        provenance = build(Provenance, data["provenance"], "provenance")
        whole = data["seal"] == sealed_as(path.stem, data["result"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return Stored(path=path, size=size, state="edited or torn")
    if not whole:
        return Stored(path=path, size=size, state="edited or torn", words=words, request=request)
    # Third-party methods are not compared: only the suite determines their expected code.
    differs = tuple(provenance.differences(library()))
    state: ArtifactState = "of another code" if differs else "usable"
    return Stored(path=path, size=size, state=state, words=words, request=request, differs=differs)
