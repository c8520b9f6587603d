"""From a step that was executed to what an attacker is given: the one place where an attacker gets anything.

An `Observation` is built from the step's plan, so dense, masked, projected and two-part releases need no case of their
own here or in any attack. The truth (`GroundTruth`) goes to scorers only. What the informed adversary of differential
privacy knows, everybody's contribution but the candidate's, is computed here from the private data and handed out as a
remainder per candidate, which looks the same for members and non-members when nothing leaks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cache

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from attacks.core import Examples, ModelAccess, Observation
from attacks.core import Transcript as SeenTranscript
from defenses.core import (
    Layout,
    Loss,
    Run,
    Sampling,
    Step,
    contributions,
    cross_entropy,
    outputs,
    per_example_gradients,
)

_AT_ONCE = 1024  # inputs a forward pass
_ROWS = 2**26  # numbers of per-example gradients in memory where they can be cut up
_MOST = 2**30  # ... and where they cannot


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


@dataclass(frozen=True, kw_only=True)
class GroundTruth:
    """What attackers try to find out; only scorers get it.

    Attributes:
        inputs: the private inputs behind an update [b, *shape]; None for membership.
        labels: their labels [b].
        members: ids of the examples that took part; None for reconstruction.
        low: smallest valid input, in model-input units.
        high: largest valid input.
        floor: the best guess without looking at the update, the mean public image; None without public data.
        labels_given: whether the attacker was told the labels.
    """

    inputs: Tensor | None = None
    labels: Int[Tensor, " b"] | None = None
    members: Int[Tensor, " n"] | None = None
    low: float = 0.0
    high: float = 1.0
    floor: Tensor | None = None
    labels_given: bool = True

    def membership(self, ids: Int[Tensor, " n"]) -> Bool[Tensor, " n"]:
        """Which of these examples took part."""
        if self.members is None:
            raise ValueError("this truth is about reconstruction, it has no members")
        return torch.isin(ids.cpu(), self.members.cpu())


def observe(
    step: Step,
    model: nn.Module,
    layout: Layout,
    world: World,
    *,
    labels: Int[Tensor, " b"] | None = None,
    batch_size: int | None = None,
    sample_rate: float | None = None,
    candidates: Examples | None = None,
    others_removed: Callable[[Observed], Float[Tensor, "n m"]] | None = None,
) -> Observation:
    """What one shared update shows.

    Args:
        step: as the trainer's transcript has it, with its plan and noisy blocks.
        model: the architecture; its parameters are not read.
        layout: order of the flat vectors.
        world: what everybody knows.
        labels: labels of the batch, if the attacker may know them.
        batch_size: its size, if the attacker may know it.
        sample_rate: chance that a record takes part; the step's own where None, 1 where participation is known.
        candidates: whom a membership test is about.
        others_removed: for the informed adversary, the sums minus everybody else, per candidate.

    Returns:
        The observation; nothing in it was computed from who is a member, but `others_removed`.
    """
    seen = Observed(step, model, layout, world.loss)
    remainder = None
    if others_removed is not None:
        given = others_removed  # narrowed for the closure
        remainder = lambda: given(seen)  # noqa: E731 - a name for a partial application
    return Observation(
        released=seen.released,
        simulate=seen.simulate,
        contributions=seen.contributions,
        residual=seen.residual,
        logits=seen.logits,
        input_shape=world.input_shape,
        input_low=world.low,
        input_high=world.high,
        classes=world.classes,
        step=step.step,
        divisor=step.divisor,
        sample_rate=step.sample_rate if sample_rate is None else sample_rate,
        labels=labels,
        batch_size=batch_size,
        population=world.population,
        noise_std=seen.noise_std,
        candidates=candidates,
        others_removed=remainder,
    )


class Observed:
    """One executed step as functions of data: what data would have contributed and released there.

    Attributes:
        sums: [m], the undivided noisy sums of all blocks, one after another.
        noise_std: [m], standard deviation of the noise on them.
    """

    def __init__(self, step: Step, model: nn.Module, layout: Layout, loss: Loss) -> None:
        """Takes a step recorded for the `updates` observer.

        Raises:
            ValueError: when the transcript kept no releases.
        """
        if step.plan is None or step.noisy is None:
            raise ValueError(f"step {step.step} must have its releases, got none; train with observer='updates'")
        self._step, self._plan, self._model, self._layout, self._loss = step, step.plan, model, layout, loss
        self.sums = torch.cat(step.noisy)
        sizes = [noisy.numel() for noisy in step.noisy]
        stds = [block.noise_std(step.noise_multiplier) for block in self._plan.blocks]
        self.noise_std = torch.cat([self.sums.new_full((n,), std) for n, std in zip(sizes, stds, strict=True)])
        self._sizes = sizes
        self._whitening = torch.where(self.noise_std > 0, step.divisor / self.noise_std.clamp(min=1e-30), 1.0)
        self._remembered: tuple[Tensor, Tensor, Tensor] | None = None

    @property
    def released(self) -> Float[Tensor, " m"]:
        """The divided release."""
        return self.sums / self._step.divisor

    def rows(self, inputs: Tensor, labels: Tensor) -> Float[Tensor, "n m"]:
        """Per-example contributions of these data, differentiable.

        Raises:
            ValueError: where their gradients would take more memory than there usually is.
        """
        most = _MOST // self._layout.dim
        if len(inputs) > max(most, 1):
            raise ValueError(
                f"gradients of {len(inputs)} examples in {self._layout.dim} parameters take "
                f"{4 * len(inputs) * self._layout.dim / 2**30:.1f} GiB, and {4 * _MOST / 2**30:.0f} are allowed; "
                f"set task.candidates to {max(most // 2, 1)} or fewer, or take a smaller model"
            )

        def gradients(point: Tensor | None) -> Tensor:
            at = self._step.parameters if point is None else point
            return per_example_gradients(self._model, self._loss, self._layout, inputs, labels, parameters=at)

        return torch.cat(contributions(self._plan, gradients), dim=1)

    def simulate(self, inputs: Tensor, labels: Tensor) -> Float[Tensor, " m"]:
        """The release without noise that these data would give."""
        return self.rows(inputs, labels).sum(dim=0) / self._step.divisor

    def contributions(self, inputs: Tensor, labels: Tensor) -> Float[Tensor, "n m"]:
        """Per-example contributions; those of the last examples asked about are remembered."""
        last = self._remembered
        if last is None or last[0] is not inputs or last[1] is not labels:
            with torch.no_grad():
                last = self._remembered = (inputs, labels, self.rows(inputs, labels))
        return last[2]

    def residual(self, predicted: Float[Tensor, " m"]) -> Float[Tensor, " m"]:
        """Released minus predicted, in units of the noise where there is noise, without what carries noise only."""
        parts = ((self.released - predicted) * self._whitening).split(self._sizes)
        return torch.cat([b.codec.signal(part) for b, part in zip(self._plan.blocks, parts, strict=True)])

    def logits(self, inputs: Tensor) -> Float[Tensor, "n classes"]:
        """The model at this step."""
        return outputs(self._model, self._layout, inputs, parameters=self._step.parameters)


@dataclass(frozen=True)
class RunView:
    """The steps of a run, observed one at a time so that only one step's candidates are in memory.

    Attributes:
        run: trained with observer="updates".
        world: what everybody knows.
        candidates: whom membership is about.
        private: the training data, in the trainer's order; used for `others_removed` only.
        sampling: the sampler of the run.
        informed: whether the attacker knows everybody but the candidate.
    """

    run: Run
    world: World
    candidates: Examples
    private: Examples
    sampling: Sampling
    informed: bool = True

    def __post_init__(self) -> None:
        # Training drew other units than an auditor would, so the contributions could not be computed again.
        for name, module in self.run.model.named_modules():
            if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
                raise ValueError(f"model must have no dropout for attacks on its updates, got '{name}'; set its p to 0")

    def __len__(self) -> int:
        return len(self.run.transcript.steps)

    def __iter__(self) -> Iterator[Observation]:
        # Only independent coins make the product over steps of 1 - q + q exp(Lambda) exact. Under the other samplers
        # the same score is taken, which is then a strong test and not the optimal one.
        return (self.at(position, sample_rate=self.sampling.rate) for position in range(len(self)))

    def at(self, position: int, *, sample_rate: float) -> Observation:
        """One step.

        Args:
            position: in the transcript, from 0.
            sample_rate: 1 where the attacker knows who would have taken part.
        """
        step = self.run.transcript.steps[position]
        return observe(
            step,
            self.run.model,
            self.run.transcript.layout,
            self.world,
            sample_rate=sample_rate,
            candidates=self.candidates,
            others_removed=self._remainder(step) if self.informed else None,
        )

    def noise(self, seen: Observed, step: int) -> tuple[Float[Tensor, " m"], Int[Tensor, " b"]]:
        """What is left of a step's sums without everybody's contribution, and who took part; for the auditor.

        Args:
            seen: the step.
            step: its number.
        """
        private = self.private
        took_part = self.sampling.indices(step, len(private), self.run.sampler_key).to(private.inputs.device)
        noise = seen.sums
        total = noise.new_zeros(noise.shape, dtype=torch.float64)
        for part in took_part.split(max(1, _ROWS // self.run.transcript.layout.dim)):
            with torch.no_grad():
                total += seen.rows(private.inputs[part], private.labels[part]).sum(dim=0, dtype=torch.float64)
        return noise - total.to(noise.dtype), took_part

    def _remainder(self, step: Step) -> Callable[[Observed], Tensor]:
        private, candidates = self.private, self.candidates

        @cache
        def remainder(seen: Observed) -> Tensor:
            noise, took_part = self.noise(seen, step.step)
            own = seen.contributions(candidates.inputs, candidates.labels)
            inside = torch.isin(candidates.ids, private.ids[took_part])
            return noise + own * inside.unsqueeze(1)

        return remainder


def noise_found(view: RunView, steps: Collection[int]) -> tuple[float, float]:
    """Whether the noise in a run's releases is the noise that its plans claim.

    Args:
        view: of a run whose releases all carry noise.
        steps: numbers of the steps to look at.

    Returns:
        The standard deviation found over the one claimed, and by how many standard deviations of its own the mean
        square of the whitened noise differs from 1, negative for too little: sum (noise / std)^2 is chi-square.
    """
    energy, degrees = 0.0, 0
    for step in view.run.transcript.steps:
        if step.step not in steps:
            continue
        seen = Observed(step, view.run.model, view.run.transcript.layout, view.world.loss)
        noise, _ = view.noise(seen, step.step)
        energy += float((noise.double() / seen.noise_std.double()).square().sum())
        degrees += noise.numel()
    return math.sqrt(energy / degrees), (energy - degrees) / math.sqrt(2 * degrees)


def observe_run(view: RunView) -> SeenTranscript:
    """What an attacker sees who reads every release of a run."""
    return SeenTranscript(steps=view, candidates=view.candidates, final=model_access(view.run.model, view))


def logits_of(model: nn.Module, inputs: Tensor) -> Float[Tensor, "n classes"]:
    """A model's answers, computed in parts that fit in memory, without gradients."""
    with torch.no_grad():
        return torch.cat([model(part) for part in inputs.split(_AT_ONCE)])


def model_access(model: nn.Module, view: RunView, *, white_box: bool = False) -> ModelAccess:
    """What an attacker sees who has the final model."""
    return ModelAccess(
        logits=lambda inputs: logits_of(model, inputs),
        input_shape=view.world.input_shape,
        classes=view.world.classes,
        candidates=view.candidates,
        population=view.world.population,
        # Copies: other cells ask the same model, whatever an attack does to what it was given.
        parameters={n: p.detach().clone() for n, p in model.named_parameters()} if white_box else None,
    )
