"""A trained checkpoint: its network, claim, split and shadow models' outputs, read with every digest checked."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import cast

from jaxtyping import Float, Int
from torch import Tensor, nn

from leakbench.attacks.core import Examples
from leakbench.benchmarks import models
from leakbench.defenses.core import Claim, Sampling, predict
from leakbench.leaderboard.records.record import Record
from leakbench.leaderboard.records.task import TrainingTask

from ..catalog import methods as catalog
from ..catalog.listing import names as catalogue_names
from ..external.files.read import FileRefused, read_as_stored
from .download import located
from .index import ZooError, find
from .manifest import SHADOWS, SPLIT, WEIGHTS, CheckpointManifest, read_file, read_manifest
from .split import StoredSplit, candidates_of, ids_of

TOLERANCE = 1e-3
"""Relative difference allowed between accountants of two versions."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint of a zoo, whose files have the digests of its manifest.

    Attributes:
        name: as `digits_mlp/dp_sgd/eps3/seed0`.
        sha256: of its manifest, which pins everything else.
        manifest: what was trained, and digests.
        record: of its utility, with defense, budget, claim and flags.
        split: ids of members and non-members.
        folder: of its files.
        model: the trained network, on the CPU, in evaluation mode.
    """

    name: str
    sha256: str
    manifest: CheckpointManifest = field(repr=False)
    record: Record = field(repr=False)
    split: StoredSplit = field(repr=False)
    folder: Path
    model: nn.Module = field(repr=False)

    def members(self) -> Int[Tensor, " n"]:
        """Returns the ids of the training examples: the truth, which no attack may read."""
        # A negative control was trained on public examples, and its candidates are those of its defense.
        return ids_of(self.split.members)

    @cached_property
    def candidates(self) -> Examples:
        """Members and non-members of the public data set, by increasing id: what an attack is asked about.

        Raises:
            ZooError: the data set deals other pools here.
        """
        return candidates_of(self.split.load())

    @cached_property
    def claim(self) -> Claim:
        """The privacy guarantee, computed again from the defense, its noise, the sampler and the number of steps.

        Raises:
            ZooError: the stored epsilon is smaller than the steps prove.
        """
        record, task, stored = self.record, cast(TrainingTask, self.record.task), self.record.claim
        assert stored is not None  # noqa: S101 - by `CheckpointManifest.stored_record`
        if record.defense.name not in catalogue_names("defenses"):
            raise ZooError(f"defense of checkpoint {self.name!r} must be of the catalogue, got {record.defense.name!r}")
        defense = catalog.defense(record.defense.name, dict(record.defense.settings))
        if defense.noise_multiplier is None and record.noise_multiplier is not None:
            defense = defense.with_noise(record.noise_multiplier)
        capped = {} if task.largest_batch is None else {"most": task.largest_batch, "examples": task.trained_on}
        # The sampler's name is checked by the class.
        sampling = Sampling(task.sampling, task.sample_rate, groups=task.groups, **capped)  # pyright: ignore[reportArgumentType]
        proved = predict(defense, sampling=sampling, steps=task.steps).claim(stored.delta)
        epsilon = math.inf if stored.epsilon is None else stored.epsilon
        if epsilon < proved.epsilon * (1 - TOLERANCE):
            raise ZooError(
                f"epsilon of checkpoint {self.name!r} must follow from its steps, which prove {proved.epsilon:.4g}, "
                f"got {epsilon:.4g}"
            )
        return proved

    @cached_property
    def shadow_outputs(self) -> tuple[Float[Tensor, "models n views classes"], Float[Tensor, "models public classes"]]:
        """Logits of its shadow models on the candidates in content order, and on the public examples, in float32.

        Raises:
            ZooError: none are stored, or they have another digest.
        """
        shadows = self.manifest.shadows
        if shadows is None:
            raise ZooError(f"checkpoint {self.name!r} has no outputs of shadow models")
        if shadows.checkpoint is not None:
            owner = load(shadows.checkpoint)
            if owner.manifest.shadows is None or owner.manifest.shadows.checkpoint is not None:
                raise ZooError(f"checkpoint {owner.name!r} must have the shadow models of {self.name!r}, and has none")
            return owner.shadow_outputs
        tensors = _tensors(self.folder, self.manifest, SHADOWS)
        if tensors.keys() != {"logits", "population"}:
            raise ZooError(f"{SHADOWS} of {self.name!r} must have logits and population, got {', '.join(tensors)}")
        logits, population = tensors["logits"].float(), tensors["population"].float()
        expected = (shadows.models, len(self.split.members) + len(self.split.non_members), shadows.views)
        if logits.shape[:3] != expected or population.shape[:2] != (shadows.models, len(self.split.public)):
            raise ZooError(f"logits of {self.name!r} must have the shape {expected}, got {tuple(logits.shape[:3])}")
        return logits, population


def load(name: str, *, sha256: str | None = None) -> Checkpoint:
    """Returns a checkpoint by its name; downloads it if its index says so.

    Args:
        name: in `names()`.
        sha256: digest that its manifest must have; that of the index if None.

    Raises:
        RecordError: no such checkpoint, or files that cannot be obtained, are not safetensors, or have another digest.
    """
    entry = find(name)
    if sha256 is not None and sha256 != entry.pinned.sha256:
        raise ZooError(f"checkpoint {name!r} must have the SHA-256 {sha256}, and its index has {entry.pinned.sha256}")
    folder = located(entry)
    manifest = read_manifest(folder, entry)
    record = manifest.stored_record()
    split = StoredSplit.from_json(read_file(folder, manifest, SPLIT), f"of checkpoint {name}")
    return Checkpoint(
        name=name,
        sha256=entry.pinned.sha256,
        manifest=manifest,
        record=record,
        split=split,
        folder=folder,
        model=_network(name, record, split, _tensors(folder, manifest, WEIGHTS)),
    )


def _tensors(folder: Path, manifest: CheckpointManifest, file: str) -> dict[str, Tensor]:
    """Returns the tensors of a file that is safetensors, of the manifest's size and digest; a pickle is refused."""
    read_file(folder, manifest, file)
    try:
        state = read_as_stored(folder / file)
    except FileRefused as error:
        raise ZooError(str(error)) from None
    if state.sha256 != manifest.files[file].sha256:
        raise ZooError(f"{file} of checkpoint {manifest.name!r} changed while it was read; load it again")
    return state.tensors


def _network(name: str, record: Record, split: StoredSplit, weights: dict[str, Tensor]) -> nn.Module:
    """Returns the network of a record with these weights, in evaluation mode.

    Raises:
        ZooError: its architecture is not of the catalogue, or has other parameters.
    """
    task = record.task
    if task.model not in models.names():
        raise ZooError(f"model of checkpoint {name!r} must be of the catalogue, got {task.model!r}")
    fits = {"input_shape": tuple(task.input_shape or ()), "classes": split.classes, **task.get("model_settings", {})}
    stored = sum(tensor.numel() for tensor in weights.values())
    try:
        # Counted without memory first: a manifest may ask for a network of any size.
        if (count := models.count(task.model, **fits)) > stored:
            raise ZooError(f"{WEIGHTS} of {name!r} must have at least {count} parameters, got {stored}")
        network = models.build(task.model, **fits)
        network.load_state_dict(weights, strict=True)
    except (TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, ZooError):
            raise
        raise ZooError(f"{WEIGHTS} of {name!r} do not fit {task.model!r}: {' '.join(str(error).split())}") from None
    return network.eval().requires_grad_(True)
