"""Targets of attacks, built from executed training steps. All data that an attack receives passes through here.

An `Observation` is built from the step's plan, so dense, masked, projected and two-part releases need no special case
here or in any attack. The ground truth (`scoring.truth`) goes to scorers only. The informed adversary of differential
privacy knows every contribution but the candidate's. Its view is computed here from the private data and handed out as
a remainder: the noisy sums minus the contributions of all other records, a row per candidate. The row of a
non-participant is the noise; the row of a participant is the noise plus one bounded contribution. An attack on one
record of a shared update gets the single row that remains without the rest of its batch.

A target holds copies, and plain functions over copies. No attribute leads to the auditor's own objects, the executed
steps and the private data, so an attack can neither read nor change them. Python cannot hide the variables that a
function closes over. Only the functions of the informed adversary, `others_removed` and `matched_filter`, close over
private data, and `narrow` withholds them from attacks that do not declare this adversary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from leakbench.attacks.core import (
    Controls,
    Examples,
    LabelAccess,
    ModelAccess,
    NotApplicable,
    Observation,
    Participation,
    ReleasedPart,
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
from .residual_noise import Remainders, ResidualNoise
from .structure import structure

_AT_ONCE = 1024  # inputs per forward pass; bounds the memory for activations whatever the size of the pool


@dataclass(frozen=True, kw_only=True)
class PublicKnowledge:
    """The attacker's public knowledge about the task: shapes, valid input range, loss, public data.

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
    public_knowledge: PublicKnowledge,
    *,
    labels: Int[Tensor, " b"] | None = None,
    views: Views | None = None,
    **granted: Any,
) -> Observation:
    """Returns the target of an attack on a training step, or on a shared update.

    Args:
        step: from the trainer's transcript, with plan and noisy blocks; copied.
        model: the attacker's own copy of the architecture; its trained parameters are not read.
        layout: order of the flat vectors.
        public_knowledge: public knowledge; its population is the attacker's own copy.
        labels: labels of the batch, if the attacker may know them; copied.
        views: augmentation used in this step, from public randomness; None without augmentation.
        **granted: fields of `Observation` that the attacker gets besides, such as the batch size, the sample rate,
            candidates, and those of the informed adversary; examples are the attacker's own copies.

    Returns:
        The observation. Only its functions `others_removed` and `matched_filter` read private data.
    """
    # A copy, because the autograd graph behind a differentiable answer leads to the tensors of the computation.
    observed = Observed(copy.deepcopy(step), model, layout, public_knowledge.loss, views)
    return Observation(
        released=observed.released,
        # Functions, because a bound method would expose `observed` as its `__self__`.
        simulate=lambda inputs, labels: observed.simulate(inputs, labels),
        simulate_many=lambda inputs, labels: observed.simulate_many(inputs, labels),
        compare_many=(lambda inputs, labels: observed.compare_many(inputs, labels)) if observed.is_dense else None,
        contributions=lambda inputs, labels: observed.contributions(inputs, labels),
        residual=lambda predicted: observed.residual(predicted),
        logits=lambda inputs: observed.logits(inputs),
        input_shape=public_knowledge.input_shape,
        input_low=public_knowledge.low,
        input_high=public_knowledge.high,
        classes=public_knowledge.classes,
        step=step.step,
        expected_batch=step.expected_batch,
        # A clone, because scorers compare with the caller's tensor.
        labels=None if labels is None else labels.clone(),
        population=public_knowledge.population,
        noise_std=observed.noise_std,
        structure=lambda: observed.structure(public_knowledge.input_shape),
        **granted,
    )


def observe_local(
    steps: Sequence[Step],
    model: nn.Module,
    layout: Layout,
    public_knowledge: PublicKnowledge,
    *,
    lr: float,
    max_unroll: int,
    labels: Int[Tensor, " b"] | None = None,
    batch_size: int | None = None,
) -> Observation:
    """Returns the target of an attack on the sum of several local steps of a client.

    Args:
        steps: executed steps in order; only their sum, their plans and the parameters before the first step are shown.
        model: the attacker's own copy of the architecture; its trained parameters are not read.
        layout: order of the flat vectors.
        public_knowledge: public knowledge; its population is the attacker's own copy.
        lr: learning rate of the client's plain SGD.
        max_unroll: largest number of steps that `simulate` takes.
        labels: labels of the client's examples, in its order, if the attacker may know them; copied.
        batch_size: number of these examples, if the attacker may know it.
    """
    local_update = LocalUpdate(steps, model, layout, public_knowledge.loss, lr=lr, max_unroll=max_unroll)

    def limited(answer: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def answer_about(inputs: Tensor, labels: Tensor, *share: Tensor) -> Tensor:
            refuse_too_many(len(inputs), layout.dim)
            return answer(inputs, labels, *share)

        return answer_about

    def contributed(inputs: Tensor, labels: Tensor) -> Tensor:
        raise NotApplicable(
            f"the sum of {local_update.steps} local steps is no sum over examples: what one adds depends "
            "on the steps before"
        )

    def equations() -> Structure:
        first_structure = structure(
            local_update.first_plan,
            model,
            layout,
            local_update.start,
            public_knowledge.loss,
            public_knowledge.input_shape,
        )
        words = f"the sum of {local_update.steps} local steps"
        part = ReleasedPart(start=0, stop=local_update.released.numel(), kind="other", of_gradient=False, words=words)
        return replace(first_structure, parts=(part,))

    return Observation(
        released=local_update.released,
        simulate=limited(local_update.simulate),
        surrogate=limited(local_update.surrogate),
        contributions_between=limited(local_update.contributions_between),
        contributions=contributed,
        residual=lambda predicted: local_update.residual(predicted),
        logits=lambda inputs: local_update.logits(inputs),
        input_shape=public_knowledge.input_shape,
        input_low=public_knowledge.low,
        input_high=public_knowledge.high,
        classes=public_knowledge.classes,
        step=steps[0].step,
        expected_batch=local_update.expected_batch,
        labels=None if labels is None else labels.clone(),
        batch_size=batch_size,
        population=public_knowledge.population,
        noise_std=local_update.noise_std,
        structure=equations,
    )


@dataclass(frozen=True)
class RunView:
    """An executed run held by the auditor, which yields the attacker's view of each step.

    Attributes:
        run: trained with observer="updates".
        public_knowledge: public knowledge.
        private: the training data, in the trainer's order: the sampler returns positions in it.
        sampling: the sampler of the run.
        candidates: candidates of the membership test; None without a test.
        informed: whether the attacker knows every record but the candidate.
        kept: `Step.key` -> its noise and the contributions of candidates. Views of a run share it, because each entry
            costs the gradients of a whole batch.
        shadows: outputs of shadow models on the candidates, in their order, and on the population.
        replay: recomputes the steps; shared by the views of a run. None makes a new `StepReplay` for this view.
        controls: the attacker's permitted control over the training.
        steps: all steps of the run, for attacks that read them; None for the steps in the transcript.
    """

    run: Run
    public_knowledge: PublicKnowledge
    private: Examples
    sampling: Sampling
    candidates: Candidates | None = None
    informed: bool = True
    kept: dict[int, ResidualNoise] = field(default_factory=dict)
    shadows: Shadows | None = None
    replay: StepReplay | None = None
    controls: Controls = Controls.NOTHING
    steps: Iterable[Step] | None = None

    def __post_init__(self) -> None:
        # Training drew other dropout masks than the auditor would, so contributions could not be recomputed.
        for name, module in self.run.model.named_modules():
            if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
                raise ValueError(f"model must have no dropout for attacks on its updates, got '{name}'; set its p to 0")

    @cached_property
    def attackers_model(self) -> nn.Module:
        """A copy of the final model: an attack may write into its inputs, and other cells read the same run."""
        return copy.deepcopy(self.run.model)

    @cached_property
    def attackers_knowledge(self) -> PublicKnowledge:
        """The public knowledge, with a copied population."""
        public = self.public_knowledge.population
        return self.public_knowledge if public is None else replace(self.public_knowledge, population=copied(public))

    @property
    def given(self) -> Examples | None:
        """The attacker's copy of the candidates."""
        return None if self.candidates is None else self.candidates.given

    def __len__(self) -> int:
        return len(AllSteps(self.run))

    def __iter__(self) -> Iterator[Observation]:
        total = len(self)
        for number, step in enumerate(AllSteps(self.run) if self.steps is None else self.steps, start=1):
            yield self._at(step)
            progress_events.tell(number, total)  # when the attack asks for the next step

    def at(self, position: int, *, participation_known: bool = False) -> Observation:
        """Returns the observation of a step in the transcript.

        Args:
            position: position in the transcript, from 0.
            participation_known: whether the attacker knows which records would take part; else it knows the rate.
        """
        return self._at(self.run.transcript.steps[position], participation_known=participation_known)

    def _at(self, step: Step, *, participation_known: bool = False) -> Observation:
        # No amplification by sampling: this attacker knows whether a candidate would have taken part.
        rate = 1.0 if participation_known else self.sampling.rate
        return self._seen(step, rate, "known" if participation_known else participation(self.sampling))

    def one_off(self, position: int) -> Observation:
        """Returns the observation of a one-off release on the whole training set.

        The observation shows the noisy values, as charged by the ledger: a mask is a function of them and reveals no
        more. All records took part.

        Args:
            position: position among the one-off releases, from 0.
        """
        return self._seen(self.run.transcript.one_offs[position], 1.0, "known")

    @property
    def one_offs(self) -> Steps:
        """All one-off releases, built anew at each read."""
        count = len(self.run.transcript.one_offs)
        return Steps(lambda: (self.one_off(position) for position in range(count)), lambda: count)

    def _seen(self, step: Step, rate: float, participation: Participation) -> Observation:
        candidates = self.candidates
        remainder = filtered = None
        # A function, because all rows, [candidates, m], may take gigabytes: an attack calls it for a few at a time.
        if self.informed and candidates is not None:
            replay, auditors_candidates, remainders = self.replayed, self._asked, self._remainders
            remainder = lambda part=slice(None): remainders.without_others(step, candidates.ids, part)  # noqa: E731 - a name for a partial application
            filtered = lambda: replay.matched_filter(step, auditors_candidates)  # noqa: E731
        return observe(
            step,
            self.attackers_model,
            self.run.transcript.layout,
            self.attackers_knowledge,
            sample_rate=rate,
            participation=participation,
            candidates=self.given,
            others_removed=remainder,
            matched_filter=filtered,
            views=self._views(step),
        )

    @cached_property
    def replayed(self) -> StepReplay:
        """The recomputation shared by all views of the run, or a new `StepReplay` for this view."""
        # Not stored at construction: a view derived by `replace` may have another sampler or other data.
        return self.replay or StepReplay(self.run, self.private, self.sampling, self.public_knowledge.loss)

    @cached_property
    def _asked(self) -> Examples:
        """The candidates under their own ids, copied before an attack can write into its inputs."""
        assert self.candidates is not None  # noqa: S101  by `at`
        shown = self.candidates.given
        return Examples(ids=self.candidates.ids, inputs=shown.inputs.clone(), labels=shown.labels.clone())

    def _views(self, step: Step) -> Views | None:
        """Returns the augmentation of this step, made from the run's public randomness without secret keys."""
        return copy.deepcopy(self.run.views_behind(step))

    def noise(self, step: Step) -> Float[Tensor, " m"]:
        """Returns the noise of a step, recomputed in float64: its noisy sums minus all contributions.

        For a one-off release, the noise is rounded to the dtype of the sums.
        """
        if step.one_off is not None:
            # All records take part: clipped sums take a pass over the data, without a row in memory per record.
            return torch.cat(self.replayed.noise(step)).double()
        return self._remainders.noise(step)

    @cached_property
    def _remainders(self) -> Remainders:
        return Remainders(self.run, self.private, self.sampling, self.public_knowledge.loss, self.kept)


def participation(sampling: Sampling) -> Participation:
    """Returns the knowledge about participation of an attacker who knows the sampler but not its key."""
    if sampling.rate == 1:
        return "known"
    # Only Poisson sampling is independent per record and step; fixed-size batches and epoch partitions are not.
    return "independent" if sampling.kind == "poisson" else "dependent"


def logits_of(model: nn.Module, inputs: Tensor) -> Float[Tensor, "n classes"]:
    """Returns a model's logits, computed in chunks that fit into memory, without gradients."""
    with torch.no_grad():
        return torch.cat([model(part) for part in inputs.split(_AT_ONCE)])


@dataclass(frozen=True)
class FinalView:
    """A finished model, of whose training nothing is known, with the fields that an attack reads of a `RunView`.

    Attributes:
        attackers_model: the attacker's own copy, in evaluation mode.
        attackers_knowledge: public knowledge; its population is the attacker's own copy.
        given: candidates of the membership test, as the attacker's own copy.
        shadows: outputs of shadow models on the candidates, in their order, and on the population.
    """

    attackers_model: nn.Module
    attackers_knowledge: PublicKnowledge
    given: Examples | None
    shadows: Shadows | None = None


def label_access(view: RunView | FinalView) -> LabelAccess:
    """Returns label-only access to the final model of a view."""
    model, public_knowledge = view.attackers_model, view.attackers_knowledge
    return LabelAccess(
        labels_of=lambda inputs: _label_of(logits_of(model, inputs)),
        input_shape=public_knowledge.input_shape,
        input_low=public_knowledge.low,
        input_high=public_knowledge.high,
        classes=public_knowledge.classes,
        candidates=view.given,
        population=public_knowledge.population,
    )


def model_access(view: RunView | FinalView, *, white: bool = False) -> ModelAccess:
    """Returns query access to the final model of a view, with its parameters if `white`."""
    model, public_knowledge = view.attackers_model, view.attackers_knowledge
    squares = GradientNorms(model, public_knowledge.loss) if white else None
    return ModelAccess(
        logits=lambda inputs: logits_of(model, inputs),
        input_shape=public_knowledge.input_shape,
        classes=public_knowledge.classes,
        candidates=view.given,
        population=public_knowledge.population,
        shadows=view.shadows,
        parameters={n: p.detach().clone() for n, p in model.named_parameters()} if white else None,
        gradients_squared=None if squares is None else lambda inputs, labels: squares.of(inputs, labels),
    )


def _label_of(logits: Float[Tensor, "n classes"]) -> Int[Tensor, " n"]:
    # NaN sorts above every number, so argmax would return a class for an output without a prediction.
    return logits.argmax(dim=1).masked_fill(logits.isnan().any(dim=1), -1)
