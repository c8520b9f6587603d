"""The common part of all models' plans in a step, which a stack executes, and the mask of each model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ...plan.bound import Bound
from ...plan.codec import Codec, Coordinates, Everything
from ...plan.defense import StepPlan
from ...plan.query import gradient
from .stack_error import StackError


def masks(coordinates: Sequence[Coordinates | None], like: Float[Tensor, "models dim"]) -> Tensor | None:
    """Returns the coordinates of each model as a mask of ones and zeros; None if all models have all."""
    if all(subset is None for subset in coordinates):
        return None
    stacked = torch.zeros_like(like)
    for mask, subset in zip(stacked, coordinates, strict=True):
        if subset is None:
            mask.fill_(1.0)
        else:
            mask.index_fill_(0, subset.kept.to(like.device), 1.0)
    return stacked


@dataclass(frozen=True)
class SharedPlan:
    """A single block of gradients for all models, each in its own coordinates.

    Attributes:
        codecs: codec of each model's block.
        bound: bound of all models.
        std: standard deviation of the noise on an undivided sum.
        kept: masks in the dtype of the parameters; None if all coordinates are released.
    """

    codecs: list[Codec]
    bound: Bound
    std: float
    kept: Float[Tensor, "models dim"] | None

    @classmethod
    def of(
        cls,
        plans: Sequence[StepPlan],
        noise_multiplier: float,
        like: Float[Tensor, "models dim"],
        last: SharedPlan | None,
    ) -> SharedPlan:
        """Makes a shared plan from the plans of the models in a step.

        Args:
            plans: a plan per model.
            noise_multiplier: noise multiplier of the defense.
            like: parameters.
            last: shared plan of the step before, whose masks are reused if codecs are the same objects.

        Raises:
            StackError: for a plan that a stack does not support.
        """
        first = plans[0].blocks[0]
        for plan in plans:
            (block, *more) = plan.blocks
            apart = plan.correlated is not None or plan.trial is not None
            if more or apart or block.query is not gradient or type(block.codec) not in (Everything, Coordinates):
                raise StackError("a stack executes one block of gradients in all or some coordinates a step")
            if type(block.bound) is not Bound or block.bound != first.bound:
                raise StackError("a stack executes plans with one bound for all models")
        codecs = [plan.blocks[0].codec for plan in plans]
        if last is not None and all(a is b for a, b in zip(codecs, last.codecs, strict=True)):
            kept = last.kept
        else:
            kept = masks([codec if isinstance(codec, Coordinates) else None for codec in codecs], like)
        return cls(codecs, first.bound, first.noise_std(noise_multiplier), kept)

    def noised(self, sums: Float[Tensor, "models dim"], noise: torch.Generator) -> Float[Tensor, "models dim"]:
        """Returns the sums with noise in the released coordinates.

        Args:
            sums: sum of each model.
            noise: generator on the CPU, so that a seed gives the same stream on every device.
        """
        if not self.std:
            return sums
        drawn = torch.randn(sums.shape, generator=noise, dtype=sums.dtype).to(sums.device).mul_(self.std)
        return drawn.add_(sums) if self.kept is None else drawn.mul_(self.kept).add_(sums)
