"""A task: data, model and settings of a training, in a class that suites, requests and the trainer share.

A suite's `[task]` table is a `Task`; a request's is a `Training`, which adds digests of the data and models that the
suite only names. A new key is a field here, a line of the trainer that reads it, and a line of docs. Its default must
be None, and its effective default is applied where it is read: absent values enter no digest of a suite and no id, so a
new key changes none of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, model_validator

from leakbench.benchmarks.core import Sizes
from leakbench.defenses.core import CropAndFlip, Execution, FeatureStatistics, Recipe

from .federated import FederatedTable
from .fields import Count, Decay, ModelChoice, Momentum, Padding, Rate, StrictTable, Text

SamplingName = Literal[
    "poisson", "truncated_poisson", "random_allocation", "cyclic", "shuffle", "partition", "fixed", "full"
]
SamplingAlone = Literal["poisson", "random_allocation", "shuffle", "partition", "fixed", "full"]
"""Samplers that need no further keys, so that a defense may name its own."""


class StatisticsTable(StrictTable):
    """Private statistics that standardise fixed features before the first step, at a privacy cost of their own."""

    of: Text = "0"
    """Name of the submodule that computes the features from the model's inputs."""
    mean_norm: Rate
    """Largest norm of an example's channel means, L2, in feature units: a public constant."""
    square_norm: Rate
    """Largest norm of an example's channel mean squares, L2, in squared feature units: a public constant."""
    noise_multiplier: Rate = 8.0
    """Noise standard deviation / largest norm, for each of the two releases."""


class PretrainTable(StrictTable):
    """Pretraining on the task's public examples before the defense's first step, without privacy for these examples.

    Methods that read public data read the same examples and labels: pretraining uses none of them up.
    """

    epochs: Count
    """Passes over the public examples, each in a new order."""
    lr: Rate
    """Learning rate, of the mean loss of a batch."""
    batch: Count
    """Public examples per step."""
    optimizer: Literal["sgd", "adam"] = "sgd"
    train: Literal["all", "last", "lora"]
    """Parameters that the defense then trains: `all` (fine-tuning), the `last` linear layer, behind fixed features
    (linear probing), or that layer and a low-rank product added to each other weight (`lora`)."""
    rank: Count | None = None
    """Rank of the products of `lora`."""
    alpha: Rate | None = None
    """Scale of `lora`: products are multiplied by alpha / rank; by 1 if absent."""

    @model_validator(mode="after")
    def _of_low_rank(self) -> PretrainTable:
        if (self.rank is not None) != (self.train == "lora"):
            rank = "none" if self.rank is None else self.rank
            raise ValueError(f"rank must be given for train = 'lora', and for no other, got {rank} for '{self.train}'")
        if self.alpha is not None and self.rank is None:
            raise ValueError(f"alpha must go with train = 'lora', got {self.alpha:g} for '{self.train}'")
        return self


CanaryName = Literal["dirac", "random", "orthonormal", "mislabelled", "blank", "crafted"]


class CanaryTable(StrictTable):
    """Records inserted into the training, each by an independent fair coin, for attacks that detect them."""

    kind: CanaryName
    """In gradient space: a coordinate (`dirac`), a `random` direction, a vector of an `orthonormal` set. In input
    space: a `mislabelled` example, a `blank` with one pixel lit, or a random pattern of the two ends of the input range
    with a random label (`crafted`)."""
    number: Annotated[int, Field(ge=20)]
    """Number of canaries that are drawn, whether included or not."""
    norm: Rate | None = None
    """Norm of the gradient of a canary in gradient space before the bound, L2; 10 if absent."""


class Task(StrictTable):
    """Data, model and settings of a training."""

    data: Text
    model: ModelChoice
    private: Count | None = None
    """Number of private examples; the data set's own number if absent, as for `non_member` and `public`."""
    candidates: Count | None = None
    """Number of members, and of non-members, in membership tests; all if absent."""
    batch: Count
    """Expected examples per step; in a federated run, of a client of average size."""
    epochs: Count | None = None
    """Passes over the private examples; None in a federated run, which counts rounds and local steps."""
    lr: Rate
    momentum: Momentum = 0.0
    optimizer: Literal["sgd", "adam"] = "sgd"
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    sampling: SamplingName = "poisson"
    non_member: Annotated[int, Field(ge=0)] | None = None
    """Number of non-members, of the same source and never trained on."""
    public: Annotated[int, Field(ge=0)] | None = None
    """Number of public examples."""
    groups: Annotated[int, Field(ge=2)] | None = None
    """For `cyclic` sampling: number of groups of examples that take turns."""
    largest_batch: Count | None = None
    """For `truncated_poisson` sampling: largest batch; of a larger draw, random examples are dropped."""
    nominal_size: Count | None = None
    """A public number that replaces the number of private examples in the choice of sample rate, divisor and steps; if
    absent, that number itself, which claims then treat as public."""
    # Absent is None, even where a default applies: fields added to a task later must change no digest of a suite.
    average: Decay | None = None
    """Decay of a moving average of the parameters, which is evaluated and attacked; no average if absent."""
    views: Count | None = None
    """Random crops of each image whose gradients are averaged and bounded once; the image itself if absent."""
    crop_padding: Padding | None = None
    """Pixels added on each side before a view is cropped; 4 if absent. Ignored without views."""
    horizontal_flip: bool | None = None
    """True to flip half of the views left to right, the default; ignored without views."""
    statistics: StatisticsTable | None = None
    """Statistics that standardise fixed features; features of the model itself if absent."""
    pretrain: PretrainTable | None = None
    """Pretraining on public examples before the private training, which starts from random weights if absent."""
    canaries: CanaryTable | None = None
    """Canaries inserted into the training in addition to the private examples; none if absent."""
    engine: Literal["auto", "layerwise", "torch.func", "opacus", "backpack"] = "auto"
    """Method that computes clipped sums; all give the same up to rounding."""
    precision: Literal["float32", "tf32", "bfloat16"] | None = None
    """Precision of forward and backward passes of the layerwise engine; if absent, TF32 on a CUDA device and float32 on
    others. Bounds are computed in float32 in any case."""
    unchecked: Literal[True] | None = None
    """True trains a model that could not be checked on synthetic examples; its claims are marked as unverified."""

    @model_validator(mode="after")
    def _sampled_as_it_says(self) -> Task:
        for key, kind in (("groups", "cyclic"), ("largest_batch", "truncated_poisson")):
            value = getattr(self, key)
            if (self.sampling == kind) != (value is not None):
                words = "none" if value is None else value
                raise ValueError(
                    f"{key} must be given for {kind} sampling, and for no other, got {words} for '{self.sampling}'"
                )
        if self.nominal_size is not None and self.sampling not in ("poisson", "full"):
            raise ValueError(f"nominal_size must go with poisson or full sampling, got '{self.sampling}'")
        # Batches of other samplers depend on the number of examples, and so on the secret inclusion bits of canaries.
        if self.canaries is not None and self.sampling not in ("poisson", "full"):
            raise ValueError(f"canaries must go with poisson or full sampling, got '{self.sampling}'")
        return self

    @property
    def sizes(self) -> Sizes:
        """The requested sizes of the pools."""
        return Sizes(private=self.private, non_member=self.non_member, public=self.public)

    @property
    def recipe(self) -> Recipe:
        """The settings in the trainer's form."""
        augmentation = None
        if self.views is not None:
            settings = {"padding": self.crop_padding, "flip": self.horizontal_flip}
            settings = {name: value for name, value in settings.items() if value is not None}
            augmentation = CropAndFlip(views=self.views, **settings)
        return Recipe(
            momentum=self.momentum,
            optimizer=self.optimizer,
            schedule=self.schedule,
            average=self.average,
            nominal_size=self.nominal_size,
            augmentation=augmentation,
            statistics=None if self.statistics is None else FeatureStatistics(**self.statistics.model_dump()),
        )

    def execution(self, device: torch.device | None = None) -> Execution:
        """Returns engine, precision and device in the trainer's form.

        Args:
            device: of the computation; None for that of the examples.
        """
        return Execution(engine=self.engine, precision=self.precision, device=device, unchecked=bool(self.unchecked))


class Training(Task):
    """The task of a request: without settings that have no effect, and with digests of the data and models it names."""

    data_digest: str = ""
    """SHA-256 of the user's own data, because a name does not reveal changed content."""
    model_digest: str = ""
    """SHA-256 of the user's own architecture."""
    tuning_digest: str = ""
    """Digest of the search on public data behind the settings; empty without a search."""
    federated: FederatedTable | None = None
    """Clients and rounds; None for central training."""
    zoo: str = ""
    """Zoo of the attacked checkpoint, which was trained before; empty for a training of the run's own."""
    checkpoint_digest: str = ""
    """SHA-256 of that checkpoint's manifest."""

    @classmethod
    def of(cls, task: Task, **others: Any) -> Training:
        """Returns the training of a task.

        Args:
            task: of a suite, with the overrides of a defense.
            others: digests that apply, and the suite's clients.
        """
        # Settings of views that have no effect, at their default or without views, would give the same cell another id.
        defaults = {"crop_padding": CropAndFlip.padding, "horizontal_flip": CropAndFlip.flip}
        idle = [name for name, value in defaults.items() if task.views is None or getattr(task, name) == value]
        return cls.model_construct(**(dict(task) | dict.fromkeys(idle) | others))

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields in record form, which ids are hashed from: without those at their default."""
        content: dict[str, Any] = {}
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if isinstance(value, ModelChoice):
                content |= {"model": value.name, "model_settings": dict(value.settings)}
            elif name in _ALWAYS or value != field.default:
                content[name] = value.model_dump(exclude_none=True) if isinstance(value, StrictTable) else value
        return content


_ALWAYS = frozenset({"private", "candidates", "momentum", "optimizer", "schedule", "sampling"})
"""Optional fields older than the rule that defaults are left out: always included, as existing ids contain them."""

TRAINING: Mapping[str, Any] = {
    "sampling": SamplingAlone,
    "lr": Rate,
    "batch": Count,
    "epochs": Count,
    "momentum": Momentum,
    "average": Decay,
    "views": Count,
    "crop_padding": Padding,
    "horizontal_flip": bool,
    "pretrain": PretrainTable,
    "canaries": CanaryTable,
    "release_noise": Literal["none", "calibrated"],
}
"""Values that a defense may override -> their types: the task's, and the [share] noise variant of its updates."""
