"""Builder of a zoo: trains the checkpoints that a suite names, and writes them with their shadow models' outputs.

Every training is that of `leakbench run` on the same suite without `zoo`, with the same seeds, so the same code writes
the same bytes. Outputs of shadow models are kept in half precision, which leaves them 11 significant bits.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from leakbench.leaderboard.records.files import digest_of_bytes, write_bytes

from ..catalog.listing import method_files
from ..plan import expand as planning
from ..plan.cells import Cell
from ..plan.checkpoints import checkpoint_name
from ..plan.request import Request, TrainingRequest
from ..subjects.shadow_bank import bank_of, outputs_of
from ..subjects.trained_model import TrainedModel
from ..suite.errors import SuiteError
from ..suite.suite import Suite
from ..zoo.index import Pinned, read_index, write_index
from ..zoo.manifest import MANIFEST, SCHEMA, SHADOWS, SPLIT, WEIGHTS
from ..zoo.split import StoredSplit
from .harness import record_of
from .provenance import library

MODELS, VIEWS, DTYPE = 16, 1, torch.float16
"""Shadow models of a bank, views of each candidate, and the format of their logits."""


def build(
    suite: Suite, zoo: Path, *, device: torch.device, shadows: int = MODELS, say: Callable[[str], None] = lambda _: None
) -> list[str]:
    """Trains the checkpoints of a suite and writes them with an index of their digests; existing ones are replaced.

    Args:
        suite: with `zoo`, and defenses of the catalogue.
        zoo: folder of the index; other checkpoints in it stay.
        device: device of the computation.
        shadows: shadow models of each bank, even; 0 for none.
        say: called with the name of each checkpoint before its training.

    Returns:
        Names of the checkpoints.

    Raises:
        SuiteError: the suite has no `zoo`, a method of a user's file, or two checkpoints of one name.
        ValueError: a training diverged.
    """
    if suite.zoo is None:
        raise SuiteError(f"{suite.source}: zoo: is missing, the first part of its checkpoints' names")
    trained = planning.trainings(suite)
    requests = {checkpoint_name(suite.zoo, request): request for request in trained}
    if len(requests) < len(trained):
        raise SuiteError(f"{suite.source}: defense: two checkpoints would have one name; list each defense once")
    for request in requests.values():
        if request.defense.name not in method_files("defenses"):
            raise SuiteError(f"{suite.source}: defense: must be of the catalogue, got {request.defense.name!r}")
    for name, request in requests.items():
        say(name)
        # A negative control has the shadow models of its defense.
        own = checkpoint_name(suite.zoo, replace(request, control=None))
        content = _trained(name, request, suite.digest, device)
        if shadows:
            content |= _shadowed(name, own, request, device, shadows)
        _write(zoo, content)
    return list(requests)


def _trained(name: str, request: TrainingRequest, suite_digest: str, device: torch.device) -> dict[str, Any]:
    """Trains a checkpoint; returns the content of its manifest, and of its files as bytes, by name."""
    cell = Cell(Request(**vars(request), kind="utility"), planning.OF_MODEL)
    subject = TrainedModel((cell,), device)
    outcome = subject.outcome(cell)
    if "diverged" in outcome.flags:
        raise ValueError(f"checkpoint {name!r} must be finite, and its training diverged; take a smaller lr")
    record = record_of(cell, suite_digest, device, outcome, library())
    state = {key: value.detach().cpu() for key, value in subject.model.run.model.state_dict().items()}
    split = StoredSplit.of(subject.model.splits, request.seed)
    return {
        "schema": SCHEMA,
        "name": name,
        "request": request.canonical(),
        "record": json.loads(record.to_json()),
        "files": {WEIGHTS: save(state), SPLIT: split.to_json()},
    }


def _shadowed(name: str, own: str, request: TrainingRequest, device: torch.device, models: int) -> dict[str, Any]:
    """Trains a checkpoint's shadow models; returns their outputs, described for a manifest."""
    described = {"models": models, "views": VIEWS, "dtype": str(DTYPE).removeprefix("torch.")}
    if own != name:
        return {"shadows": described | {"checkpoint": own}}
    outputs = outputs_of([stack(device) for stack in bank_of(request, models, VIEWS)])
    logits, population = (_halved(name, values) for values in outputs)
    return {"shadows": described, SHADOWS: save({"logits": logits, "population": population})}


def _halved(name: str, values: Tensor) -> Tensor:
    """Returns logits in half precision."""
    halved = values.to(DTYPE)
    if not bool(halved.isfinite().all()):
        raise ValueError(f"logits of shadow models of {name!r} must be in the range of {DTYPE}; take a smaller lr")
    return halved.contiguous()


def _write(zoo: Path, content: dict[str, Any]) -> None:
    """Writes a checkpoint, then the index."""
    name, files = content["name"], dict(content["files"])
    if SHADOWS in content:
        files[SHADOWS] = content.pop(SHADOWS)
    for file, data in files.items():
        write_bytes(zoo / name / file, data)
    content["files"] = {file: {"sha256": digest_of_bytes(data), "bytes": len(data)} for file, data in files.items()}
    manifest = json.dumps(content, indent=1, allow_nan=False).encode() + b"\n"
    write_bytes(zoo / name / MANIFEST, manifest)
    write_index(zoo, read_index(zoo) | {name: Pinned(sha256=digest_of_bytes(manifest))})
