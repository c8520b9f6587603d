"""Queries: what is asked of each example: its gradient, a difference of two, a question about its norm, its loss.

A query gets the example's gradients, or its losses, at any parameter point it names and answers
one row per example. It must treat every row by itself; the shared tests of all defenses check that on every catalogued
method, and a claim names a query that is none of these (`verified.py`). One that subtracts says below which norm its
answers may be rounding (`rounding.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from .bound import row_norms
from .rounding import LEAST_CHANGE, LEAST_SHARE

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

    def least(self, gradients: Gradients) -> Float[Tensor, " rows"]:
        """A share of both: the difference of equal gradients is rounding."""
        return LEAST_CHANGE * (row_norms(gradients(None)) + row_norms(gradients(self.earlier)))


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

    def least(self, gradients: Gradients) -> Float[Tensor, " rows"]:
        """A share of both, as they are weighed."""
        here, there = row_norms(gradients(None)), row_norms(gradients(self.point))
        return LEAST_CHANGE * (abs(1 - self.weight) * here + abs(self.weight) * there)


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

    def least(self, gradients: Gradients) -> Float[Tensor, " rows"]:
        """A share of both: what a gradient that equals the vector leaves is rounding."""
        rows = gradients(None)
        return LEAST_CHANGE * (row_norms(rows) + row_norms(self.vector.to(rows).unsqueeze(0)))


@dataclass(frozen=True)
class NormWithin:
    """Whether the gradient norm is at most a threshold, as +1/2 or -1/2 (adaptive clipping's count).

    Up to 1/2048 beyond the threshold the answer lies between the two. Whoever stands at the threshold up to rounding
    would turn from one to the other with who else is in the batch, and move the count by 1; one may move it by 1/2.

    Attributes:
        threshold: in gradient units.
    """

    threshold: float
    linear: bool = False

    def __call__(self, gradients: Gradients) -> Float[Tensor, "rows 1"]:
        """Centred indicators: their norm is at most 1/2 whatever the example is."""
        rows = gradients(None)
        norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
        return self.answers(norms, LEAST_SHARE * norms).to(rows.dtype)

    def answers(self, norms: Float[Tensor, " rows"], least: Float[Tensor, " rows"]) -> Float[Tensor, "rows 1"]:
        """The indicators of these norms.

        Args:
            norms: float64.
            least: the norms that they are at least taken to be, float64.
        """
        # Centred (Andrew et al., NeurIPS 2021): one example moves the sum by 1/2, where it would move a count by 1.
        # A straight line from one to the other, as wide as what may be rounding: a jump would show who else is there.
        beyond = torch.maximum(norms, least) - self.threshold
        return (0.5 - beyond / least.clamp(min=1e-300)).nan_to_num(nan=-0.5).clamp(-0.5, 0.5).unsqueeze(1)


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
        now, before = self._both(losses)
        return now - before

    def least(self, losses: ExampleLosses) -> Float[Tensor, " rows"]:
        """A share of both: the change of a huge loss is rounding."""
        now, before = self._both(losses)
        return LEAST_CHANGE * (now.abs() + before.abs()).double().squeeze(1)

    def _both(self, losses: ExampleLosses) -> list[Float[Tensor, "rows 1"]]:
        found = [torch.nan_to_num(losses(point), nan=_WORST, posinf=_WORST) for point in (None, self.earlier)]
        return [one.clamp(-_WORST, _WORST) for one in found]


_WORST = 1e6

gradient = Gradient()
