"""Requests: the full specification of a record, typed and frozen, from which its id and seeds are hashed.

The id is a hash of the request's canonical form, so a run over existing results finds missing records, and adding a
cell to a suite changes no other id. Seeds derive from the same form. Fields, and settings of methods, are omitted at
their default, so introducing a new field changes no existing id. Fields without a default are always included.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any, Literal

from leakbench.benchmarks.core import Sizes
from leakbench.defenses.core import Claim, Noise, seed_from, seeded
from leakbench.defenses.core import secure as secure_noise

from ..catalog.canonical import canonical, recorded
from ..catalog.methods import MethodKind
from ..suite.schema import BUDGETS
from ..suite.task import Training

SCHEMA = 1  # version of the canonical form; part of every id

Control = Literal["positive", "negative", "public_only"]
"""Role of a cell as a control: it must leak (positive), must not (negative), or is trained on public examples alone."""


def digest_of(content: dict[str, Any]) -> str:
    """Returns SHA-256 of plain content, cut to 128 bits, independent of the order of keys."""
    canonical = json.dumps(content, sort_keys=True, allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:32]


def seed_of(content: dict[str, Any], purpose: str) -> int:
    """Returns a seed of 63 bits for a random process, a pure function of plain content and the process's name."""
    return seed_from(json.dumps(content, sort_keys=True), purpose)


def seed_of_data(digest: str, purpose: str) -> int:
    """Returns a seed shared by all cells on the same splits: defenses are compared on the same candidates and targets.

    Args:
        digest: of the splits.
        purpose: name of the random draw, such as "candidates".
    """
    return seed_of({"digest": digest}, purpose)


@dataclass(frozen=True, kw_only=True)
class SeedSet:
    """Seeds of a training's random processes.

    Attributes:
        model: of splits and initial weights, the same for every defense of a suite's seed.
        public: of public randomness, such as masks and augmentation.
        sampler: of the sampler; None for a key from the operating system. Amplification by sampling needs a secret key,
            and a request, from which seeds derive, is in every record.
        noise: of the noise; None for noise from the operating system.
    """

    model: int
    public: int
    sampler: int | None
    noise: int | None

    @classmethod
    def of(cls, content: dict[str, Any], model: int, *, run: str = "", secure: bool = False) -> SeedSet:
        """Returns the seeds of a training.

        Args:
            content: plain content that they derive from.
            model: seed of splits and initial weights.
            run: prefix of the names of its random processes, if several trainings have the same content.
            secure: whether noise and sampler are keyed by the operating system.
        """
        sampler, noise = (None if secure else seed_of(content, f"{run}{purpose}") for purpose in ("sampler", "noise"))
        return cls(model=model, public=seed_of(content, f"{run}coins"), sampler=sampler, noise=noise)

    def noise_source(self) -> Noise:
        """Returns the secret noise at its start."""
        return secure_noise() if self.noise is None else seeded(self.noise)

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments of `train`, with the noise at its start."""
        return {"noise": self.noise_source(), "seed": self.public, "sampler_key": self.sampler}


@dataclass(frozen=True, kw_only=True)
class RequestedMethod:
    """A defense or an attack by name, with all settings resolved.

    Attributes:
        kind: "defenses" or "attacks".
        name: as in a suite file, or the path of a function, `FILE.py:FUNCTION`.
        settings: all settings, without the noise multiplier of a defense.
    """

    kind: MethodKind
    name: str
    # A dictionary, which makes requests unhashable for Python: caches use their JSON.
    settings: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Returns name and settings in record form."""
        return {"name": self.name, "settings": recorded(self.kind, self.name, self.settings)}

    def canonical(self) -> dict[str, Any]:
        """Returns name and the settings that an id depends on."""
        return {"name": self.name, "settings": canonical(self.kind, self.name, self.settings)}


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Privacy budget of a training.

    Attributes:
        epsilon: in nats, the target of noise calibration; None with another target, given noise, or no noise.
        advantage: alternative target, the largest TPR - FPR of a membership test on a single record.
        tpr: alternative target, the largest true positive rate of such a test at `fpr`.
        fpr: false positive rate of `tpr`.
        noise_multiplier: noise standard deviation / sensitivity; None if calibrated, or without noise.
        delta: delta of the (epsilon, delta) guarantee, at which epsilon is computed.
    """

    epsilon: float | None = None
    advantage: float | None = None
    tpr: float | None = None
    fpr: float | None = None
    noise_multiplier: float | None = None
    delta: float

    @property
    def draws_noise(self) -> bool:
        """True if the budget requires noise; a defense without noise has delta only."""
        return any(getattr(self, kind) is not None for kind in BUDGETS)

    @property
    def wanted(self) -> dict[str, float]:
        """The calibration target, as arguments of `calibrate`; empty if the noise is given, or there is none."""
        if self.epsilon is not None:
            return {"epsilon": self.epsilon, "delta": self.delta}
        limits = {"advantage": self.advantage, "tpr": self.tpr, "fpr": self.fpr}
        return {name: value for name, value in limits.items() if value is not None}

    def overspent(self, claim: Claim) -> bool:
        """True if a claim exceeds the budget by more than rounding: calibration ends on the private side."""
        if self.epsilon is not None:
            return claim.epsilon > self.epsilon * (1 + 1e-9)
        if self.advantage is not None:
            return claim.advantage > self.advantage * (1 + 1e-9)
        return self.tpr is not None and self.fpr is not None and claim.tpr_at(self.fpr) > self.tpr * (1 + 1e-9)

    def to_dict(self) -> dict[str, float]:
        """Returns the given fields, by name."""
        return _without_defaults(self)


@dataclass(frozen=True, kw_only=True)
class Update:
    """The attacked shared update, as described by a suite's [share] table.

    Attributes:
        data: name of a data set, or location of the user's own data.
        model: name of an architecture, or path of the user's own model.
        model_settings: settings given by the suite.
        step: number of the shared step.
        steps: planned length, used by schedules; None for a run that ends at the shared step.
        batch: number of examples in it.
        images: number of separate targets, each with its own batch.
        lr: learning rate of the earlier steps, and of local steps.
        release_noise: "none" measures the protection by the release alone; "calibrated" has the noise of the budget.
        data_digest: SHA-256 of the user's own data.
        model_digest: SHA-256 of the user's own architecture.
        local: settings of `LocalTraining`, whose sum of steps is shared; None for a single step. With `message` it has
            the batch of a local step, and the limit of unrolled steps.
        prior: number of candidates for a record of the batch, used only by attacks with a prior.
        message: clients, rounds, local steps and unit of a federated run, of which a client's first message is
            attacked; None for an update of central training.
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
    # A dictionary, like the settings of methods, because a request is plain content.
    local: dict[str, int] | None = None
    prior: int = 10
    message: dict[str, Any] | None = None

    @property
    def sizes(self) -> Sizes:
        """The sizes of the pools: the data set's own."""
        return Sizes()

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields in record form, in which `noise` is the noise of the release."""
        content = _without_defaults(self)
        # Renamed in place: records keep the order of keys, and in existing records `noise` precedes the digests.
        return {("noise" if key == "release_noise" else key): value for key, value in content.items()}


# kw_only also because `Request` adds fields without a default after a field with a default.
@dataclass(frozen=True, kw_only=True)
class TrainingRequest:
    """The specification of a training, or of the step that is shared instead.

    Attributes:
        suite: name of the suite.
        defense: with all settings.
        budget: its privacy budget.
        control: its role as a control; None for a contestant.
        seed: from the suite.
        training: the training settings.
        secure: whether noise and sampler are keyed by the operating system instead of this request.
    """

    suite: str
    defense: RequestedMethod
    budget: Budget
    control: Control | None
    seed: int
    training: Training
    secure: bool = False

    @property
    def never_saw(self) -> bool:
        """True for a negative control, which is not trained on the members."""
        return self.control == "negative"

    def canonical(self) -> dict[str, Any]:
        """Returns everything that its results depend on, as plain JSON values."""
        return {
            "schema": SCHEMA,
            "suite": self.suite,
            "defense": self.defense.canonical(),
            "budget": self.budget.to_dict(),
            "control": self.control,
            "seed": self.seed,
            "task": self.training.to_dict(),
            # Absent for seeded noise, the default, so that those ids stay unchanged.
            **({"noise": "secure"} if self.secure else {}),
        }

    def seed_for(self, purpose: str) -> int:
        """Returns a seed for a random process of this training, the same for every attack on it.

        Args:
            purpose: name of the random draw, such as "noise".
        """
        return seed_of(self._training(), purpose)

    @property
    def seeds(self) -> SeedSet:
        """The seeds of this training, the same for every attack on it."""
        return SeedSet.of(self._training(), self.seed, secure=self.secure)

    def _training(self) -> dict[str, Any]:
        # `Request` adds these two; attacks on the same training must share its seeds.
        content = {key: value for key, value in self.canonical().items() if key not in ("attack", "kind")}
        if self.control == "positive":  # a mark for the board only: the training is the same without it
            content["control"] = None
        return content


@dataclass(frozen=True, kw_only=True)
class Request(TrainingRequest):
    """The full specification of a cell's result.

    Attributes:
        kind: kind of result, such as "membership".
        attack: None for utility.
        update: the attacked shared update; None for an attack on the trained model.
        no_update: noise variant, for the id of a cell that is skipped because the suite shares no update.
    """

    kind: str
    attack: RequestedMethod | None = None
    update: Update | None = None
    no_update: Literal["none", "calibrated"] | None = None

    @property
    def id(self) -> str:
        """Name of its record: a hash of the canonical form."""
        return digest_of(self.canonical())

    @property
    def requested_attack(self) -> RequestedMethod:
        """The attack of a cell that has an attack.

        Raises:
            ValueError: it is a utility cell.
        """
        if self.attack is None:
            raise ValueError(f"a cell of {self.kind} has no attack")
        return self.attack

    @property
    def requested_update(self) -> Update:
        """The shared update of a cell on a shared update.

        Raises:
            ValueError: it is about a trained model.
        """
        if self.update is None:
            raise ValueError(f"a cell of {self.kind} here has no shared update")
        return self.update

    @property
    def release_noise(self) -> Literal["none", "calibrated"] | None:
        """Noise of a shared update, "none" or "calibrated"; None for a trained model."""
        return self.no_update if self.update is None else self.update.release_noise

    @property
    def task(self) -> dict[str, Any]:
        """The attacked object as plain values: the shared update, or the training."""
        if self.update is not None:
            return self.update.to_dict()
        return self.training.to_dict() if self.no_update is None else {"noise": self.no_update}

    def of_training(self) -> TrainingRequest:
        """Returns the training alone: equal for all cells that attack the same training."""
        # An instance of the base class, not a copy of this one: instances of two dataclasses are never equal.
        names = [attribute.name for attribute in dataclasses.fields(TrainingRequest)]
        return TrainingRequest(**{name: getattr(self, name) for name in names})

    def canonical(self) -> dict[str, Any]:
        """Returns everything that the result depends on, as plain JSON values."""
        content = super().canonical()
        if self.release_noise is not None:
            # The training is included, because the noise of the update is calibrated to its sampling and length.
            content |= {"training": content["task"], "task": self.task}
        attack = None if self.attack is None else self.attack.canonical()
        return content | {"kind": self.kind, "attack": attack}


def _without_defaults(instance: Any) -> dict[str, Any]:
    """Returns the fields of a dataclass by name, without those at their default.

    A field with a default factory has no `default`, so it is always included: a new field with a factory changes every
    id.
    """
    return {
        attribute.name: getattr(instance, attribute.name)
        for attribute in dataclasses.fields(instance)
        if attribute.default is dataclasses.MISSING or getattr(instance, attribute.name) != attribute.default
    }
