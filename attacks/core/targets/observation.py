"""Targets, which are all that an attack sees: one shared update, the transcript of a run, or a model to query.

None holds what is to be found out, private inputs or membership. A field that needs more than access, such as the
labels, carries its need in its metadata, and `narrow` withholds it from attacks that did not declare the need. A
defense appears as functions (`simulate`, `contributions`, `residual`), so that an attack is written once for dense,
masked, projected and two-part releases.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, cast, get_args

import torch
from torch import Tensor

from ..membership.matched_filter import MatchedFilter
from ..membership.shadow_models import Shadows
from ..threat_model.attack_errors import InconsistentObservation
from ..threat_model.requires import Access, AccessError, Controls, Knows, Requirements
from .network import Structure

Participation = Literal["known", "independent", "dependent"]
"""What an attacker knows of who takes part in a step; see `Observation.participation`."""


@dataclass(frozen=True, kw_only=True)
class Examples:
    """Labelled examples with an identity.

    Attributes:
        ids: int64 [n], distinct.
        inputs: [n, *shape], in model-input units.
        labels: int64 [n], class indices.
    """

    ids: Tensor
    inputs: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        counts = [len(self.ids), len(self.inputs), len(self.labels)]
        if len(set(counts)) != 1 or self.ids.ndim != 1 or self.labels.ndim != 1:
            raise ValueError(f"ids, inputs and labels must have one entry an example, got {counts} entries")
        for name, values in (("ids", self.ids), ("labels", self.labels)):
            if values.dtype != torch.int64:
                raise ValueError(f"{name} must be int64, got {values.dtype}")
        if self.ids.unique().numel() != self.ids.numel():
            raise ValueError("ids must be distinct, got an id twice: scores are matched to members by id")
        if not self.inputs.isfinite().all():
            raise ValueError("inputs must be finite, got NaN or infinity")

    def __len__(self) -> int:
        return len(self.ids)


class Target:
    """What an attack is called with: a dataclass for each way of looking at a training.

    A field that needs more than the access has `metadata={"needs": ...}`, and `narrow` withholds it from attacks that
    did not declare the need. Another access is another subclass, or another constant in the `accesses` of one.

    Attributes:
        accesses: those for which an attack's target is annotated as this class.
        candidates: whom a membership test is about; None where nobody is asked about.
    """

    accesses: ClassVar[tuple[Access, ...]] = ()
    candidates: Examples | None

    def offered(self) -> Requirements:
        """The threat model that the filled fields amount to; calls none of the functions."""
        return Requirements(access=self.accesses[0], knows=_known(self))

    @property
    def batch_size_shown(self) -> int | None:
        """Size of the batch behind it, also where an attack may not read it; None where there is no batch."""
        return None


@dataclass(frozen=True, kw_only=True)
class Observation(Target):
    """`Access.UPDATE`: one shared update and the public model at which it was taken.

    Attributes:
        released: [m], the noisy sums of all blocks, divided by `expected_batch`, one after another.
        simulate: (inputs [b, *input_shape], labels [b] or class probabilities [b, classes]) -> [m], the
            release without noise that these data would give; differentiable in both arguments.
        contributions: (inputs, labels) -> [n, m], encoded, bounded and undivided, per example; no gradient.
        residual: (predicted [..., m]) -> whitened `released - predicted`; affine in `predicted`, without noise the
            difference.
        logits: inputs -> [n, classes], the model at this step; differentiable in inputs.
        input_shape: shape of one example.
        input_low: smallest valid input, in model-input units.
        input_high: largest valid input.
        classes: number of classes.
        step: index of the step, from 0.
        expected_batch: the public constant that the sums were divided by.
        sample_rate: chance that a record takes part in this step; 1 where participation is known.
        participation: `known`: whom membership is about would have taken part for certain, the rate is 1;
            `independent`: each record joins each step by a coin of its own (Poisson sampling); `dependent`: who
            joins depends on the other records or the other steps (batches of a fixed size, or dealt over an
            epoch), so that ratios of single steps and records do not multiply to that of the run.
        labels: int64 [b] (`Knows.LABELS`).
        batch_size: b (`Knows.BATCH_SIZE`).
        population: public examples (`Knows.POPULATION`).
        noise_std: [m], standard deviation on the *undivided* sums, 0 where there is no noise
            (`Knows.DEFENSE`).
        candidates: whom a membership test is about.
        others_removed: (part, a slice of the candidates; all by default) -> [part, m], per candidate the undivided
            noisy sums less what everybody else contributed, computed anew at each call (`Knows.OTHERS`). Each row is
            what an adversary of its own knows: rows share the noise of the step, so a score may use its own candidate's
            row alone. Those of all may take gigabytes: ask for a few at a time.
        matched_filter: () -> of each candidate's `others_removed` and contribution what their likelihood ratio needs,
            computed without either (`Knows.OTHERS | Knows.DEFENSE`); a score may use its own candidate's numbers alone.
        prior: candidates for one record of the batch, the sought one among them, all as likely before the release and
            in an order that tells nothing (`Knows.PRIOR`).
        remainder: [m], the undivided noisy sums less what everybody but the sought record contributed
            (`Knows.OTHERS`).
        simulate_many: (inputs [r, b, *input_shape], labels of all, or [r, b] or [r, b, classes] of each) -> [r, m]: as
            `simulate` of each of r batches, from one pass over all; None where nobody offers that.
        compare_many: (inputs, labels) as of `simulate_many` -> ([r], [r]), the inner products of the whitened simulated
            with the whitened released update, and squared norms of the former, without the updates themselves; None
            where the release is not dense.
        surrogate: (inputs, labels, share) -> [m], of an update that is the sum of several local steps: what it would be
            without noise if all of them were taken at the point (1 - share) theta_0 + share theta_E, between the
            weights before and after, with `share` a scalar in [0, 1]; differentiable in all three. `simulate` takes the
            steps one after another. None where the update is a single step.
        contributions_between: (inputs, labels, share) -> [n, m], of such a sum: what each example would add to the
            undivided sum in one step, taken at that point. None where the update is a single step.
        structure: () -> the network's operations and parameters, and what each released number is; None where the
            update was not made by a plan.
    """

    accesses: ClassVar[tuple[Access, ...]] = (Access.UPDATE,)

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
    others_removed: Callable[..., Tensor] | None = field(default=None, metadata={"needs": Knows.OTHERS})
    matched_filter: Callable[[], MatchedFilter] | None = field(
        default=None, metadata={"needs": Knows.OTHERS | Knows.DEFENSE}
    )
    prior: Examples | None = field(default=None, metadata={"needs": Knows.PRIOR})
    remainder: Tensor | None = field(default=None, metadata={"needs": Knows.OTHERS})
    structure: Callable[[], Structure] | None = None
    simulate_many: Callable[..., Tensor] | None = None
    compare_many: Callable[..., tuple[Tensor, Tensor]] | None = None
    surrogate: Callable[..., Tensor] | None = None
    contributions_between: Callable[..., Tensor] | None = None

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
        # At rate 1 the subsampled ratio is Lambda itself, which is right only where participation is certain.
        if (self.participation == "known") != (self.sample_rate == 1):
            raise ValueError(
                "participation must be 'known' where sample_rate is 1 and nowhere else, "
                f"got {self.participation!r} at {self.sample_rate}"
            )
        if self.step < 0:
            raise ValueError(f"step must be at least 0, got {self.step}")
        _check_labels("labels", self.labels, self.classes)
        if self.batch_size is not None and self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}")
        # Labels say the size of the batch too, so the two fields must agree.
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
        # Answers are in the order of the candidates.
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
        for name, examples in (
            ("population", self.population),
            ("candidates", self.candidates),
            ("prior", self.prior),
        ):
            _check_examples(name, examples, self.input_shape, self.classes)

    @property
    def batch_size_shown(self) -> int | None:
        """The size of the batch, said by itself or by its labels."""
        return self.batch_size if self.labels is None else len(self.labels)


@dataclass(frozen=True, kw_only=True)
class ModelAccess(Target):
    """`Access.BLACK_BOX` or `Access.WHITE_BOX`: a trained model, in evaluation mode.

    Attributes:
        logits: inputs [n, *input_shape] -> [n, classes].
        input_shape: shape of one example.
        classes: number of classes.
        candidates: whom a membership test is about.
        population: public examples (`Knows.POPULATION`).
        shadows: what shadow models answer about the candidates and the population (`Knows.SHADOWS`).
        parameters: name -> tensor (`Access.WHITE_BOX`).
        gradients_squared: (inputs, labels) -> {name: [n]}, squared norms of the gradient of each example's loss in each
            trained parameter (`Access.WHITE_BOX`).
        controls: what the adversary was allowed to put into training.
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
            _check_examples(name, examples, self.input_shape, self.classes)
        if self.shadows is not None:
            self._check_shadows(self.shadows)

    def _check_shadows(self, shadows: Shadows) -> None:
        for name, answers, of in (
            ("candidates", shadows.logits, self.candidates),
            ("population", shadows.population, self.population),
        ):
            if answers is None:
                continue
            found, wanted = (answers.shape[1], answers.shape[-1]), (answers.shape[1] if of is None else len(of))
            if found != (wanted, self.classes):
                raise ValueError(
                    f"shadow models must answer about the same {name} and classes, {wanted} and {self.classes}, "
                    f"got {found[0]} and {found[1]}"
                )

    def offered(self) -> Requirements:
        """White-box where the parameters are filled."""
        # White-box includes black-box (`Access.includes`), so one target serves both.
        access = Access.BLACK_BOX if self.parameters is None else Access.WHITE_BOX
        return Requirements(access=access, knows=_known(self), controls=self.controls)


@dataclass(frozen=True, kw_only=True)
class LabelAccess(Target):
    """`Access.LABEL_ONLY`: a trained model, in evaluation mode, that answers with its most likely label.

    Attributes:
        labels_of: inputs [n, *input_shape] -> int64 [n], -1 where the model has no answer.
        input_shape: shape of one example.
        input_low: smallest valid input, in model-input units.
        input_high: largest valid input.
        classes: number of classes.
        candidates: whom a membership test is about.
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
            _check_examples(name, examples, self.input_shape, self.classes)


class Steps:
    """Steps that are made anew whenever they are read.

    It holds two functions and nothing that they read, because an attack can name every attribute.
    """

    __slots__ = ("_count", "_read")

    def __init__(self, read: Callable[[], Iterator[Observation]], count: Callable[[], int]) -> None:
        """Wraps a source of steps.

        Args:
            read: gives the steps from the first one on, at every call.
            count: how many there are.
        """
        self._read, self._count = read, count

    def __iter__(self) -> Iterator[Observation]:
        return self._read()

    def __len__(self) -> int:
        return self._count()


@dataclass(frozen=True, kw_only=True)
class SeenTranscript(Target):
    """`Access.ALL_STEPS`: every update of one training run, in order. `Access.ONE_OFF`: its releases beside the steps.

    Attributes:
        steps: one `Observation` a step; may be lazy, but every `iter` starts at the first step again. Empty for
            `Access.ONE_OFF`.
        one_offs: one `Observation` for each release on all the data beside the steps, as that which a mask follows
            from: the noisy values themselves, as they are charged, and not only what was made of them. Everybody took
            part, at the rate 1. As lazy as `steps`.
        candidates: whom a membership test is about, for all steps.
        final: the trained model.
        controls: what the adversary was allowed to put into training.
    """

    accesses: ClassVar[tuple[Access, ...]] = (Access.ALL_STEPS, Access.FEDERATED, Access.ONE_OFF)

    steps: Iterable[Observation]
    one_offs: Iterable[Observation] = ()
    candidates: Examples | None = None
    final: ModelAccess | None = None
    controls: Controls = Controls.NOTHING

    def __post_init__(self) -> None:
        # An iterator would be empty for the second attack on the same run.
        for name, seen in (("steps", self.steps), ("one_offs", self.one_offs)):
            if isinstance(seen, Iterator):
                raise ValueError(
                    f"{name} must be iterable again and again, got an iterator: pass a sequence or a lazy view"
                )

    def offered(self) -> Requirements:
        """What its first step offers; without steps, what its first release beside them does.

        Raises:
            AccessError: it has neither, so there is nothing to attack.
        """
        first = next(iter(self.steps), None)
        if first is None and (beside := next(iter(self.one_offs), None)) is not None:
            return Requirements(access=Access.ONE_OFF, knows=_known(beside), controls=self.controls)
        if first is None:
            raise AccessError(
                "the transcript has no steps, so there is no update to attack, and no release beside them"
            )
        return Requirements(access=Access.ALL_STEPS, knows=_known(first), controls=self.controls)


def _check_labels(name: str, labels: Tensor | None, classes: int) -> None:
    if labels is None:
        return
    if labels.ndim != 1 or labels.dtype != torch.int64:
        raise ValueError(f"{name} must be int64 of shape [n], got {labels.dtype} {list(labels.shape)}")
    if labels.numel() and (int(labels.min()) < 0 or int(labels.max()) >= classes):
        raise ValueError(f"{name} must be in [0, {classes}), got {int(labels.min())} to {int(labels.max())}")


def _check_examples(name: str, examples: Examples | None, input_shape: tuple[int, ...], classes: int) -> None:
    if examples is None:
        return
    if tuple(examples.inputs.shape[1:]) != tuple(input_shape):
        raise ValueError(f"{name} must have inputs of shape {input_shape}, got {tuple(examples.inputs.shape[1:])}")
    _check_labels(f"labels of {name}", examples.labels, classes)


def _known(target: Target) -> Knows:
    """Side knowledge whose fields are filled."""
    known = Knows.NOTHING
    for slot in fields(cast(Any, target)):
        need = slot.metadata.get("needs")
        if isinstance(need, Knows) and getattr(target, slot.name) is not None:
            known |= need
    return known
