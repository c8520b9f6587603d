"""Post-processing of the noisy, divided update before the optimizer sees it: costs no privacy, whatever it is."""

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
        """The update that the optimizer gets."""
        ...


@dataclass(frozen=True)
class Identity:
    """Changes nothing."""

    def __call__(self, update: Float[Tensor, " dim"]) -> Float[Tensor, " dim"]:
        """The update itself."""
        return update


@dataclass(frozen=True, eq=False)
class Project:
    """Keeps the part inside a subspace (PDP projects after the noise).

    Attributes:
        subspace: what is projected on.
        rescale: whether each span is multiplied by its length over its rank, which makes up for what a projection on
            random directions loses on average.
    """

    subspace: Subspace
    rescale: bool = False

    def __call__(self, update: Float[Tensor, " dim"]) -> Float[Tensor, " dim"]:
        """The projection of the update."""
        inside = self.subspace.project(update.unsqueeze(0)).squeeze(0)
        if self.rescale:
            for rank, (start, stop) in zip(self.subspace.ranks, self.subspace.spans, strict=True):
                inside[start:stop] *= (stop - start) / max(1, rank)
        return inside


@dataclass(frozen=True, eq=False)
class Keep:
    """Zeroes all but some coordinates (posterior freeze masks after the noise)."""

    coordinates: Coordinates

    def __call__(self, update: Float[Tensor, " dim"]) -> Float[Tensor, " dim"]:
        """The masked update."""
        kept = self.coordinates
        return kept.decode(kept.encode(update.unsqueeze(0)).squeeze(0))


@dataclass(frozen=True)
class Rescale:
    """Multiplies by a number (by 1 / C, so that the learning rate does not depend on the clip norm).

    Attributes:
        factor: positive and finite.
    """

    factor: float

    def __post_init__(self) -> None:
        if not 0 < self.factor < math.inf:
            raise ValueError(f"factor must be a positive finite number, got {self.factor}")

    def __call__(self, update: Float[Tensor, " dim"]) -> Float[Tensor, " dim"]:
        """The update, longer or shorter."""
        return self.factor * update


@dataclass(frozen=True, eq=False)
class Offset:
    """Scales, and adds a vector known from past releases (DIFF2 adds its running estimate, a filter its memory).

    Attributes:
        vector: [dim], in units of the divided update.
        scale: of the update.
    """

    vector: Float[Tensor, " dim"] = field(repr=False)
    scale: float = 1.0

    def __call__(self, update: Float[Tensor, " dim"]) -> Float[Tensor, " dim"]:
        """The shifted update."""
        return self.vector.to(update) + (update if self.scale == 1 else self.scale * update)


@dataclass(frozen=True, eq=False)
class Adaptive:
    """Adam's step from the moments before it (DP-Adam), with the noise taken out of the second one (DP-AdamBC).

    Attributes:
        first: [dim], moving average of updates.
        second: [dim], of their squares.
        step: number of the step, from 0.
        betas: decay of the two averages a step.
        stabiliser: added to the root of the second moment; with a noise variance, the least root that is left of it.
        noise_variance: of one entry of the divided update, which the second moment is too large by; None leaves it.
    """

    first: Float[Tensor, " dim"] = field(repr=False)
    second: Float[Tensor, " dim"] = field(repr=False)
    step: int
    betas: tuple[float, float]
    stabiliser: float
    noise_variance: float | None = None

    def moments(self, update: Float[Tensor, " dim"]) -> tuple[Tensor, Tensor]:
        """Both averages with an update in them."""
        first, second = self.betas
        return (
            first * self.first.to(update) + (1 - first) * update,
            second * self.second.to(update) + (1 - second) * update.square(),
        )

    def __call__(self, update: Float[Tensor, " dim"]) -> Float[Tensor, " dim"]:
        """What the learning rate is applied to."""
        (first, second), (a, b) = self.moments(update), self.betas
        mean, square = first / (1 - a ** (self.step + 1)), second / (1 - b ** (self.step + 1))
        if self.noise_variance is None:
            return mean / (square.sqrt() + self.stabiliser)
        return mean / (square - self.noise_variance).clamp(min=self.stabiliser**2).sqrt()


identity = Identity()
