"""Per-example gradients of a layer of many models, in factored form: squared norms, and clipped sums.

A layer with parameters has inputs x and signals s, the gradients of the losses at its outputs. If each example uses
the weight once, its gradient is s xᵀ, whose norm is |s| |x|, under a mask M (s∘s)ᵀ M (x∘x). If it uses the weight at
several positions (pixels of a convolution's output, positions of a sequence), the gradient is a sum of s_p x_pᵀ, and
its norm comes from the sum itself or from inner products between positions, whichever `layerwise/cost.py` finds
cheaper.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ...gradients.layerwise.cost import Shape, Strategy, cheapest, estimates
from ...gradients.layerwise.factors import Squares, gram, gram_squares
from ...plan.bound import Bound

_TRUSTED = 1e-3
"""Largest relative error of a squared norm that is trusted."""
_SMALL = 1e-20
"""Squared norms below this may have lost squares that underflow in float32."""


@dataclass(frozen=True)
class Place:
    """Position of a parameter in the flat vectors of models, and the layer's layout of it.

    Attributes:
        span: (start, stop) in the vector of a model.
        shape: shape of the parameter.
        order: the layer's order of its dimensions; None: unchanged.
        groups: number of groups of channels into which the first dimension is split.
    """

    span: tuple[int, int]
    shape: tuple[int, ...]
    order: tuple[int, ...] | None = None
    groups: int = 1

    def of(self, flat: Float[Tensor, "models dim"]) -> Tensor:
        """Returns the parameter of each model, [models, *shape]; a view."""
        return flat[:, slice(*self.span)].unflatten(1, self.shape)

    def read(self, flat: Float[Tensor, "models dim"]) -> Float[Tensor, "models groups out in"]:
        """Returns a weight by groups, its other dimensions in the layer's order and flattened."""
        weight = self.of(flat)
        if self.order is not None:
            weight = weight.permute(0, *(1 + axis for axis in self.order))
        return weight.flatten(2).unflatten(1, (self.groups, -1))

    def add(self, sums: Float[Tensor, "models dim"], weight: Float[Tensor, "models groups out in"]) -> None:
        """Adds a weight in the layout of `read` to the sums, in place."""
        value = weight.flatten(1, 2)
        if self.order is not None:
            value = value.unflatten(2, [self.shape[axis] for axis in self.order[1:]])
            value = value.permute(0, *(1 + self.order.index(axis) for axis in range(len(self.order))))
        self.of(sums).add_(value.reshape(-1, *self.shape))


@runtime_checkable
class Term(Protocol):
    """Gradients of a parameter or two, of each example of each model's batch."""

    @property
    def numbers(self) -> int:
        """Largest number of entries of per-example tensors that are stored or formed for a model."""
        ...

    def squares(self, kept: Float[Tensor, "models dim"] | None) -> Squares:
        """Returns squared norms [models, rows] under a mask; of all coordinates without a mask."""
        ...

    def add(self, factors: Float[Tensor, "models rows"], sums: Float[Tensor, "models dim"]) -> None:
        """Adds to each model's sum its examples' gradients, each times its factor, without applying the mask."""
        ...

    def without(self, bad: Bool[Tensor, "models rows"]) -> Term:
        """Returns the term with zeros for some examples, whatever their values: zero times infinity is not zero."""
        ...

    def double(self) -> Term:
        """Returns the term in float64, in which no square of a float32 overflows or underflows."""
        ...


@dataclass(frozen=True)
class OneProduct:
    """Gradients of a linear layer that each example uses once: s xᵀ, and s for its bias."""

    weight: Place
    bias: Place | None
    inputs: Float[Tensor, "models rows in"]
    signals: Float[Tensor, "models rows out"]

    @property
    def numbers(self) -> int:
        """Number of entries of the factors, and of their squares."""
        return 2 * (self.inputs[0].numel() + self.signals[0].numel())

    def squares(self, kept: Tensor | None) -> Squares:
        """Returns squared norms without forming a gradient, masked or not."""
        energy = self.signals.square()
        if kept is None:
            return Squares.exact(energy.sum(-1).double() * (self.inputs.square().sum(-1) + (self.bias is not None)))
        mask = kept.to(energy.dtype)
        squares = (energy.bmm(self.weight.of(mask)) * self.inputs.square()).sum(-1)
        return Squares.exact(
            squares if self.bias is None else squares + energy.bmm(self.bias.of(mask)[..., None])[..., 0]
        )

    def add(self, factors: Tensor, sums: Tensor) -> None:
        """Computes a single product over each model's batch."""
        scaled = self.signals * factors[..., None]
        self.weight.of(sums).add_(scaled.mT.bmm(self.inputs))
        if self.bias is not None:
            self.bias.of(sums).add_(scaled.sum(1))

    def without(self, bad: Tensor) -> OneProduct:
        """Sets both factors to zero."""
        inputs, signals = (factor.masked_fill(bad[..., None], 0.0) for factor in (self.inputs, self.signals))
        return replace(self, inputs=inputs, signals=signals)

    def double(self) -> OneProduct:
        """Converts both factors to float64."""
        return replace(self, inputs=self.inputs.double(), signals=self.signals.double())


class ProductSum:
    """Gradients of a weight that each example uses at several positions: the sum of s_p x_pᵀ, by groups."""

    def __init__(
        self,
        weight: Place,
        inputs: Float[Tensor, "models groups rows positions in"],
        signals: Float[Tensor, "models groups rows positions out"],
    ) -> None:
        """Takes the input at each position, as patches, and the losses' gradients at the output."""
        self.weight, self.inputs, self.signals = weight, inputs, signals

    @cached_property
    def _shape(self) -> Shape:
        _, groups, _, positions, inputs = self.inputs.shape
        outputs = self.signals.shape[-1]
        stored = groups * positions * (inputs + outputs)
        return Shape(positions=positions, inputs=inputs, outputs=outputs, stored=stored, groups=groups, patched=False)

    @cached_property
    def _by_positions(self) -> bool:
        """True if norms come from inner products between positions, which is impossible under a mask."""
        return cheapest(self._shape, self.inputs.device.type) is Strategy.GRAM

    @cached_property
    def _gradients(self) -> Float[Tensor, "models groups rows out in"]:
        return self.signals.mT @ self.inputs

    @property
    def numbers(self) -> int:
        """Number of entries: the factors, their scaled copies, and the larger of gradients and inner products."""
        shape = self._shape
        # Inner products and their operands count twice, in float64.
        inner = shape.stored + 2 * shape.groups * shape.positions**2
        formed = 2 * max(shape.row, inner if self._by_positions else 0)
        return self.inputs.shape[2] * (2 * shape.stored + formed)

    def squares(self, kept: Tensor | None) -> Squares:
        """Returns squared norms over all groups, by gradients or by inner products."""
        if kept is None and self._by_positions:
            products, others = (gram(factor.flatten(0, 2)) for factor in (self.inputs, self.signals))
            by_group = gram_squares(products, others, self.signals.dtype)
            shape = self.inputs.shape[:3]
            return Squares(by_group.value.view(shape).sum(1), by_group.slack.view(shape).sum(1))
        gradients = self._gradients
        if kept is not None:
            gradients = gradients * self.weight.read(kept).to(gradients.dtype)[:, :, None]
        squares = gradients.square().sum((-1, -2)).sum(1).double()
        if not self._worth_keeping:
            del self._gradients
        return Squares.exact(squares)

    def add(self, factors: Tensor, sums: Tensor) -> None:
        """Uses the gradients if they were kept, else a single product over all positions of each model's batch."""
        if "_gradients" in vars(self):
            models, groups, rows, outputs, inputs = self._gradients.shape
            flat = self._gradients.reshape(models, groups, rows, outputs * inputs)
            value = (factors[:, None, None].expand(-1, groups, -1, -1) @ flat).view(models, groups, outputs, inputs)
        else:
            scaled = self.signals * factors[:, None, :, None, None]
            value = scaled.flatten(2, 3).mT @ self.inputs.flatten(2, 3)
        self.weight.add(sums, value)

    def without(self, bad: Tensor) -> ProductSum:
        """Sets both factors to zero."""
        gone = bad[:, None, :, None, None]
        return ProductSum(self.weight, self.inputs.masked_fill(gone, 0.0), self.signals.masked_fill(gone, 0.0))

    def double(self) -> ProductSum:
        """Converts both factors to float64."""
        return ProductSum(self.weight, self.inputs.double(), self.signals.double())

    @property
    def _worth_keeping(self) -> bool:
        costs = estimates(self._shape, self.inputs.device.type)
        return costs.get(Strategy.KEEP, math.inf) <= costs[Strategy.FREE]


@dataclass(frozen=True)
class FormedRows:
    """Explicit gradients: of biases, and of scales and shifts of normalisation layers."""

    place: Place
    values: Float[Tensor, "models rows size"]

    @property
    def numbers(self) -> int:
        """Number of entries of the gradients, and of their squares."""
        return 2 * self.values[0].numel()

    def squares(self, kept: Tensor | None) -> Squares:
        """Returns squared norms of the gradients."""
        values = self.values if kept is None else self.values * self.place.of(kept).to(self.values.dtype)[:, None]
        return Squares.exact(values.square().sum(-1))

    def add(self, factors: Tensor, sums: Tensor) -> None:
        """Computes a single product with the factors."""
        self.place.of(sums).add_((factors[:, None] @ self.values)[:, 0])

    def without(self, bad: Tensor) -> FormedRows:
        """Sets rows to zero."""
        return replace(self, values=self.values.masked_fill(bad[..., None], 0.0))

    def double(self) -> FormedRows:
        """Converts the gradients to float64."""
        return replace(self, values=self.values.double())


def norms_of(
    terms: Sequence[Term], kept: Tensor | None, dtype: torch.dtype, bound: Bound
) -> tuple[Sequence[Term], Float[Tensor, "models rows"]]:
    """Returns norms in float64, infinite or NaN for gradients that are not finite, and terms with zeros there.

    Args:
        terms: the terms of all parameters.
        kept: the mask of each model, if any.
        dtype: dtype of the gradients; values beyond its range are not finite.
        bound: bound on the masked gradient; norms that do not change its factors may be rounded.
    """
    squares = _squares(terms, kept)
    if not bool(_doubtful(squares, dtype, bound).any()):
        return terms, squares.value.sqrt()
    wide = [term.double() for term in terms]
    norms = _squares(wide, kept).value.sqrt()
    # From whole rows: a row that is not finite counts as zero, even if the mask drops those coordinates.
    whole = norms if kept is None else _squares(wide, None).value.sqrt()
    norms = norms.masked_fill(whole > torch.finfo(dtype).max, math.inf)
    return [term.without(~norms.isfinite()) for term in terms], norms


def _squares(terms: Sequence[Term], kept: Tensor | None) -> Squares:
    total = terms[0].squares(kept)
    for term in terms[1:]:
        total = total + term.squares(kept)
    return total


def _doubtful(squares: Squares, dtype: torch.dtype, bound: Bound) -> Bool[Tensor, "models rows"]:
    """Returns examples whose norm is not finite, or so inexact that its factor is wrong."""
    value, slack = squares.value, squares.slack
    infinite = ~value.isfinite()
    if dtype == torch.float64 or bound.kind == "unbounded":
        return infinite
    # Inner products cancel; below the clip norm the factor is 1 regardless of the norm.
    rounded = slack > _TRUSTED * value
    if bound.kind == "clip":
        rounded &= value + slack >= bound.norm**2
    return infinite | rounded | (value < _SMALL if _tells_short_rows_apart(bound) else False)


@cache
def _tells_short_rows_apart(bound: Bound) -> bool:
    shortest, short = bound.factors(torch.tensor([0.0, _SMALL**0.5], dtype=torch.float64)).tolist()
    return not math.isclose(shortest, short, rel_tol=_TRUSTED)
