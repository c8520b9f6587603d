"""A training run with its private data, held by the auditor: members, non-members, defense, sampler, transcript.

Private data, the sampler's key and the noise never leave this object. The negative control trains the model on public
examples in the members' place, so that no member was in the training.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

import torch

from leakbench.attacks.core import Examples
from leakbench.defenses.core import (
    Defense,
    OngoingRun,
    Recipe,
    Recording,
    Run,
    Sampling,
    Step,
    TrainingSettings,
)

from ..plan.artifact import Artifacts
from ..plan.build import defend, planned, recipe_of
from ..plan.canaries import Canaries, drawn, with_canaries
from ..plan.request import SeedSet, TrainingRequest
from ..scoring.successive import SuccessiveCosines
from ..targets.all_steps import AllSteps
from ..targets.replay import StepReplay
from ..targets.residual_noise import ResidualNoise
from .outcome import join
from .training_data import TrainingData

TRANSCRIPT_MEMORY = 4 * 2**30
"""Memory for the steps of a run if an attack reads all of them, in bytes; steps of longer runs are recomputed."""

WATCHED = 32
"""Largest number of steps whose noise is compared with the claim, memory permitting."""

WATCHED_MEMORY = 2**29
"""Memory for these steps, bytes; the last step is always kept."""


class TrainedRun(TrainingData):
    """A training and its data; each property is computed at its first use, and kept.

    Attributes:
        request: of the training.
        device: device of the computation.
        every_step: whether attacks read all of its steps.
        artifacts: prerequisites of the cells, such as shadow models, by name.
        splits: of the data set.
        residual_noise: `Step.key` -> its noise and contributions of candidates, shared by the views of all cells.
    """

    def __init__(
        self,
        request: TrainingRequest,
        device: torch.device,
        *,
        every_step: bool,
        artifacts: Artifacts | None = None,
    ) -> None:
        """Reads the data; trains nothing yet."""
        self.artifacts: Artifacts = {} if artifacts is None else artifacts
        super().__init__(request, device)
        self.every_step = every_step
        self.residual_noise: dict[int, ResidualNoise] = {}

    @cached_property
    def canaries(self) -> Canaries | None:
        """The candidate canaries of the training with their inclusion bits; None without canaries."""
        return drawn(self.request, self.splits, self._start, self.sampling, self.device)

    @cached_property
    def trained_on(self) -> Examples:
        """All training examples, with the inserted canaries, of which the negative control has none."""
        if self.canaries is None or self.request.never_saw:
            return self.uninserted
        return join(self.uninserted, self.canaries.put_in)

    @cached_property
    def defense(self) -> tuple[Defense, bool]:
        """The defense at its noise, and whether the noise was matched instead of calibrated."""
        return defend(self.request, len(self.uninserted))

    @cached_property
    def sampling(self) -> tuple[Sampling, int]:
        """The sampler and the number of steps: those of the same training without canaries."""
        return planned(self.request, len(self.uninserted))

    @cached_property
    def replay(self) -> StepReplay:
        """The recomputation of the run's steps, shared by the views of all cells."""
        return StepReplay(self.run, self.trained_on, self.sampling[0], self.public_knowledge.loss)

    @property
    def _recipe(self) -> Recipe:
        """The training recipe; sums are divided by a constant that is independent of the inclusion bits of canaries."""
        recipe = recipe_of(self.request.training, self.splits)
        if self.canaries is None:
            return recipe
        # With a nominal size the divisor is a constant already.
        expected = None if recipe.nominal_size else self.sampling[0].expected_batch(len(self.uninserted))
        # Under changing masks the canaries' inputs change by step as augmented views; examples then have no views.
        views = recipe.augmentation if self.canaries.schedule is None else self.canaries.schedule
        return replace(recipe, expected_batch=expected, augmentation=views)

    @cached_property
    def cosines(self) -> SuccessiveCosines:
        """The cosine similarity of successive updates; filled during training."""
        return SuccessiveCosines(self.sampling[1])

    @cached_property
    def run(self) -> Run:
        """The training, computed at its first use."""
        steps = self.sampling[1]
        recording = Recording(
            observer="updates",
            # The last step is kept whatever its size: attacks on a single update read it, and its noise is measured.
            always=[steps - 1],
            only=None if self.every_step else watched(steps),
            memory=TRANSCRIPT_MEMORY if self.every_step else WATCHED_MEMORY,
            meter=self.cosines,
        )
        run = self._training(recording, self.request.seeds).run()
        if self.every_step and run.transcript.truncated:
            # The first steps alone are useless to attacks on every step, so only the watched steps stay.
            run.transcript.steps = [step for step in run.transcript.steps if step.step in watched(steps)]
        # The trainer knows only whether the method reads public data. A claim on a pretrained model, or on inputs
        # scaled by public examples, makes the same assumption about them.
        used = self.request.training.pretrain is not None or self.splits.scaled_by_public
        return replace(run, public_used=run.public_used or used)

    @cached_property
    def all_steps(self) -> AllSteps:
        """Returns all steps of the run, for attacks that read every step; recomputed if they exceed the memory.

        Reading then fails if the noise cannot be drawn again.
        """
        return AllSteps(self.run, self._again)

    def _again(self) -> Iterator[Step]:
        # An attack may read steps under inference mode, in which a new model could not be trained.
        with torch.inference_mode(mode=False):
            seeds = replace(self.request.seeds, sampler=self.run.sampler_key)
            training = self._training(Recording(observer="updates"), seeds)
        return training.retake(self.run)

    def _training(self, recording: Recording, seeds: SeedSet) -> OngoingRun:
        """Returns the training before its first step, with its noise and public randomness at their start."""
        task = self.request.training
        data, public = self.trained_on, self._read
        sampling, steps = self.sampling
        settings = TrainingSettings(
            defense=self.defense[0],
            sampling=sampling,
            steps=steps,
            lr=task.lr,
            **seeds.arguments(),
            recipe=self._recipe,
            execution=task.execution(self.device),
            recording=recording,
        )
        # The negative control, which is trained on public examples, has the same initial model.
        model = with_canaries(copy.deepcopy(self._start), self.canaries, self.splits)
        pool = (public.inputs, public.labels) if len(public) else None
        return OngoingRun(model, (data.inputs, data.labels), pool, settings)


def watched(steps: int) -> list[int]:
    """Returns the steps whose noise is measured: spread evenly over the run, including the last."""
    count = min(steps, WATCHED)
    # Integer arithmetic from the end: i = 0 is the last step, and no step is repeated.
    return sorted({steps - 1 - i * steps // count for i in range(count)})
