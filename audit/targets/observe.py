"""Targets of attacks, made from steps that were executed: the one place where an attacker is given anything.

An `Observation` is built from the step's plan, so dense, masked, projected and two-part releases need no case of their
own here or in any attack. The truth (`scoring.truth`) goes to scorers only. The informed adversary of differential
privacy knows everybody's contribution but the candidate's. That is computed here from the private data and handed out
as a remainder: the noisy sums less everybody else, one row a candidate. The row of somebody who took no part is the
noise, and of somebody who did the noise and one bounded contribution. Who looks for one record of a shared update gets
the one row that is left without the others of its batch.

A target holds copies, and plain functions over copies. None of its attributes leads to what the auditor computes with,
the steps as they were executed and the private data: an attack can neither read those nor change them. Python cannot
hide what a function closes over; the function behind the remainder is the only one that closes over private data, and
`narrow` withholds it from attacks that did not declare to be informed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from leakbench.attacks.core import (
    Controls,
    Examples,
    LabelAccess,
    MatchedFilter,
    ModelAccess,
    NotApplicable,
    Observation,
    Participation,
    ReleasedPart,
    SeenTranscript,
    Shadows,
    Steps,
    Structure,
)
from leakbench.defenses.core import Layout, Loss, Run, Sampling, Step, Views, cross_entropy

from .. import progress_events
from .all_steps import AllSteps
from .candidates import Candidates, copied
from .gradient_norms import GradientNorms
from .local_steps import LocalUpdate
from .observed_step import Observed, refuse_too_many
from .replay import StepReplay
from .residual_noise import LeftOver, Remainders
from .structure import structure

_AT_ONCE = 1024  # inputs a forward pass, which bounds activations whatever the size of the pool


@dataclass(frozen=True, kw_only=True)
class World:
    """What everybody knows about the task: shapes, the box of valid inputs, the loss, public data.

    Attributes:
        input_shape: shape of one input.
        classes: number of classes.
        low: smallest valid input, in model-input units.
        high: largest valid input.
        loss: per-example loss.
        population: public examples, or None.
    """

    input_shape: tuple[int, ...]
    classes: int
    low: float
    high: float
    loss: Loss = cross_entropy
    population: Examples | None = None


def observe(
    step: Step,
    model: nn.Module,
    layout: Layout,
    world: World,
    *,
    labels: Int[Tensor, " b"] | None = None,
    batch_size: int | None = None,
    sample_rate: float = 1.0,
    participation: Participation = "known",
    candidates: Examples | None = None,
    others_removed: Callable[..., Float[Tensor, "part m"]] | None = None,
    matched_filter: Callable[[], MatchedFilter] | None = None,
    prior: Examples | None = None,
    remainder: Float[Tensor, " m"] | None = None,
    views: Views | None = None,
) -> Observation:
    """The target of an attack on one step of a run, or on one shared update.

    Args:
        step: as the trainer's transcript has it, with its plan and noisy blocks; copied.
        model: the architecture, of the attacker's own; its trained parameters are not read.
        layout: order of the flat vectors.
        world: what everybody knows, its population the attacker's own copy.
        labels: labels of the batch, if the attacker may know them; copied.
        batch_size: its size, if the attacker may know it.
        sample_rate: chance that a record takes part; 1 where participation is known.
        participation: what is known of who takes part.
        candidates: whom a membership test is about, as the attacker's own copy.
        others_removed: for the informed adversary, of a slice of the candidates the undivided noisy sums less everybody
            else, one row a candidate.
        matched_filter: what the likelihood ratio of each candidate needs of these rows and its contribution.
        prior: candidates for one record of the batch, as the attacker's own copy.
        remainder: the undivided noisy sums less everybody but that record.
        views: what made the views of examples in this step, of public coins; None where there were none.

    Returns:
        The observation. Of its fields `others_removed` and `matched_filter` alone depend on who is a member.
    """
    # A copy, because the autograd graph behind a differentiable answer leads to the tensors it was computed with.
    seen = Observed(copy.deepcopy(step), model, layout, world.loss, views)
    return Observation(
        released=seen.released,
        # Functions, because a bound method has `seen` as its `__self__`.
        simulate=lambda inputs, labels: seen.simulate(inputs, labels),
        simulate_many=lambda inputs, labels: seen.simulate_many(inputs, labels),
        compare_many=(lambda inputs, labels: seen.compare_many(inputs, labels)) if seen.is_dense else None,
        contributions=lambda inputs, labels: seen.contributions(inputs, labels),
        residual=lambda predicted: seen.residual(predicted),
        logits=lambda inputs: seen.logits(inputs),
        input_shape=world.input_shape,
        input_low=world.low,
        input_high=world.high,
        classes=world.classes,
        step=step.step,
        expected_batch=step.expected_batch,
        sample_rate=sample_rate,
        participation=participation,
        # A clone, because scorers compare with the very tensor that the caller holds.
        labels=None if labels is None else labels.clone(),
        batch_size=batch_size,
        population=world.population,
        noise_std=seen.noise_std,
        candidates=candidates,
        others_removed=others_removed,
        matched_filter=matched_filter,
        prior=prior,
        remainder=remainder,
        structure=lambda: seen.structure(world.input_shape),
    )


def observe_local(
    steps: Sequence[Step],
    model: nn.Module,
    layout: Layout,
    world: World,
    *,
    lr: float,
    max_unroll: int,
    labels: Int[Tensor, " b"] | None = None,
    batch_size: int | None = None,
) -> Observation:
    """The target of an attack on the sum of several local steps of a client.

    Args:
        steps: as they were executed, in order; only their sum, their plans and the parameters before the first of them
            are shown.
        model: the architecture, of the attacker's own; its trained parameters are not read.
        layout: order of the flat vectors.
        world: what everybody knows, its population the attacker's own copy.
        lr: of the client's plain SGD.
        max_unroll: most steps that `simulate` takes.
        labels: labels of the client's examples, in its order, if the attacker may know them; copied.
        batch_size: number of these examples, if the attacker may know it.
    """
    seen = LocalUpdate(steps, model, layout, world.loss, lr=lr, max_unroll=max_unroll)
    dim = layout.dim

    def simulate(inputs: Tensor, labels: Tensor) -> Tensor:
        refuse_too_many(len(inputs), dim)
        return seen.simulate(inputs, labels)

    def surrogate(inputs: Tensor, labels: Tensor, share: Tensor) -> Tensor:
        refuse_too_many(len(inputs), dim)
        return seen.surrogate(inputs, labels, share)

    def between(inputs: Tensor, labels: Tensor, share: Tensor) -> Tensor:
        refuse_too_many(len(inputs), dim)
        return seen.contributions_between(inputs, labels, share)

    def contributed(inputs: Tensor, labels: Tensor) -> Tensor:
        raise NotApplicable(
            f"the sum of {seen.steps} local steps is no sum over examples: what one adds depends on the steps before"
        )

    def equations() -> Structure:
        found = structure(seen.first_plan, model, layout, seen.start, world.loss, world.input_shape)
        words = f"the sum of {seen.steps} local steps"
        size = seen.released.numel()
        return replace(found, parts=(ReleasedPart(start=0, stop=size, kind="other", of_gradient=False, words=words),))

    return Observation(
        released=seen.released,
        simulate=simulate,
        surrogate=surrogate,
        contributions_between=between,
        contributions=contributed,
        residual=lambda predicted: seen.residual(predicted),
        logits=lambda inputs: seen.logits(inputs),
        input_shape=world.input_shape,
        input_low=world.low,
        input_high=world.high,
        classes=world.classes,
        step=steps[0].step,
        expected_batch=seen.expected_batch,
        labels=None if labels is None else labels.clone(),
        batch_size=batch_size,
        population=world.population,
        noise_std=seen.noise_std,
        structure=equations,
    )


@dataclass(frozen=True)
class RunView:
    """A run as the auditor holds it, and its steps as an attacker sees them, one at a time.

    Attributes:
        run: trained with observer="updates".
        world: what everybody knows.
        private: the training data, in the trainer's order: the sampler answers with positions in it.
        sampling: the sampler of the run.
        candidates: whom membership is about; None where nothing is asked.
        informed: whether the attacker knows everybody but the candidate.
        kept: number of a step -> its noise and contributions of candidates. Views of a run share it: each takes the
            gradients of a whole batch to compute.
        shadows: what shadow models answer about the candidates, in their order, and about the population.
        replay: computes the steps once more; views of a run share it, and None makes one for this view.
        controls: what the attacker was allowed to put into the training.
        steps: all of the run's, for attacks that read them; those that the run kept where None.
    """

    run: Run
    world: World
    private: Examples
    sampling: Sampling
    candidates: Candidates | None = None
    informed: bool = True
    kept: dict[int, LeftOver] = field(default_factory=dict)
    shadows: Shadows | None = None
    replay: StepReplay | None = None
    controls: Controls = Controls.NOTHING
    steps: Iterable[Step] | None = None

    def __post_init__(self) -> None:
        # Dropout in training drew other units than an auditor would: contributions could not be computed again.
        for name, module in self.run.model.named_modules():
            if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
                raise ValueError(f"model must have no dropout for attacks on its updates, got '{name}'; set its p to 0")

    @cached_property
    def attackers_model(self) -> nn.Module:
        """A copy of the final model: an attack may write into what it is given, and other cells ask the same run."""
        return copy.deepcopy(self.run.model)

    @cached_property
    def attackers_world(self) -> World:
        """What everybody knows, with a population that is a copy."""
        public = self.world.population
        return self.world if public is None else replace(self.world, population=copied(public))

    @property
    def given(self) -> Examples | None:
        """The candidates as an attack gets them."""
        return None if self.candidates is None else self.candidates.given

    def __len__(self) -> int:
        return len(AllSteps(self.run))

    def __iter__(self) -> Iterator[Observation]:
        total = len(self)
        for number, step in enumerate(AllSteps(self.run) if self.steps is None else self.steps, start=1):
            yield self._at(step)
            progress_events.tell(number, total)  # when the attack asks for the next one

    def at(self, position: int, *, participation_known: bool = False) -> Observation:
        """The observation of one step that the run kept.

        Args:
            position: among those, from 0.
            participation_known: whether the attacker knows who would have taken part; else it knows the rate.
        """
        return self._at(self.run.transcript.steps[position], participation_known=participation_known)

    def _at(self, step: Step, *, participation_known: bool = False) -> Observation:
        # Whoever knows that a candidate would have taken part gains nothing from sampling: nothing amplifies.
        rate = 1.0 if participation_known else self.sampling.rate
        return self._seen(step, rate, "known" if participation_known else participation(self.sampling))

    def one_off(self, position: int) -> Observation:
        """The observation of a release on all the data beside the steps.

        What is shown are its noisy values, as they are charged: a mask follows from them, and tells no more. Everybody
        took part.

        Args:
            position: among such releases, from 0.
        """
        return self._seen(self.run.transcript.one_offs[position], 1.0, "known")

    @property
    def one_offs(self) -> Steps:
        """All of them, made anew whenever they are read."""
        count = len(self.run.transcript.one_offs)
        return Steps(lambda: (self.one_off(position) for position in range(count)), lambda: count)

    def _seen(self, step: Step, rate: float, participation: Participation) -> Observation:
        candidates = self.candidates
        remainder = filtered = None
        # A function, because rows [candidates, m] may take gigabytes: an attack calls it for a few of them at a time.
        if self.informed and candidates is not None:
            replay, asked, remainders = self.replayed, self._asked, self._remainders
            remainder = lambda part=slice(None): remainders.without_others(step, candidates.ids, part)  # noqa: E731 - a name for a partial application
            filtered = lambda: replay.matched_filter(step, asked)  # noqa: E731
        return observe(
            step,
            self.attackers_model,
            self.run.transcript.layout,
            self.attackers_world,
            sample_rate=rate,
            participation=participation,
            candidates=self.given,
            others_removed=remainder,
            matched_filter=filtered,
            views=self._views(step),
        )

    @cached_property
    def replayed(self) -> StepReplay:
        """What computes the steps once more: that of all views of the run, or one of this view's own."""
        # Not set when this is made: a view that replaces another has a sampler, or data, of its own.
        return self.replay or StepReplay(self.run, self.private, self.sampling, self.world.loss)

    @cached_property
    def _asked(self) -> Examples:
        """The candidates as they were before an attack could write into what it is given, under their own ids."""
        assert self.candidates is not None  # noqa: S101  by `at`
        given = self.candidates.given
        return Examples(ids=self.candidates.ids, inputs=given.inputs.clone(), labels=given.labels.clone())

    def _views(self, step: Step) -> Views | None:
        """What made the views of this step: of the run's public coins, without a way to its secret keys."""
        return copy.deepcopy(self.run.views_behind(step))

    def noise(self, step: Step) -> Float[Tensor, " m"]:
        """The noise of a step as the auditor finds it: its noisy sums less everybody's contribution, in float64."""
        if step.one_off is not None:
            # Of everybody: at the price of a pass over the data, where rows would take as many times that as there are.
            return torch.cat(self.replayed.noise(step)).double()
        return self._remainders.noise(step)

    @cached_property
    def _remainders(self) -> Remainders:
        return Remainders(self.run, self.private, self.sampling, self.world.loss, self.kept)


def participation(sampling: Sampling) -> Participation:
    """What is known of who takes part in a step, to somebody who knows the sampler and not its key."""
    if sampling.rate == 1:
        return "known"
    # Poisson alone flips a coin for each record and step; batches of a fixed size, or dealt over an epoch, do not.
    return "independent" if sampling.kind == "poisson" else "dependent"


def every_step(view: RunView) -> SeenTranscript:
    """`Access.ALL_STEPS`: every release of a run, and queries to the final model."""
    # Built when they are read: all observations of a run together would not fit into memory.
    steps = Steps(lambda: iter(view), lambda: len(view))
    return SeenTranscript(
        steps=steps,
        one_offs=view.one_offs,
        candidates=view.given,
        final=black_box(view),
        controls=view.controls,
    )


def beside_the_steps(view: RunView) -> SeenTranscript:
    """`Access.ONE_OFF`: what a run released on all the data beside its steps, and neither steps nor the final model.

    Raises:
        NotApplicable: nothing that an attack could read was.
    """
    if not view.run.transcript.one_offs:
        raise NotApplicable("nothing is released of gradients beside the steps, as the scores behind a mask would be")
    return SeenTranscript(steps=(), one_offs=view.one_offs, candidates=view.given, controls=view.controls)


def last_update(view: RunView) -> Observation:
    """`Access.UPDATE`: the last step of a run, to somebody who knows who would have taken part in it."""
    # The last step is kept whatever it takes.
    return view.at(-1, participation_known=True)


def logits_of(model: nn.Module, inputs: Tensor) -> Float[Tensor, "n classes"]:
    """A model's logits, computed in parts that fit into memory, without gradients."""
    with torch.no_grad():
        return torch.cat([model(part) for part in inputs.split(_AT_ONCE)])


def black_box(view: RunView) -> ModelAccess:
    """`Access.BLACK_BOX`: queries to the final model."""
    return _final(view, white=False)


def white_box(view: RunView) -> ModelAccess:
    """`Access.WHITE_BOX`: queries to the final model, and its parameters."""
    return _final(view, white=True)


def label_only(view: RunView) -> LabelAccess:
    """`Access.LABEL_ONLY`: the labels that the final model answers with."""
    return label_access(view.attackers_model, view.attackers_world, view.given)


def label_access(model: nn.Module, world: World, candidates: Examples | None) -> LabelAccess:
    """The labels that a model answers with, to somebody who has nothing else of it.

    Args:
        model: the attacker's own copy, in evaluation mode.
        world: what everybody knows, its population the attacker's own copy.
        candidates: whom membership is about, as the attacker's own copy.
    """
    return LabelAccess(
        labels_of=lambda inputs: _label_of(logits_of(model, inputs)),
        input_shape=world.input_shape,
        input_low=world.low,
        input_high=world.high,
        classes=world.classes,
        candidates=candidates,
        population=world.population,
    )


def model_access(
    model: nn.Module, world: World, candidates: Examples | None, *, shadows: Shadows | None = None, white: bool = False
) -> ModelAccess:
    """Queries to a model, and its parameters where the attacker has them.

    Args:
        model: the attacker's own copy, in evaluation mode.
        world: what everybody knows, its population the attacker's own copy.
        candidates: whom membership is about, as the attacker's own copy.
        shadows: what shadow models answer about the candidates, in their order, and about the population.
        white: whether the parameters are shown.
    """
    squares = GradientNorms(model, world.loss) if white else None
    return ModelAccess(
        logits=lambda inputs: logits_of(model, inputs),
        input_shape=world.input_shape,
        classes=world.classes,
        candidates=candidates,
        population=world.population,
        shadows=shadows,
        parameters={n: p.detach().clone() for n, p in model.named_parameters()} if white else None,
        gradients_squared=None if squares is None else lambda inputs, labels: squares.of(inputs, labels),
    )


def _label_of(logits: Float[Tensor, "n classes"]) -> Int[Tensor, " n"]:
    # NaN sorts above every number, so that argmax would name a class where the model has no answer.
    return logits.argmax(dim=1).masked_fill(logits.isnan().any(dim=1), -1)


def _final(view: RunView, *, white: bool) -> ModelAccess:
    return model_access(view.attackers_model, view.attackers_world, view.given, shadows=view.shadows, white=white)
