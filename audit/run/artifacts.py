"""Store of artifacts: JSON files named by the hash of their request, each computed once.

A file of an earlier run is kept if it is complete, its seal matches, and the same code computed it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from leakbench.leaderboard.records.files import read_bytes, write_bytes
from leakbench.leaderboard.records.record import Provenance, RecordError
from leakbench.leaderboard.records.validation import build

from ..catalog.messages import in_one_line
from ..plan.artifact import Artifact
from ..plan.request import digest_of
from .provenance import library, third_party
from .resume import StaleError, refuse_other_code


def origin_of(artifact: Artifact) -> Provenance:
    """Returns the provenance that an artifact would have if it were computed now."""
    return replace(library(), third_party=third_party(*artifact.methods))


def compute_artifact(artifact: Artifact, folder: Path, device: torch.device, origin: Provenance) -> str:
    """Computes an artifact and writes it; a failure is written with its error, and is recomputed next time.

    Args:
        artifact: to compute.
        folder: folder of its file.
        device: device of the computation.
        origin: provenance of the code that computes it, recorded at the start of the run.

    Returns:
        Reason of a failure; empty on success.

    Raises:
        StaleError: this process imported other code than at the start of the run.
    """
    # Read by `leakbench cache` only; a run checks name and seal.
    about = {"words": artifact.words, "request": artifact.request}
    # Checked before computing, because this process imported the source later than the run hashed it.
    refuse_other_code(origin)
    try:
        result = artifact.make(device)
        seal = sealed_as(artifact.name, result)  # refuses values that no file can hold
    # An exception of a method, of any class, fails the dependent cells, not the run.
    except (Exception, SystemExit) as error:
        sentence = in_one_line(error)
        write_document(about | {"error": sentence}, folder / f"{artifact.name}.json")
        return sentence
    document = about | {"result": result, "seal": seal, "provenance": asdict(origin)}
    write_document(document, folder / f"{artifact.name}.json")
    return ""


def read_computed(artifacts: Iterable[Artifact], folder: Path) -> dict[str, dict[str, Any]]:
    """Returns results that were computed or kept in this run, by name; their provenance is not checked again.

    Raises:
        RecordError: an artifact failed, or its file is missing, incomplete or edited.
    """
    results = {}
    for artifact in artifacts:
        path = folder / f"{artifact.name}.json"
        try:
            content = json.loads(read_bytes(path, "artifact"))
            if "error" in content:
                raise RecordError(f"{artifact.words} failed: {content['error']}")
            whole = content["seal"] == sealed_as(artifact.name, content["result"])
        except RecordError:
            raise
        except (ValueError, KeyError, TypeError):
            whole, content = False, {}
        if not whole:
            raise RecordError(f"artifact {path} was edited after it was written; run the same command again")
        results[artifact.name] = content["result"]
    return results


class KeptResults(Mapping[str, dict[str, Any]]):
    """Results that were computed or kept in this run, by name, read from their file on access.

    A failed artifact therefore fails only those cells of a job that read it.
    """

    def __init__(self, artifacts: Iterable[Artifact], folder: Path) -> None:
        """Reads nothing yet.

        Args:
            artifacts: dependencies of a job.
            folder: folder of their files.
        """
        self._artifacts, self._folder = {artifact.name: artifact for artifact in artifacts}, folder

    def __getitem__(self, name: str) -> dict[str, Any]:
        return read_computed([self._artifacts[name]], self._folder)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._artifacts)

    def __len__(self) -> int:
        return len(self._artifacts)


def read_kept(artifacts: dict[str, Artifact], folder: Path, *, recompute: bool = False) -> dict[str, dict[str, Any]]:
    """Returns results of earlier runs that were computed with this code.

    Args:
        artifacts: by name.
        folder: folder of their files.
        recompute: whether mismatched results count as missing instead of being refused.

    Returns:
        Existing results by name.

    Raises:
        StaleError: edited results, or results of other code.
    """
    results, stale = {}, []
    for name, artifact in artifacts.items():
        path = folder / f"{name}.json"
        # A dangling link does not `exist` either, but it is refused below instead of counting as missing.
        if not path.exists() and not path.is_symlink():
            continue
        result, differs = _read(path, artifact)
        # A failed artifact has neither a result nor a difference: it counts as missing, and is recomputed.
        if result and not differs:
            results[name] = result
        elif differs and not recompute:
            stale.append(f"{artifact.words}: {'; '.join(differs)}")
    if stale:
        raise StaleError(
            f"{len(stale)} point{'s' if len(stale) > 1 else ''} in {folder} cannot be kept ({stale[0]}); "
            "compute them again with --recompute, or name another --out"
        )
    return results


def write_document(document: dict[str, Any], path: Path) -> Path:
    """Writes plain JSON values, indented; refuses NaN and infinity, which JSON lacks."""
    return write_bytes(path, json.dumps(document, indent=2, allow_nan=False).encode() + b"\n")


def _read(path: Path, artifact: Artifact) -> tuple[dict[str, Any], list[str]]:
    """Returns a result, and its differences from the result that would be computed now."""
    try:
        data = json.loads(read_bytes(path, "artifact"))
        if "error" in data:
            return {}, []
        differs = build(Provenance, data["provenance"], "provenance").differences(origin_of(artifact))
        if data["seal"] != sealed_as(artifact.name, data["result"]):
            return {}, ["it was edited after it was written, or is that of another"]
    except (ValueError, KeyError, TypeError):
        return {}, ["it is not a whole document of this version"]
    return data["result"], differs


def sealed_as(name: str, result: dict[str, Any]) -> str:
    """Returns a digest of a result with its name: a copy under another name does not match."""
    return digest_of({"name": name, "result": result})
