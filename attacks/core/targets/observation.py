"""Targets of attacks: a shared update, a finished model to query, or the transcript of a run.

An `Observation` combines the fields of every update (`SeenUpdate`), of a sum of local steps (`LocalSum`) and of the
informed adversary (`Informed`); each class checks its own fields. A defense appears as functions (`simulate`,
`contributions`, `residual`), so that an attack is written once for dense, masked, projected and two-part releases.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

from torch import Tensor

from ..membership.matched_filter import MatchedFilter
from ..membership.shadow_models import Shadows
from ..threat_model.attack_errors import InconsistentObservation
from ..threat_model.requires import Access, AccessError, Controls, Knows, Requirements
from .network import Structure
from .target import Examples, Target, check_examples, check_labels, known_of

Participation = Literal["known", "independent", "dependent"]
"""Attacker's knowledge of the records that take part in a step; see `SeenUpdate.participation`."""


@dataclass(frozen=True, kw_only=True)
class SeenUpdate:
    """Fields of every observed update: release, model at which it was computed, and side knowledge of its batch.

    Attributes:
        released: [m], the noisy sums of all blocks, concatenated, divided by `expected_batch`.
        simulate: (inputs [b, *input_shape], labels [b] or class probabilities [b, classes]) -> [m], the release without
            noise that these data would give; differentiable in both arguments.
        contributions: (inputs, labels) -> [n, m], encoded, bounded and undivided, per example; no gradient.
        residual: (predicted [..., m]) -> whitened `released - predicted`; affine in `predicted`, without noise the
            difference. The scale of the noise follows from it, even without `Knows.DEFENSE`.
        logits: inputs -> [n, classes], the model at this step; differentiable in inputs.
        input_shape: shape of an example.
        input_low: smallest valid input, in model-input units.
        input_high: largest valid input.
        classes: number of classes.
        step: index of the step, from 0.
        expected_batch: the public constant that the sums were divided by.
        sample_rate: probability that a record takes part in this step; 1 if participation is known.
        participation: `known`: the candidates of the membership test would have taken part for certain, the rate is 1;
            `independent`: each record joins each step by an independent coin (Poisson sampling); `dependent`:
            participation depends on the other records or the other steps (batches of a fixed size, or a partition of
            the data each epoch), so that ratios of single steps and records do not multiply to that of the run.
        labels: int64 [b] (`Knows.LABELS`).
        batch_size: b (`Knows.BATCH_SIZE`).
        population: public examples (`Knows.POPULATION`).
        noise_std: [m], standard deviation on the *undivided* sums, 0 without noise (`Knows.DEFENSE`).
        candidates: candidates of a membership test.
        structure: () -> the network's operations and parameters, and the meaning of each released number; None if the
            update was not made by a plan.
        simulate_many: (inputs [r, b, *input_shape], labels of all, or [r, b] or [r, b, classes] of each) -> [r, m]:
            `simulate` of each of r batches, in a single pass over all; None if not offered.
        compare_many: (inputs, labels) as of `simulate_many` -> ([r], [r]), the inner products of the whitened simulated
            with the whitened released update, and squared norms of the former, without the updates themselves; None if
            the release is not dense.
    """

    released: Tensor
    simulate: Callable[..., Tensor]
    contributions: Callable[..., Tensor]
    residual: Callable[..., Tensor]
    logits: Callable[..., Tensor]
    input_shape: tuple[int, ...]
    input_low: float
    input_high: float
    classes: int
    step: int
    expected_batch: float
    sample_rate: float = 1.0
    participation: Participation = "known"
    labels: Tensor | None = field(default=None, metadata={"needs": Knows.LABELS})
    batch_size: int | None = field(default=None, metadata={"needs": Knows.BATCH_SIZE})
    population: Examples | None = field(default=None, metadata={"needs": Knows.POPULATION})
    noise_std: Tensor | None = field(default=None, metadata={"needs": Knows.DEFENSE})
    candidates: Examples | None = None
    structure: Callable[[], Structure] | None = None
    simulate_many: Callable[..., Tensor] | None = None
    compare_many: Callable[..., tuple[Tensor, Tensor]] | None = None

    def __post_init__(self) -> None:
        if self.released.ndim != 1 or self.released.numel() == 0 or not self.released.is_floating_point():
            raise ValueError(
                f"released must be floats of shape [m], m >= 1, got {self.released.dtype} {list(self.released.shape)}"
            )
        if not self.released.isfinite().all():
            raise InconsistentObservation(
                f"released must be finite, got NaN or infinity at step {self.step}: training diverged"
            )
        if not self.input_low < self.input_high:
            raise ValueError(f"input_low must be below input_high, got {self.input_low} and {self.input_high}")
        if not (math.isfinite(self.expected_batch) and self.expected_batch > 0):
            raise ValueError(f"expected_batch must be positive and finite, got {self.expected_batch}")
        if not 0 < self.sample_rate <= 1:
            raise ValueError(f"sample_rate must be in (0, 1], got {self.sample_rate}")
        if self.participation not in get_args(Participation):
            raise ValueError(f"participation must be one of {get_args(Participation)}, got {self.participation!r}")
        # At rate 1 the subsampled ratio is Lambda itself, which is right only if participation is certain.
        if (self.participation == "known") != (self.sample_rate == 1):
            raise ValueError(
                "participation must be 'known' where sample_rate is 1 and nowhere else, "
                f"got {self.participation!r} at {self.sample_rate}"
            )
        if self.step < 0:
            raise ValueError(f"step must be at least 0, got {self.step}")
        check_labels("labels", self.labels, self.classes)
        if self.batch_size is not None and self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}")
        # Labels reveal the size of the batch too, so the two fields must agree.
        if self.labels is not None and self.batch_size not in (None, len(self.labels)):
            raise ValueError(f"labels must be one an example: {len(self.labels)} for a batch of {self.batch_size}")
        if self.noise_std is not None:
            if self.noise_std.shape != self.released.shape:
                raise ValueError(
                    "noise_std must have one entry a released coordinate, "
                    f"got {list(self.noise_std.shape)} for {list(self.released.shape)}"
                )
            if not (self.noise_std.isfinite() & (self.noise_std >= 0)).all():
                raise ValueError("noise_std must be finite and at least 0 everywhere")
        for name, examples in (("population", self.population), ("candidates", self.candidates)):
            check_examples(name, examples, self.input_shape, self.classes)

    @property
    def batch_size_shown(self) -> int | None:
        """Size of the batch, given by itself or by its labels."""
        return self.batch_size if self.labels is None else len(self.labels)


@dataclass(frozen=True, kw_only=True)
class LocalSum(SeenUpdate):
    """Fields of an update that is the sum of several local steps; None for a single step.

    Attributes:
        surrogate: (inputs, labels, share) -> [m], the update without noise if all steps were taken at the point
            (1 - share) theta_0 + share theta_E, between the weights before and after, with `share` a scalar in [0, 1];
            differentiable in all three. `simulate` takes the steps in turn.
        contributions_between: (inputs, labels, share) -> [n, m], the addition of each example to the undivided sum in
            one step, taken at that point.
    """

    surrogate: Callable[..., Tensor] | None = None
    contributions_between: Callable[..., Tensor] | None = None


@dataclass(frozen=True, kw_only=True)
class Informed(SeenUpdate):
    """Fields of the informed adversary: the release less all other contributions, and candidates for a record.

    Attributes:
        others_removed: (part, a slice of the candidates; all by default) -> [part, m], per candidate the undivided
            noisy sums less all contributions but the candidate's, computed anew at each call (`Knows.OTHERS`). Each row
            is the knowledge of a separate adversary, and rows share the noise of the step: a candidate's score may use
            its own row only. All rows may take gigabytes: request a few at a time.
        matched_filter: () -> sufficient statistics of each candidate's likelihood ratio, computed without its rows of
            `others_removed` and contributions (`Knows.OTHERS | Knows.DEFENSE`); a candidate's score may use its own
            statistics only.
        prior: candidates for a record of the batch, the sought record among them, equally likely before the release and
            in an order that carries no information (`Knows.PRIOR`).
        remainder: [m], the undivided noisy sums less the contributions of all but the sought record (`Knows.OTHERS`).
    """

    others_removed: Callable[..., Tensor] | None = field(default=None, metadata={"needs": Knows.OTHERS})
    matched_filter: Callable[[], MatchedFilter] | None = field(
        default=None, metadata={"needs": Knows.OTHERS | Knows.DEFENSE}
    )
    prior: Examples | None = field(default=None, metadata={"needs": Knows.PRIOR})
    remainder: Tensor | None = field(default=None, metadata={"needs": Knows.OTHERS})

    def __post_init__(self) -> None:
        super().__post_init__()
        # Both answer in the order of the candidates.
        for name, answers in (("others_removed", self.others_removed), ("matched_filter", self.matched_filter)):
            if answers is not None and self.candidates is None:
                raise ValueError(f"{name} answers for candidates, and this observation has none")
        if self.prior is not None and len(self.prior) < 2:
            raise ValueError(f"prior must have at least 2 candidates to choose from, got {len(self.prior)}")
        if self.remainder is not None and (
            self.remainder.shape != self.released.shape or not self.remainder.isfinite().all()
        ):
            raise ValueError(
                "remainder must be finite with one entry a released coordinate, "
                f"got {list(self.remainder.shape)} for {list(self.released.shape)}"
            )
        check_examples("prior", self.prior, self.input_shape, self.classes)


@dataclass(frozen=True, kw_only=True)
class Observation(LocalSum, Informed, Target):
    """`Access.UPDATE`: a shared update, the public model at which it was computed, and any further knowledge."""

    accesses: ClassVar[tuple[Access, ...]] = (Access.UPDATE,)


@dataclass(frozen=True, kw_only=True)
class ModelAccess(Target):
    """`Access.BLACK_BOX` or `Access.WHITE_BOX`: a trained model, in evaluation mode.

    Attributes:
        logits: inputs [n, *input_shape] -> [n, classes].
        input_shape: shape of an example.
        classes: number of classes.
        candidates: candidates of a membership test.
        population: public examples (`Knows.POPULATION`).
        shadows: outputs of shadow models on the candidates and the population (`Knows.SHADOWS`).
        parameters: name -> tensor (`Access.WHITE_BOX`).
        gradients_squared: (inputs, labels) -> {name: [n]}, squared norms of the gradient of each example's loss in each
            trained parameter (`Access.WHITE_BOX`).
        controls: the adversary's influence on the training data.
    """

    accesses: ClassVar[tuple[Access, ...]] = (Access.BLACK_BOX, Access.WHITE_BOX)

    logits: Callable[..., Tensor]
    input_shape: tuple[int, ...]
    classes: int
    candidates: Examples | None = None
    population: Examples | None = field(default=None, metadata={"needs": Knows.POPULATION})
    shadows: Shadows | None = field(default=None, metadata={"needs": Knows.SHADOWS})
    parameters: Mapping[str, Tensor] | None = field(default=None, metadata={"needs": Access.WHITE_BOX})
    gradients_squared: Callable[..., dict[str, Tensor]] | None = field(
        default=None, metadata={"needs": Access.WHITE_BOX}
    )
    controls: Controls = Controls.NOTHING

    def __post_init__(self) -> None:
        for name, examples in (("population", self.population), ("candidates", self.candidates)):
            check_examples(name, examples, self.input_shape, self.classes)
        if self.shadows is not None:
            self._check_shadows(self.shadows)

    def _check_shadows(self, shadows: Shadows) -> None:
        for name, answers, of in (
            ("candidates", shadows.logits, self.candidates),
            ("population", shadows.population, self.population),
        ):
            if answers is None:
                continue
            shape, examples = (answers.shape[1], answers.shape[-1]), (answers.shape[1] if of is None else len(of))
            if shape != (examples, self.classes):
                raise ValueError(
                    f"shadow models must answer about the same {name} and classes, {examples} and {self.classes}, "
                    f"got {shape[0]} and {shape[1]}"
                )

    def offered(self) -> Requirements:
        """Returns a threat model with white-box access if `parameters` is filled, else with black-box access."""
        # White-box includes black-box (`Access.includes`), so the same target serves both.
        access = Access.BLACK_BOX if self.parameters is None else Access.WHITE_BOX
        return Requirements(access=access, knows=known_of(self), controls=self.controls)


@dataclass(frozen=True, kw_only=True)
class LabelAccess(Target):
    """`Access.LABEL_ONLY`: a trained model, in evaluation mode, that answers with its most likely label.

    Attributes:
        labels_of: inputs [n, *input_shape] -> int64 [n], -1 if the model has no answer.
        input_shape: shape of an example.
        input_low: smallest valid input, in model-input units.
        input_high: largest valid input.
        classes: number of classes.
        candidates: candidates of a membership test.
        population: public examples (`Knows.POPULATION`).
    """

    accesses: ClassVar[tuple[Access, ...]] = (Access.LABEL_ONLY,)

    labels_of: Callable[..., Tensor]
    input_shape: tuple[int, ...]
    input_low: float
    input_high: float
    classes: int
    candidates: Examples | None = None
    population: Examples | None = field(default=None, metadata={"needs": Knows.POPULATION})

    def __post_init__(self) -> None:
        for name, examples in (("population", self.population), ("candidates", self.candidates)):
            check_examples(name, examples, self.input_shape, self.classes)


class Steps:
    """Lazy sequence of steps, models or messages, recomputed at each iteration.

    The object holds two functions and none of their data, because an attack can read every attribute.
    """

    __slots__ = ("_count", "_read")

    def __init__(self, read: Callable[[], Iterator[Any]], count: Callable[[], int]) -> None:
        """Wraps a source of steps.

        Args:
            read: returns an iterator from the first step on, at every call.
            count: returns the number of steps.
        """
        self._read, self._count = read, count

    def __iter__(self) -> Iterator[Any]:
        return self._read()

    def __len__(self) -> int:
        return self._count()


@dataclass(frozen=True, kw_only=True)
class SeenModels(Target):
    """`Access.BROADCAST`: the model before every step of a training, or before every round of a federated one.

    Attributes:
        models: the models in order; may be lazy, but every `iter` starts at the first model again.
        candidates: candidates of a membership test, for all models.
        final: the trained model.
        controls: the adversary's influence on the training data.
    """

    accesses: ClassVar[tuple[Access, ...]] = (Access.BROADCAST,)

    models: Iterable[ModelAccess] = ()
    candidates: Examples | None = None
    final: ModelAccess | None = None
    controls: Controls = Controls.NOTHING

    def __post_init__(self) -> None:
        refuse_iterators(models=self.models)

    def offered(self) -> Requirements:
        """Returns the threat model of the first model.

        Raises:
            AccessError: there is no model.
        """
        first = next(iter(self.models), None)
        if first is None:
            raise AccessError("the training has no models to query")
        return Requirements(access=self.accesses[0], knows=known_of(first), controls=self.controls)


@dataclass(frozen=True, kw_only=True)
class SeenTranscript(SeenModels, Target):
    """`Access.ALL_STEPS`: every update of a training run, in order. `Access.ONE_OFF`: its one-off releases.

    Attributes:
        steps: an `Observation` per step; may be lazy, but every `iter` starts at the first step again. Empty for
            `Access.ONE_OFF`.
        one_offs: an `Observation` for each release outside of the steps, computed on all the data: the noisy values
            that the ledger charges for, such as the scores behind a mask, and not only the mask. Every record takes
            part, at sample rate 1. May be lazy, as `steps`.
        models: the models of the steps, derived from them.
        candidates: candidates of a membership test, for all steps.
        final: the trained model.
        controls: the adversary's influence on the training data.
    """

    accesses: ClassVar[tuple[Access, ...]] = (Access.ALL_STEPS, Access.ONE_OFF)

    steps: Iterable[Observation] = field(default=(), metadata={"needs": Access.ALL_STEPS})
    one_offs: Iterable[Observation] = field(default=(), metadata={"needs": Access.ONE_OFF})

    def __post_init__(self) -> None:
        refuse_iterators(steps=self.steps, one_offs=self.one_offs)
        steps = self.steps
        # Lazy: all observations of a run together would not fit into memory.
        models = Steps(lambda: (_model_of(step) for step in steps), lambda: len(steps))  # pyright: ignore[reportArgumentType] - a sequence, or lazy with a length
        object.__setattr__(self, "models", models)

    def offered(self) -> Requirements:
        """Returns the threat model of the first step; without steps, that of the first one-off release.

        Raises:
            AccessError: neither exists, so there is nothing to attack.
        """
        first = next(iter(self.steps), None)
        if first is None and (beside := next(iter(self.one_offs), None)) is not None:
            return Requirements(access=Access.ONE_OFF, knows=known_of(beside), controls=self.controls)
        if first is None:
            raise AccessError(
                "the transcript has no steps, so there is no update to attack, and no release beside them"
            )
        return Requirements(access=Access.ALL_STEPS, knows=known_of(first), controls=self.controls)


def _model_of(step: Observation) -> ModelAccess:
    """Returns queries to the model before a step."""
    return ModelAccess(logits=step.logits, input_shape=step.input_shape, classes=step.classes)


def refuse_iterators(**sequences: Iterable[object]) -> None:
    """Raises ValueError for an iterator, which would be exhausted for the second attack on the same run."""
    for name, sequence in sequences.items():
        if isinstance(sequence, Iterator):
            raise ValueError(
                f"{name} must be iterable again and again, got an iterator: pass a sequence or a lazy view"
            )
