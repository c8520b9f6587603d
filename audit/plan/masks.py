"""Masks of a training's steps that are known before it, for canaries whose gradients are to lie within them."""

from __future__ import annotations

from dataclasses import replace

import torch

from leakbench.defenses.core import Context, Coordinates, Defense, Layout, Sampling, Stateless


def public_masks(
    defense: Defense, layout: Layout, sampling: Sampling, steps: int, *, seed: int, device: torch.device
) -> list[Coordinates | None]:
    """Returns the coordinates kept by each step; None if all are kept, or if they are unknown in advance.

    Masks of a method without memory that reads no public data follow from the run's public seed alone. The plans are
    computed as in the run, with zeros for the parameters and without releases.

    Args:
        defense: of the training.
        layout: of its parameters.
        sampling: determines the epochs on which masks depend.
        steps: planned length.
        seed: of the public randomness.
        device: of the run.
    """
    if not isinstance(defense.method, Stateless):
        return [None] * steps
    nothing = torch.zeros(layout.dim, device=device)
    start = Context(
        step=0, steps=steps, steps_per_epoch=sampling.steps_per_epoch, layout=layout, parameters=nothing, seed=seed,
        device=device,
    )  # fmt: skip
    masks: list[Coordinates | None] = []
    for step in range(steps):
        try:
            _, plan = defense.plan(None, replace(start, step=step))
        except (ValueError, AttributeError, TypeError):  # the plan reads state of a run that does not exist in advance
            return [None] * steps
        codec = plan.blocks[0].codec
        alone = len(plan.blocks) == 1 and type(codec) is Coordinates
        masks.append(codec if alone and isinstance(codec, Coordinates) else None)
    return masks
