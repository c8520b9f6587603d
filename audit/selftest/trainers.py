"""Correct trainers for the battery: leakbench's own loop under any defense."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from leakbench.defenses.core import (
    Augmentation,
    CropAndFlip,
    Defense,
    Noise,
    Recipe,
    Recording,
    Run,
    Sampling,
    clip,
    from_os,
    keyed,
    poisson,
    seed_from,
    train,
)
from leakbench.defenses.core.plan.families.single_block import Whole

from ..catalog import methods as catalog
from .protocol import ClaimedRelation, Trainer, TrainerAnswer, TrainerClaim, TrainerTask

PUBLIC_EXAMPLES = 16
"""Number of synthetic examples that methods with public data may read."""


@dataclass
class KeptUpdates:
    """A meter that keeps every update of a run.

    Attributes:
        updates: [dim] each.
    """

    updates: list[Tensor] = field(default_factory=list)

    def add(self, step: int, update: Tensor) -> None:
        """Keeps a copy of the update."""
        self.updates.append(update.detach().clone())

    def state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        return {"updates": self.updates}

    def load(self, state: dict[str, Any]) -> None:
        """Continues from a checkpoint."""
        self.updates = list(state["updates"])


Fit = Callable[..., Run]
"""A function with the signature of `train`."""


def under_defense(
    defense: Callable[[TrainerTask], Defense],
    *,
    fit: Fit = train,
    noise: Callable[[TrainerTask], Noise] = lambda task: from_os(),
    sampling: Callable[[float], Sampling] = poisson,
    augmentation: Augmentation | None = None,
    recipe: Callable[[TrainerTask], Recipe] = lambda task: Recipe(expected_batch=task.expected_batch),
    publish: Callable[[TrainerTask], dict[str, Any]] = lambda task: {},
) -> Trainer:
    """Returns leakbench's training loop as a trainer.

    Args:
        defense: task -> defense.
        fit: the training function; planted bugs may replace it.
        noise: task -> source of noise.
        sampling: sample rate -> sampling.
        augmentation: of images.
        recipe: task -> recipe, with the divisor of sums.
        publish: task -> outputs published besides the releases. They are drawn before the noise, which may depend on
            them; a run that is to be repeated gets them in `task.published`.
    """

    def run(model: nn.Module, examples: tuple[Tensor, Tensor], task: TrainerTask) -> TrainerAnswer:
        published = dict(task.published) or publish(task)
        kept = KeptUpdates()
        generator = keyed(seed_from("selftest", "public", task.seed))
        pool = torch.randn(PUBLIC_EXAMPLES, *examples[0].shape[1:], generator=generator)
        done = fit(
            model,
            examples,
            defense(task),
            sampling=sampling(task.sample_rate),
            steps=task.steps,
            lr=task.lr,
            public=(pool, torch.arange(PUBLIC_EXAMPLES) % 2),
            noise=noise(replace(task, published=published)),
            seed=task.seed,
            recipe=replace(recipe(task), augmentation=augmentation),
            recording=Recording(meter=kept),
        )
        return TrainerAnswer(
            releases=tuple(kept.updates),
            buffers={name: value.detach().clone() for name, value in done.model.named_buffers()},
            claim=_claimed(done),
            published={"seed": done.seed, **published},
        )

    return run


def _claimed(run: Run) -> TrainerClaim:
    """Returns the claim of a run's ledger."""
    claim = run.claim(1e-5)
    if claim.reason:
        return TrainerClaim()
    return TrainerClaim(events=claim.gaussians, relation=cast(ClaimedRelation, claim.relation))


def plain(task: TrainerTask) -> Defense:
    """Returns DP-SGD's defense, a clipped block of all coordinates: Abadi et al., 2016."""
    return Defense(Whole(bound=clip(task.clip_norm)), task.noise_multiplier)


def of_nominal_size(task: TrainerTask) -> Recipe:
    """Returns a recipe under which nothing depends on the number of records."""
    return Recipe(nominal_size=round(task.expected_batch / task.sample_rate))


VIEWS = CropAndFlip(views=2, padding=2)
"""Views of images, for the trainer with augmentation and for the planted bug that keys them by position."""


def of_catalogue(name: str) -> Trainer:
    """Returns leakbench's loop under a defense of the catalogue, with its default settings at the task's clip norm.

    Args:
        name: of the defense, or the path of a file.
    """

    def defense(task: TrainerTask) -> Defense:
        return catalog.defense(name, settings_for(name, task.clip_norm), noise_multiplier=task.noise_multiplier)

    return under_defense(defense)


def settings_for(name: str, clip_norm: float) -> dict[str, Any]:
    """Returns the settings of a defense for the battery's tiny models; other settings keep their defaults.

    Args:
        name: of the defense.
        clip_norm: its clip norm, if it has one.
    """
    # Eight directions of 64 parameters; the defaults are for tens of thousands.
    settings = {"clip_norm": clip_norm, "rank": 8}
    known = catalog.settings("defenses", name)
    return {key: value for key, value in settings.items() if key in known}
