"""Queries, the row computed for each example: its gradient, a difference of gradients, a loss change, an indicator.

A query gets the gradients, or the losses, of a micro-batch at any parameter point and returns a row per example. It
must process every example separately: tests check this for every method of the catalogue, and a claim lists a query of
another type as unverified (`training/assumptions.py`). A query that subtracts returns a least norm, below which its
rows may be rounding error (`rounding.py`).
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
"""Maps a parameter point [dim], or None for the current one, to per-example gradients [rows, dim]."""

ExampleLosses = Callable[[Tensor | None], Tensor]
"""Maps a parameter point [dim], or None for the current one, to per-example losses [rows, 1]."""


@runtime_checkable
class Query(Protocol):
    """A map from an example's gradients, or losses, to a row."""

    @property
    def linear(self) -> bool:
        """True if the row is a fixed linear combination of gradients, as the fast engines require."""
        ...

    def __call__(self, gradients: Gradients, /) -> Float[Tensor, "rows width"]:
        """Returns the rows of a micro-batch; a query with an attribute `of_losses` gets `ExampleLosses`."""
        ...


@dataclass(frozen=True)
class Gradient:
    """The example's gradient at the current parameters."""

    linear: bool = True

    def __call__(self, gradients: Gradients) -> Float[Tensor, "rows dim"]:
        """Returns the gradients unchanged."""
        return gradients(None)


@dataclass(frozen=True, eq=False)
class GradientDifference:
    """The same example's gradient at the current point minus that at an earlier point (DIFF2).

    Attributes:
        earlier: earlier parameter point [dim]; a function of past releases.
    """

    earlier: Float[Tensor, " dim"] = field(repr=False)
    linear: bool = True

    def __call__(self, gradients: Gradients) -> Float[Tensor, "rows dim"]:
        """Returns the difference, row by row."""
        return gradients(None) - gradients(self.earlier)

    def least(self, gradients: Gradients) -> Float[Tensor, " rows"]:
        """Returns a fraction of the sum of both norms: the difference of equal gradients is rounding error."""
        return LEAST_CHANGE * (row_norms(gradients(None)) + row_norms(gradients(self.earlier)))


@dataclass(frozen=True, eq=False)
class GradientAhead:
    """Weighted mean of the same example's gradients at another point and at the current point (look-ahead of DiSK).

    Attributes:
        point: other parameter point [dim]; a function of past releases.
        weight: weight of the gradient at `point`, any number; the gradient at the current point gets 1 - weight.
    """

    point: Float[Tensor, " dim"] = field(repr=False)
    weight: float
    linear: bool = True

    def __call__(self, gradients: Gradients) -> Float[Tensor, "rows dim"]:
        """Returns the weighted mean, row by row."""
        gradient = gradients(None)
        return gradient + self.weight * (gradients(self.point) - gradient)

    def least(self, gradients: Gradients) -> Float[Tensor, " rows"]:
        """Returns a fraction of the sum of both norms, weighted by the absolute weights."""
        norms, norms_at_point = row_norms(gradients(None)), row_norms(gradients(self.point))
        return LEAST_CHANGE * (abs(1 - self.weight) * norms + abs(self.weight) * norms_at_point)


@dataclass(frozen=True, eq=False)
class GradientLess:
    """The example's gradient minus a vector known from past releases (DIFF subtracts the last update).

    A gradient that is not finite counts as zero, and its row is minus the vector.

    Attributes:
        vector: vector [dim], in gradient units.
    """

    vector: Float[Tensor, " dim"] = field(repr=False)
    linear: bool = False  # affine, not linear: the sum of the rows is not the row of the summed gradient

    def __call__(self, gradients: Gradients) -> Float[Tensor, "rows dim"]:
        """Returns the difference, row by row."""
        rows = gradients(None)
        return rows - self.vector.to(rows)

    def least(self, gradients: Gradients) -> Float[Tensor, " rows"]:
        """Returns a fraction of the sum of both norms: the difference from an equal vector is rounding error."""
        rows = gradients(None)
        return LEAST_CHANGE * (row_norms(rows) + row_norms(self.vector.to(rows).unsqueeze(0)))


@dataclass(frozen=True)
class NormWithin:
    """Indicator, as +1/2 or -1/2, that the gradient norm is at most a threshold (the count of adaptive clipping).

    From the threshold to about 1/2048 beyond it, the value falls linearly. With a jump, rounding error that depends on
    the rest of the batch could flip an example at the threshold and move the count by 1, twice the sensitivity.

    Attributes:
        threshold: threshold on the norm, in gradient units.
    """

    threshold: float
    linear: bool = False

    def __call__(self, gradients: Gradients) -> Float[Tensor, "rows 1"]:
        """Returns the centred indicators, at most 1/2 in absolute value for any example."""
        rows = gradients(None)
        norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
        return self.answers(norms, LEAST_SHARE * norms).to(rows.dtype)

    def answers(self, norms: Float[Tensor, " rows"], least: Float[Tensor, " rows"]) -> Float[Tensor, "rows 1"]:
        """Computes the indicators from gradient norms.

        Args:
            norms: gradient norms, float64.
            least: lower limits on the norms, float64.
        """
        # Centred (Andrew et al., NeurIPS 2021): adding an example moves the sum by 1/2, a plain count by 1. The linear
        # ramp is wider than the rounding error, which depends on the rest of the batch.
        beyond = torch.maximum(norms, least) - self.threshold
        return (0.5 - beyond / least.clamp(min=1e-300)).nan_to_num(nan=-0.5).clamp(-0.5, 0.5).unsqueeze(1)


@dataclass(frozen=True, eq=False)
class LossChange:
    """The example's loss at the current point minus that at an earlier point (used by `Trial`).

    Attributes:
        earlier: earlier parameter point [dim]; a function of past releases.
        of_losses: marks a query of losses instead of gradients.
    """

    earlier: Float[Tensor, " dim"] = field(repr=False)
    linear: bool = False
    of_losses: bool = True

    def __call__(self, losses: ExampleLosses) -> Float[Tensor, "rows 1"]:
        """Returns the difference, row by row; losses are clamped to [-10^6, 10^6], and NaN counts as 10^6."""
        now, before = self._both(losses)
        return now - before

    def least(self, losses: ExampleLosses) -> Float[Tensor, " rows"]:
        """Returns a fraction of the sum of both absolute losses: the change of a huge loss is rounding error."""
        now, before = self._both(losses)
        return LEAST_CHANGE * (now.abs() + before.abs()).double().squeeze(1)

    def _both(self, losses: ExampleLosses) -> list[Float[Tensor, "rows 1"]]:
        losses_at_both = [torch.nan_to_num(losses(point), nan=_WORST, posinf=_WORST) for point in (None, self.earlier)]
        return [loss.clamp(-_WORST, _WORST) for loss in losses_at_both]


_WORST = 1e6

gradient = Gradient()
