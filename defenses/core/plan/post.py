"""Maps of the noisy, divided update before the optimizer: post-processing, at no privacy cost."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from .codec import Coordinates, Subspace


@runtime_checkable
class Post(Protocol):
    """A map of the update, fixed before the batch is drawn."""

    def __call__(self, update: Float[Tensor, " dim"]) -> Float[Tensor, " dim"]:
        """Returns the update for the optimizer."""
        ...


@dataclass(frozen=True)
class Identity:
    """Returns the update unchanged."""

    def __call__(self, update: Float[Tensor, " dim"]) -> Float[Tensor, " dim"]:
        """Returns the update unchanged."""
        return update


@dataclass(frozen=True, eq=False)
class Project:
    """Projects on a subspace (PDP projects after the noise).

    Attributes:
        subspace: subspace to project on.
        rescale: whether each span is multiplied by its length over its rank, which offsets the average shrinkage by a
            projection on random directions.
    """

    subspace: Subspace
    rescale: bool = False

    def __call__(self, update: Float[Tensor, " dim"]) -> Float[Tensor, " dim"]:
        """Returns the projection of the update."""
        inside = self.subspace.project(update.unsqueeze(0)).squeeze(0)
        if self.rescale:
            for rank, (start, stop) in zip(self.subspace.ranks, self.subspace.spans, strict=True):
                inside[start:stop] *= (stop - start) / max(1, rank)
        return inside


@dataclass(frozen=True, eq=False)
class Keep:
    """Sets all coordinates but the kept ones to zero (posterior freeze masks after the noise)."""

    coordinates: Coordinates

    def __call__(self, update: Float[Tensor, " dim"]) -> Float[Tensor, " dim"]:
        """Returns the masked update."""
        kept = self.coordinates
        return kept.decode(kept.encode(update.unsqueeze(0)).squeeze(0))


@dataclass(frozen=True)
class Rescale:
    """Multiplies by a constant, such as 1 / C, after which the learning rate does not depend on the clip norm.

    Attributes:
        factor: multiplier, positive and finite.
    """

    factor: float

    def __post_init__(self) -> None:
        if not 0 < self.factor < math.inf:
            raise ValueError(f"factor must be a positive finite number, got {self.factor}")

    def __call__(self, update: Float[Tensor, " dim"]) -> Float[Tensor, " dim"]:
        """Returns the scaled update."""
        return self.factor * update


@dataclass(frozen=True, eq=False)
class Offset:
    """Scales the update and adds a vector known from past releases (the estimate of DIFF2, the memory of a filter).

    Attributes:
        vector: vector [dim], in units of the divided update.
        scale: multiplier of the update.
    """

    vector: Float[Tensor, " dim"] = field(repr=False)
    scale: float = 1.0

    def __call__(self, update: Float[Tensor, " dim"]) -> Float[Tensor, " dim"]:
        """Returns the shifted update."""
        return self.vector.to(update) + (update if self.scale == 1 else self.scale * update)


@dataclass(frozen=True, eq=False)
class Adaptive:
    """Adam's step from the previous moments (DP-Adam), with the noise variance subtracted from the second (DP-AdamBC).

    Attributes:
        first: moving average of updates [dim].
        second: moving average of their squares [dim].
        step: index of the step, from 0.
        betas: decay rates of the two averages.
        stabiliser: added to the root of the second moment; with `noise_variance`, the lower limit of that root instead.
        noise_variance: noise variance of an entry of the divided update, subtracted from the bias-corrected second
            moment; None subtracts nothing.
    """

    first: Float[Tensor, " dim"] = field(repr=False)
    second: Float[Tensor, " dim"] = field(repr=False)
    step: int
    betas: tuple[float, float]
    stabiliser: float
    noise_variance: float | None = None

    def moments(self, update: Float[Tensor, " dim"]) -> tuple[Tensor, Tensor]:
        """Returns both moving averages, updated."""
        first, second = self.betas
        return (
            first * self.first.to(update) + (1 - first) * update,
            second * self.second.to(update) + (1 - second) * update.square(),
        )

    def __call__(self, update: Float[Tensor, " dim"]) -> Float[Tensor, " dim"]:
        """Returns Adam's step, before the learning rate."""
        (first, second), (a, b) = self.moments(update), self.betas
        mean, square = first / (1 - a ** (self.step + 1)), second / (1 - b ** (self.step + 1))
        if self.noise_variance is None:
            return mean / (square.sqrt() + self.stabiliser)
        return mean / (square - self.noise_variance).clamp(min=self.stabiliser**2).sqrt()


identity = Identity()
