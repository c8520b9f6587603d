"""Requests: everything that decides one record, typed and frozen, and the id and seeds that are hashed from it.

The id is a hash of the request's canonical form: by it a run over existing results knows what is missing, and adding a
cell to a suite moves no other. Seeds derive from the same form. Fields, and settings of methods, are left out at their
default: one that is introduced later moves no id that exists. Fields without a default are always in it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any, Literal

from leakbench.benchmarks.core import Sizes
from leakbench.defenses.core import Claim, CropAndFlip, FeatureStatistics, Recipe, seed_from

from ..catalog.canonical import canonical, recorded
from ..catalog.methods import MethodKind
from ..suite.schema import BUDGETS, PretrainTable, SamplingName

SCHEMA = 1  # of the canonical form; part of every id

Control = Literal["positive", "negative"]
"""A cell's part as a control: it must leak, or must not."""


def digest_of(content: dict[str, Any]) -> str:
    """SHA-256 of plain content, cut to 128 bits: the same for the same values, whatever the order of keys."""
    canonical = json.dumps(content, sort_keys=True, allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:32]


def seed_of(content: dict[str, Any], purpose: str) -> int:
    """A seed of 63 bits for one random process, a pure function of plain content and the process's name."""
    return seed_from(json.dumps(content, sort_keys=True), purpose)


def seed_of_data(digest: str, purpose: str) -> int:
    """A seed that every cell on the same split shares: defenses are compared on the same candidates and targets.

    Args:
        digest: of the splits.
        purpose: what is drawn, as "candidates".
    """
    return seed_of({"digest": digest}, purpose)


@dataclass(frozen=True, kw_only=True)
class MethodAsked:
    """A defense or an attack by name, with every setting decided.

    Attributes:
        kind: "defenses" or "attacks".
        name: as in a suite file, or the path of a function, `FILE.py:FUNCTION`.
        settings: all of them, the noise multiplier of a defense excepted.
    """

    kind: MethodKind
    name: str
    # A dictionary, so that no request can be hashed by Python: caches go by JSON.
    settings: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Name and settings, as a record has them."""
        return {"name": self.name, "settings": recorded(self.kind, self.name, self.settings)}

    def canonical(self) -> dict[str, Any]:
        """Name and the settings that an id depends on."""
        return {"name": self.name, "settings": canonical(self.kind, self.name, self.settings)}


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How much privacy a training may spend.

    Attributes:
        epsilon: nats, which the noise is calibrated to; None where the noise is given, or there is none.
        advantage: instead, the largest TPR - FPR that a test of one record's membership may have.
        tpr: instead, the largest true positive rate that such a test may have at `fpr`.
        fpr: false positive rate of `tpr`.
        noise_multiplier: noise standard deviation / sensitivity; None where it is calibrated, or there is none.
        delta: probability that the claim may fail.
    """

    epsilon: float | None = None
    advantage: float | None = None
    tpr: float | None = None
    fpr: float | None = None
    noise_multiplier: float | None = None
    delta: float

    @property
    def draws_noise(self) -> bool:
        """Whether it asks for noise; a defense that adds none has delta alone."""
        return any(getattr(self, kind) is not None for kind in BUDGETS)

    @property
    def wanted(self) -> dict[str, float]:
        """What noise is calibrated to, as `calibrate` takes it; empty where the noise is given, or there is none."""
        if self.epsilon is not None:
            return {"epsilon": self.epsilon, "delta": self.delta}
        limits = {"advantage": self.advantage, "tpr": self.tpr, "fpr": self.fpr}
        return {name: value for name, value in limits.items() if value is not None}

    def overspent(self, claim: Claim) -> bool:
        """Whether a claim promises less than was asked for, but for rounding: calibration ends on the private side."""
        if self.epsilon is not None:
            return claim.epsilon > self.epsilon * (1 + 1e-9)
        if self.advantage is not None:
            return claim.advantage > self.advantage * (1 + 1e-9)
        return self.tpr is not None and self.fpr is not None and claim.tpr_at(self.fpr) > self.tpr * (1 + 1e-9)

    def to_dict(self) -> dict[str, float]:
        """The fields that are given, by name."""
        return _without_defaults(self)


@dataclass(frozen=True, kw_only=True)
class Training:
    """What is trained, on which data, and how; sizes are None where the data set decides.

    Attributes:
        data: name of a data set, or the place of the user's own.
        model: name of an architecture, or the path of the user's own.
        model_settings: those that the suite gives.
        private: examples to train on.
        candidates: members, and as many non-members, that membership tests are about.
        batch: expected examples a step.
        epochs: length.
        lr: learning rate.
        momentum: of SGD.
        optimizer: "sgd" or "adam".
        schedule: factor of the learning rate by step.
        sampling: who takes part in a step.
        non_member: examples that are never trained on.
        public: examples that everybody may know.
        data_digest: SHA-256 of the user's own data: a name does not say that what is behind it has changed.
        model_digest: the same of the user's own architecture.
        tuning_digest: of the search on public data that the settings rest on; empty where they rest on none.
        engine: how clipped sums are computed.
        unchecked: whether a model that could not be checked on made-up examples is trained anyway.
        groups: of cyclic sampling.
        largest_batch: of truncated Poisson sampling; None for the others.
        nominal_size: in place of the number of examples, for rate, divisor and steps; None for that number.
        average: decay of a moving average of the parameters; None for the last ones.
        views: random crops of each image, whose gradients are averaged and bounded once; None for the image itself.
        crop_padding: pixels added on each side before a view is cut out.
        horizontal_flip: whether half of the views are flipped left to right.
        statistics: settings of `FeatureStatistics`; None for features as they are.
        pretrain: settings of `PretrainTable`, on public examples; None for random weights.
        canaries: settings of `CanaryTable`; None where none are put in.
    """

    data: str
    model: str
    model_settings: dict[str, Any]
    private: int | None
    candidates: int | None
    batch: int
    epochs: int
    lr: float
    momentum: float
    optimizer: Literal["sgd", "adam"]
    schedule: Literal["constant", "cosine", "linear"]
    sampling: SamplingName
    non_member: int | None = None
    public: int | None = None
    data_digest: str = ""
    model_digest: str = ""
    tuning_digest: str = ""
    engine: str = "auto"
    unchecked: bool = False
    groups: int = 1
    largest_batch: int | None = None
    nominal_size: int | None = None
    average: float | None = None
    views: int | None = None
    crop_padding: int = CropAndFlip.padding
    horizontal_flip: bool = CropAndFlip.flip
    # A dictionary, as settings of methods are, because a request is plain content.
    statistics: dict[str, Any] | None = None
    pretrain: dict[str, Any] | None = None
    canaries: dict[str, Any] | None = None

    @property
    def pretraining(self) -> PretrainTable | None:
        """The settings of pretraining on public examples; None where there is none."""
        return None if self.pretrain is None else PretrainTable(**self.pretrain)

    @property
    def recipe(self) -> Recipe:
        """The same as the trainer takes it."""
        views = self.views
        return Recipe(
            momentum=self.momentum,
            optimizer=self.optimizer,
            schedule=self.schedule,
            average=self.average,
            nominal_size=self.nominal_size,
            augmentation=None
            if views is None
            else CropAndFlip(views=views, padding=self.crop_padding, flip=self.horizontal_flip),
            statistics=None if self.statistics is None else FeatureStatistics(**self.statistics),
        )

    @property
    def sizes(self) -> Sizes:
        """Sizes of the pools that are asked for."""
        return Sizes(private=self.private, non_member=self.non_member, public=self.public)

    def to_dict(self) -> dict[str, Any]:
        """The fields as a record has them, without those left at their default."""
        return _without_defaults(self)


@dataclass(frozen=True, kw_only=True)
class Update:
    """The shared update that is attacked, as a suite's [share] table describes it.

    Attributes:
        data: name of a data set, or the place of the user's own.
        model: name of an architecture, or the path of the user's own.
        model_settings: those that the suite gives.
        step: number of the step that is shared.
        steps: planned length, which schedules refer to; the shared step is the last where None.
        batch: examples in it.
        images: separate targets, each a batch of its own.
        lr: of the steps before, and of local steps.
        release_noise: "none" shows what the release alone hides; "calibrated" has the noise of the budget.
        data_digest: SHA-256 of the user's own data.
        model_digest: the same of the user's own architecture.
        local: settings of `LocalTraining`, whose sum of steps is shared; None for one step.
        prior: candidates for one record of the batch, for attacks that know them; others do not depend on it.
    """

    data: str
    model: str
    model_settings: dict[str, Any]
    step: int
    steps: int | None
    batch: int
    images: int
    lr: float
    release_noise: Literal["none", "calibrated"]
    data_digest: str = ""
    model_digest: str = ""
    # A dictionary, as settings of methods are, because a request is plain content.
    local: dict[str, int] | None = None
    prior: int = 10

    @property
    def sizes(self) -> Sizes:
        """Sizes of the pools: the data set's own."""
        return Sizes()

    def to_dict(self) -> dict[str, Any]:
        """The fields as a record has them, where `noise` is the noise of the release."""
        content = _without_defaults(self)
        # Renamed in its place: records keep the order of keys, and in those that exist `noise` precedes the digests.
        return {("noise" if key == "release_noise" else key): value for key, value in content.items()}


# kw_only also because `Request` adds fields without a default behind one that has a default.
@dataclass(frozen=True, kw_only=True)
class TrainingRequest:
    """What decides one training, or the step that is shared in its place.

    Attributes:
        suite: name.
        defense: with all settings.
        budget: what it may spend.
        control: its part as a control; None for a contestant.
        seed: of the suite.
        training: what is trained.
        secure: whether noise and sampler are keyed by the operating system, and not by this request.
    """

    suite: str
    defense: MethodAsked
    budget: Budget
    control: Control | None
    seed: int
    training: Training
    secure: bool = False

    @property
    def never_saw(self) -> bool:
        """Whether it is a negative control, which is trained on others than the members."""
        return self.control == "negative"

    def canonical(self) -> dict[str, Any]:
        """What its results depend on, as plain JSON values."""
        return {
            "schema": SCHEMA,
            "suite": self.suite,
            "defense": self.defense.canonical(),
            "budget": self.budget.to_dict(),
            "control": self.control,
            "seed": self.seed,
            "task": self.training.to_dict(),
            # Absent where noise is seeded, the default, so that those ids stay what they are.
            **({"noise": "secure"} if self.secure else {}),
        }

    def seed_for(self, purpose: str) -> int:
        """A seed for one random process of this training, whatever attack is run on it.

        Args:
            purpose: what is drawn, as "noise".
        """
        # `Request` adds these two; attacks on one training must find the same training.
        content = {key: value for key, value in self.canonical().items() if key not in ("attack", "kind")}
        if self.control == "positive":  # a mark for the board: the same training as without it
            content["control"] = None
        return seed_of(content, purpose)


@dataclass(frozen=True, kw_only=True)
class Request(TrainingRequest):
    """Everything that decides the result of one cell.

    Attributes:
        kind: of its result, as "membership".
        attack: None for utility.
        update: the shared update that is attacked; None where the trained model is.
        no_update: variant of the noise, for the id of a cell that is skipped because the suite shares no update.
    """

    kind: str
    attack: MethodAsked | None = None
    update: Update | None = None
    no_update: Literal["none", "calibrated"] | None = None

    @property
    def id(self) -> str:
        """Name of its record: a hash of the canonical form."""
        return digest_of(self.canonical())

    @property
    def asked_attack(self) -> MethodAsked:
        """The attack of a cell that has one.

        Raises:
            ValueError: it is about utility.
        """
        if self.attack is None:
            raise ValueError(f"a cell of {self.kind} has no attack")
        return self.attack

    @property
    def asked_update(self) -> Update:
        """The shared update of a cell that is about one.

        Raises:
            ValueError: it is about a trained model.
        """
        if self.update is None:
            raise ValueError(f"a cell of {self.kind} here has no shared update")
        return self.update

    @property
    def release_noise(self) -> Literal["none", "calibrated"] | None:
        """Of a shared update, "none" or "calibrated"; None for a trained model."""
        return self.no_update if self.update is None else self.update.release_noise

    @property
    def task(self) -> dict[str, Any]:
        """What is attacked, as plain values: the shared update, or the training."""
        if self.update is not None:
            return self.update.to_dict()
        return self.training.to_dict() if self.no_update is None else {"noise": self.no_update}

    def of_training(self) -> TrainingRequest:
        """The training alone: equal for all cells that attack the same one."""
        # Of the base class, and no copy of this one: instances of two dataclasses are never equal.
        names = [one.name for one in dataclasses.fields(TrainingRequest)]
        return TrainingRequest(**{name: getattr(self, name) for name in names})

    def canonical(self) -> dict[str, Any]:
        """What the result depends on, as plain JSON values."""
        content = super().canonical()
        if self.release_noise is not None:
            # The training stays in it: the noise of the update is calibrated to its sampling and length.
            content |= {"training": content["task"], "task": self.task}
        attack = None if self.attack is None else self.attack.canonical()
        return content | {"kind": self.kind, "attack": attack}


def _without_defaults(instance: Any) -> dict[str, Any]:
    """The fields of a dataclass by name, without those at their default.

    A field with a default factory has no `default`, and is always among them: giving one to a field that exists is
    harmless, a new field with one moves every id.
    """
    return {
        one.name: getattr(instance, one.name)
        for one in dataclasses.fields(instance)
        if one.default is dataclasses.MISSING or getattr(instance, one.name) != one.default
    }
