"""Attackers' view of a transcript: observations of its steps, built from the files and a plan of plain DP-SGD.

Batches are not in a transcript, so other members' contributions cannot be subtracted: attacks that need them do not
apply, as their own check reports. Applicable attacks need an update, or all of them, and candidates; they treat others
in the batch as noise, or as similar to public examples (`gaussian_others`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from leakbench.attacks.core import (
    Attack,
    Examples,
    MembershipScores,
    NotApplicable,
    Observation,
    SeenTranscript,
    Steps,
    subsampled,
)
from leakbench.defenses.core import Block, Everything, Layout, NoisyPlan, Step, StepPlan, clip

from ...targets.observe import FinalView, PublicKnowledge, model_access, observe
from .format import TranscriptHeader, WatchedStep, WatchedTranscript


@dataclass(frozen=True, kw_only=True)
class TranscriptView:
    """Steps of a transcript, as seen with knowledge of the model, the candidates and the sampling.

    Attributes:
        transcript: read from disk.
        model: gives the architecture, frozen parameters and buffers; trained parameters are read from the transcript.
        public_knowledge: public knowledge.
        candidates: of the membership attacks; None without membership attacks.
        sample_rate: probability that a record is in a step's batch; 1 for full batches.
        independent: whether records are sampled independently, as under Poisson sampling.
        most_steps: number of steps read, evenly over the training; None for all.
    """

    transcript: WatchedTranscript
    model: nn.Module
    public_knowledge: PublicKnowledge
    candidates: Examples | None = None
    sample_rate: float = 1.0
    independent: bool = True
    most_steps: int | None = None

    @property
    def steps_read(self) -> int:
        """Number of steps read."""
        return len(self.transcript) if self.most_steps is None else min(self.most_steps, len(self.transcript))

    def __post_init__(self) -> None:
        fitted(self.transcript.header, self.model)

    def observations(self) -> Iterator[Observation]:
        """Yields the steps in order, each built on demand.

        Raises:
            NotApplicable: a step has no parameters, or per-example contributions do not follow from the header.
        """
        layout, model = fitted(self.transcript.header, self.model)
        chosen = {place * len(self.transcript) // self.steps_read for place in range(self.steps_read)}
        for place, step in enumerate(self.transcript):
            if place not in chosen:
                continue
            yield observe(
                executed(step, self.transcript.header, self.sample_rate),
                model,
                layout,
                self.public_knowledge,
                sample_rate=self.sample_rate,
                participation="known" if self.sample_rate == 1 else "independent" if self.independent else "dependent",
                candidates=self.candidates,
            )

    def seen(self) -> SeenTranscript:
        """Returns the view of `Access.ALL_STEPS`: every release, and queries to the given model."""
        model = copy.deepcopy(self.model).cpu().eval()
        final = model_access(FinalView(model, self.public_knowledge, self.candidates))
        steps = Steps(self.observations, lambda: self.steps_read)
        return SeenTranscript(steps=steps, candidates=self.candidates, final=final)

    def scores(self, attack: Attack[Any], *, log_ratio: bool, **settings: Any) -> MembershipScores:
        """Sums the scores of an attack on single updates over all steps.

        Args:
            attack: of `Access.UPDATE`, with membership scores, such as `gaussian_others`.
            log_ratio: whether its scores are log likelihood ratios in nats, which allow for the sampling:
                log(1 - q + q exp(score)) is then summed.
            **settings: of the attack.

        Raises:
            NotApplicable: without candidates, and as for `observations`.
        """
        if self.candidates is None:
            raise NotApplicable("scores need candidates, members and non-members; give both")
        total = torch.zeros(len(self.candidates), dtype=torch.float64)
        for number, observed in enumerate(self.observations()):
            generator = torch.Generator().manual_seed(number)
            examples = self.candidates
            # Copied for each step: an attack may write into its input.
            own = Examples(ids=examples.ids.clone(), inputs=examples.inputs.clone(), labels=examples.labels.clone())
            scores = attack(replace(observed, candidates=own), generator, **settings).scores.cpu()
            total += subsampled(scores, self.sample_rate) if log_ratio else scores
        return MembershipScores(ids=self.candidates.ids, scores=total, exact=False, dependence="per_model")


def fitted(header: TranscriptHeader, model: nn.Module) -> tuple[Layout, nn.Module]:
    """Returns the transcript's layout in a model's names, and a copy of the model that trains only these parameters.

    Args:
        header: its names are the model's, or numbers in the model's order.
        model: unchanged; the copy is on the CPU, as are the tensors read from disk.

    Raises:
        ValueError: a name or a shape that does not fit.
    """
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    names = header.names
    if all(name.isdecimal() for name in names):
        trained = tuple(name for name, parameter in model.named_parameters() if parameter.requires_grad)
        if len(trained) != len(names):
            raise ValueError(
                f"the transcript must have the model's trained parameters, {len(trained)}, got {len(names)}; freeze in "
                "the model what was frozen in training, or watch with model=..."
            )
        names = trained
    for name, shape in zip(names, header.shapes, strict=True):
        if shapes.get(name) != shape:
            raise ValueError(
                f"the model must have the transcript's parameter {name!r} of shape {list(shape)}, got "
                f"{'none' if name not in shapes else list(shapes[name])}"
            )
    own = copy.deepcopy(model).cpu().eval()
    for name, parameter in own.named_parameters():
        parameter.requires_grad_(name in names)
    return Layout(names, header.shapes), own


def executed(step: WatchedStep, header: TranscriptHeader, sample_rate: float) -> Step:
    """Converts a step to the trainer's form: a block of all coordinates, clipped, with the stated noise.

    Raises:
        NotApplicable: per-example contributions do not follow from the stated values.
    """
    clip_norm = step.clip_norm if step.clip_norm is not None else header.clip_norm
    if header.clipping != "flat" or clip_norm is None:
        raise NotApplicable(
            f"contributions of examples need one clip norm over all parameters, got clipping {header.clipping!r} and "
            f"clip norm {clip_norm}"
        )
    if step.parameters is None:
        raise NotApplicable(
            f"contributions of examples need the parameters before step {step.step}, and the transcript has those of "
            "first steps alone; watch with parameters='every'"
        )
    dim = len(step.released)
    plan = NoisyPlan(StepPlan(Block(codec=Everything(dim), bound=clip(clip_norm))), step.noise_std / clip_norm)
    sums: Tensor = step.sums
    return Step(
        step.step, step.parameters, plan.noise_multiplier, step.expected_batch, sample_rate, plan=plan, noisy=(sums,)
    )
