"""Queries: what is asked of each example: its gradient, a difference of two, a question about its norm, its loss.

A query gets the example's gradients, or its losses, at any parameter point it names and answers
one row per example. It must
treat every row by itself; the shared tests of all defenses check that on every catalogued method, and a claim names a
query that is none of these (`verified.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

Gradients = Callable[[Tensor | None], Tensor]
"""Parameter point [dim], or None for the current one -> per-example gradients [rows, dim] there."""

ExampleLosses = Callable[[Tensor | None], Tensor]
"""Parameter point [dim], or None for the current one -> per-example losses [rows, 1] there."""


@runtime_checkable
class Query(Protocol):
    """One row per example, computed from that example's gradients alone."""

    @property
    def linear(self) -> bool:
        """Whether the answer is a fixed linear combination of gradients; fast engines serve only those."""
        ...

    def __call__(self, gradients: Gradients, /) -> Float[Tensor, "rows width"]:
        """The answers for one micro-batch; one with `of_losses` is given `ExampleLosses`."""
        ...


@dataclass(frozen=True)
class Gradient:
    """The example's gradient at the current parameters."""

    linear: bool = True

    def __call__(self, gradients: Gradients) -> Float[Tensor, "rows dim"]:
        """The rows as they are."""
        return gradients(None)


@dataclass(frozen=True, eq=False)
class GradientDifference:
    """The same example's gradient now minus at an earlier point (DIFF2).

    Attributes:
        earlier: the other parameter point [dim]; a function of past releases.
    """

    earlier: Float[Tensor, " dim"] = field(repr=False)
    linear: bool = True

    def __call__(self, gradients: Gradients) -> Float[Tensor, "rows dim"]:
        """Row by row difference."""
        return gradients(None) - gradients(self.earlier)


@dataclass(frozen=True, eq=False)
class GradientAhead:
    """A mean of the same example's gradients at another point and at the current one (DiSK looks ahead).

    Attributes:
        point: the other parameter point [dim]; a function of past releases.
        weight: of the gradient there; that of the current one is what is left to 1. Any number.
    """

    point: Float[Tensor, " dim"] = field(repr=False)
    weight: float
    linear: bool = True

    def __call__(self, gradients: Gradients) -> Float[Tensor, "rows dim"]:
        """Row by row mean."""
        here = gradients(None)
        return here + self.weight * (gradients(self.point) - here)


@dataclass(frozen=True, eq=False)
class GradientLess:
    """The example's gradient minus a vector known from past releases (DIFF takes the last one).

    A gradient that is not finite counts as zero, so its answer is minus the vector.

    Attributes:
        vector: [dim], in gradient units.
    """

    vector: Float[Tensor, " dim"] = field(repr=False)
    linear: bool = False  # affine: a sum of answers is not that of gradients

    def __call__(self, gradients: Gradients) -> Float[Tensor, "rows dim"]:
        """Row by row difference."""
        rows = gradients(None)
        return rows - self.vector.to(rows)


@dataclass(frozen=True)
class NormWithin:
    """Whether the gradient norm is at most a threshold, as +1/2 or -1/2 (adaptive clipping's count).

    Attributes:
        threshold: in gradient units.
    """

    threshold: float
    linear: bool = False

    def __call__(self, gradients: Gradients) -> Float[Tensor, "rows 1"]:
        """Centred indicators: their norm is exactly 1/2 whatever the example is."""
        rows = gradients(None)
        return self.answers(torch.linalg.vector_norm(rows, dim=1, keepdim=True, dtype=torch.float64)).to(rows.dtype)

    def answers(self, norms: Float[Tensor, "rows 1"]) -> Float[Tensor, "rows 1"]:
        """The indicators of these norms."""
        # Centred (Andrew et al., NeurIPS 2021): one example moves the sum by 1/2, where it would move a count by 1.
        return (norms <= self.threshold).to(norms.dtype) - 0.5


@dataclass(frozen=True, eq=False)
class LossChange:
    """The example's loss now minus at an earlier point, where a trial asks what a step was good for.

    Attributes:
        earlier: the other parameter point [dim]; a function of past releases.
        of_losses: says that it is losses that the query is given.
    """

    earlier: Float[Tensor, " dim"] = field(repr=False)
    linear: bool = False
    of_losses: bool = True

    def __call__(self, losses: ExampleLosses) -> Float[Tensor, "rows 1"]:
        """Row by row difference; a loss beyond 10^6, or none at all, counts as 10^6: as bad, not as unchanged."""
        now, before = (torch.nan_to_num(losses(point), nan=_WORST, posinf=_WORST) for point in (None, self.earlier))
        return now.clamp(-_WORST, _WORST) - before.clamp(-_WORST, _WORST)


_WORST = 1e6

gradient = Gradient()
