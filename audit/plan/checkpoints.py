"""Checkpoints of a zoo as the targets of a suite's cells: their names, and refusals of what they do not offer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from leakbench.attacks.core import Knows

from ..catalog import methods as catalog
from ..suite.errors import SuiteError
from ..suite.suite import Suite
from ..zoo.download import located
from ..zoo.index import ZooError, find, names
from ..zoo.manifest import WEIGHTS, CheckpointManifest, read_manifest
from .request import Request, TrainingRequest
from .threat_models import threat_model

OF_CHECKPOINT = "checkpoint"
"""Subject of cells on a checkpoint, a key of `SUBJECTS`."""


def checkpoint_name(zoo: str, request: TrainingRequest) -> str:
    """Returns the name of a training's checkpoint, such as `digits_mlp/dp_sgd/eps3/seed0`.

    Args:
        zoo: first part of the name.
        request: of the training.
    """
    labels = {"epsilon": "eps", "advantage": "advantage", "tpr": "tpr", "noise_multiplier": "noise"}
    budget = request.budget.to_dict()
    parts = [f"{label}{budget[key]:g}" for key, label in labels.items() if key in budget]
    control = ["never_saw"] if request.never_saw else []
    return "/".join([zoo, request.defense.name, *control, *parts, f"seed{request.seed}"])


def with_checkpoint(suite: Suite, zoo: str, request: TrainingRequest) -> TrainingRequest:
    """Returns the request of a training as that of its checkpoint, whose digest is part of its cells' ids.

    Args:
        suite: for messages.
        zoo: first part of the checkpoint's name.
        request: of the training.

    Raises:
        SuiteError: the zoo has no such checkpoint, or one of another training: nothing is trained in its place.
    """
    name = checkpoint_name(zoo, request)
    try:
        entry = find(name)
        trained = read_manifest(located(entry), entry).request
    except ZooError as error:
        raise SuiteError(f"{suite.source}: zoo: {error}; a suite with zoo trains nothing") from None
    if differing := _differences(trained, request.canonical()):
        raise SuiteError(
            f"{suite.source}: zoo: checkpoint {name!r} must be of the suite's training, got another "
            f"{', '.join(differing)}; a suite with zoo trains nothing, so drop the option, or run a suite without zoo"
        )
    return replace(
        request,
        training=request.training.model_copy(update={"zoo": zoo, "checkpoint_digest": entry.pinned.sha256}),
    )


def _differences(trained: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Returns the keys in which canonical requests differ, without names of suites and roles as positive controls."""
    first, second = ({**content, **content["task"]} for content in (trained, wanted))
    ignored = ("suite", "task", "control")  # a positive control is trained as a contestant
    return sorted(key for key in {*first, *second} if key not in ignored and first.get(key) != second.get(key))


def manifest_of_target(request: TrainingRequest) -> CheckpointManifest:
    """Returns the manifest of a request's checkpoint.

    Raises:
        RecordError: it has another digest than the request.
    """
    training = request.training
    entry = find(checkpoint_name(training.zoo, request))
    if entry.pinned.sha256 != training.checkpoint_digest:
        raise ZooError(f"checkpoint {entry.name!r} was replaced since the run began; run the same command again")
    return read_manifest(located(entry), entry)


def stored_weights(zoo: str) -> dict[str, tuple[str, str]]:
    """Returns name and SHA-256 of the weights of a zoo's checkpoints on this machine, by digests of their manifests.

    Args:
        zoo: first part of their names.
    """
    entries = [find(name) for name in names() if name.startswith(f"{zoo}/")]
    return {
        entry.pinned.sha256: (entry.name, read_manifest(located(entry), entry).files[WEIGHTS].sha256)
        for entry in entries
        if entry.pinned.url is None
    }


def not_offered(request: Request) -> str:
    """Returns the reason why an attack cannot run on a request's checkpoint; empty if it can.

    Args:
        request: of an attack on a trained model that some suite offers.
    """
    requested = request.requested_attack
    attack = catalog.attack(requested.name)
    row = threat_model(attack.kind, attack.requires.access)
    if attack.kind != "membership" or row is None or row.reads != "nothing":
        return (
            f"{attack.name} needs {attack.requires.access.name} access to a training, and a zoo offers membership "
            "attacks on final models alone"
        )
    if Knows.SHADOWS not in attack.requires.knows:
        return ""
    shadows = manifest_of_target(request).shadows
    models, views = requested.settings["shadows"], requested.settings.get("views", 1)
    if shadows is None or models > shadows.models or views != shadows.views:
        stored = "none" if shadows is None else f"those of {shadows.models} at {shadows.views} view"
        return (
            f"{attack.name} needs outputs of {models} shadow models at {views} view{'s' * (views > 1)}, and the zoo "
            f"stores {stored}"
        )
    return ""
