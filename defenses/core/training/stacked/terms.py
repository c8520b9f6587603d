"""Per-example gradients of a layer of many models, in factored form: squared norms, and clipped sums.

A layer of parameters sees inputs x and signals s, the derivatives of the losses by its outputs. Where each example
meets the weight once, its gradient is s xᵀ, whose norm is |s| |x|, under a mask M (s∘s)ᵀ M (x∘x). Where it does so at
several positions (pixels of a convolution's output, places of a sequence), the gradient is a sum of s_p x_pᵀ, and its
norm comes from the sum itself or from inner products between positions, whichever `layerwise/cost.py` finds cheaper.
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
"""Relative error of a squared norm up to which it is trusted."""
_SMALL = 1e-20
"""Squared norms below this may have lost squares that are no numbers of float32."""


@dataclass(frozen=True)
class Place:
    """Where a parameter is in the flat vectors of models, and how a layer reads it.

    Attributes:
        span: (start, stop) in the vector of one model.
        shape: of the parameter.
        order: of its dimensions, as the layer reads it; None: as it is.
        groups: of channels into which the first dimension falls.
    """

    span: tuple[int, int]
    shape: tuple[int, ...]
    order: tuple[int, ...] | None = None
    groups: int = 1

    def of(self, flat: Float[Tensor, "models dim"]) -> Tensor:
        """The parameter of each model, [models, *shape]; a view."""
        return flat[:, slice(*self.span)].unflatten(1, self.shape)

    def read(self, flat: Float[Tensor, "models dim"]) -> Float[Tensor, "models groups out in"]:
        """A weight by groups, its other dimensions in the layer's order and flattened."""
        weight = self.of(flat)
        if self.order is not None:
            weight = weight.permute(0, *(1 + axis for axis in self.order))
        return weight.flatten(2).unflatten(1, (self.groups, -1))

    def add(self, sums: Float[Tensor, "models dim"], weight: Float[Tensor, "models groups out in"]) -> None:
        """Adds, in place, what has the form of `read`."""
        value = weight.flatten(1, 2)
        if self.order is not None:
            value = value.unflatten(2, [self.shape[axis] for axis in self.order[1:]])
            value = value.permute(0, *(1 + self.order.index(axis) for axis in range(len(self.order))))
        self.of(sums).add_(value.reshape(-1, *self.shape))


@runtime_checkable
class Term(Protocol):
    """Gradients of one or two parameters, of each example of each model's batch."""

    @property
    def numbers(self) -> int:
        """Largest number of entries of the tensors that are held or formed for one model, example by example."""
        ...

    def squares(self, kept: Float[Tensor, "models dim"] | None) -> Squares:
        """Squared norms [models, rows] of what a mask leaves; of all where there is none."""
        ...

    def add(self, factors: Float[Tensor, "models rows"], sums: Float[Tensor, "models dim"]) -> None:
        """Adds to each model's sum its examples' gradients, each times its factor; what a mask drops included."""
        ...

    def without(self, bad: Bool[Tensor, "models rows"]) -> Term:
        """The same with zeros for some examples, whatever they hold: zero times infinity is no zero."""
        ...

    def double(self) -> Term:
        """The same in float64, in which no square of a float32 overflows or vanishes."""
        ...


@dataclass(frozen=True)
class OneProduct:
    """Gradients of a linear layer that each example meets once: s xᵀ, and s for its bias."""

    weight: Place
    bias: Place | None
    inputs: Float[Tensor, "models rows in"]
    signals: Float[Tensor, "models rows out"]

    @property
    def numbers(self) -> int:
        """What is held, and squares of it."""
        return 2 * (self.inputs[0].numel() + self.signals[0].numel())

    def squares(self, kept: Tensor | None) -> Squares:
        """Without forming a gradient, masked or not."""
        energy = self.signals.square()
        if kept is None:
            return Squares.exact(energy.sum(-1).double() * (self.inputs.square().sum(-1) + (self.bias is not None)))
        mask = kept.to(energy.dtype)
        found = (energy.bmm(self.weight.of(mask)) * self.inputs.square()).sum(-1)
        return Squares.exact(found if self.bias is None else found + energy.bmm(self.bias.of(mask)[..., None])[..., 0])

    def add(self, factors: Tensor, sums: Tensor) -> None:
        """One product over each model's batch."""
        scaled = self.signals * factors[..., None]
        self.weight.of(sums).add_(scaled.mT.bmm(self.inputs))
        if self.bias is not None:
            self.bias.of(sums).add_(scaled.sum(1))

    def without(self, bad: Tensor) -> OneProduct:
        """Zeros in both factors."""
        inputs, signals = (one.masked_fill(bad[..., None], 0.0) for one in (self.inputs, self.signals))
        return replace(self, inputs=inputs, signals=signals)

    def double(self) -> OneProduct:
        """Both factors in float64."""
        return replace(self, inputs=self.inputs.double(), signals=self.signals.double())


class ProductSum:
    """Gradients of a weight that each example meets at several positions: the sum of s_p x_pᵀ, by groups."""

    def __init__(
        self,
        weight: Place,
        inputs: Float[Tensor, "models groups rows positions in"],
        signals: Float[Tensor, "models groups rows positions out"],
    ) -> None:
        """Takes what went in at each position, as patches, and the derivatives by what came out."""
        self.weight, self.inputs, self.signals = weight, inputs, signals

    @cached_property
    def _shape(self) -> Shape:
        _, groups, _, positions, inputs = self.inputs.shape
        outputs = self.signals.shape[-1]
        stored = groups * positions * (inputs + outputs)
        return Shape(positions=positions, inputs=inputs, outputs=outputs, stored=stored, groups=groups, patched=False)

    @cached_property
    def _by_positions(self) -> bool:
        """Whether norms come from inner products between positions; a mask knows none of them."""
        return cheapest(self._shape, self.inputs.device.type) is Strategy.GRAM

    @cached_property
    def _gradients(self) -> Float[Tensor, "models groups rows out in"]:
        return self.signals.mT @ self.inputs

    @property
    def numbers(self) -> int:
        """What is held, with as much again for what scales it, and the larger of gradients and inner products."""
        shape = self._shape
        # Inner products and what they are of count twice, in float64.
        inner = shape.stored + 2 * shape.groups * shape.positions**2
        formed = 2 * max(shape.row, inner if self._by_positions else 0)
        return self.inputs.shape[2] * (2 * shape.stored + formed)

    def squares(self, kept: Tensor | None) -> Squares:
        """By gradients, or by inner products; of all groups."""
        if kept is None and self._by_positions:
            products, others = (gram(one.flatten(0, 2)) for one in (self.inputs, self.signals))
            by_group = gram_squares(products, others, self.signals.dtype)
            shape = self.inputs.shape[:3]
            return Squares(by_group.value.view(shape).sum(1), by_group.slack.view(shape).sum(1))
        gradients = self._gradients
        if kept is not None:
            gradients = gradients * self.weight.read(kept).to(gradients.dtype)[:, :, None]
        found = gradients.square().sum((-1, -2)).sum(1).double()
        if not self._worth_keeping:
            del self._gradients
        return Squares.exact(found)

    def add(self, factors: Tensor, sums: Tensor) -> None:
        """From the gradients where they were kept, else one product over all positions of each model's batch."""
        if "_gradients" in vars(self):
            models, groups, rows, outputs, inputs = self._gradients.shape
            flat = self._gradients.reshape(models, groups, rows, outputs * inputs)
            value = (factors[:, None, None].expand(-1, groups, -1, -1) @ flat).view(models, groups, outputs, inputs)
        else:
            scaled = self.signals * factors[:, None, :, None, None]
            value = scaled.flatten(2, 3).mT @ self.inputs.flatten(2, 3)
        self.weight.add(sums, value)

    def without(self, bad: Tensor) -> ProductSum:
        """Zeros in both factors."""
        gone = bad[:, None, :, None, None]
        return ProductSum(self.weight, self.inputs.masked_fill(gone, 0.0), self.signals.masked_fill(gone, 0.0))

    def double(self) -> ProductSum:
        """Both factors in float64."""
        return ProductSum(self.weight, self.inputs.double(), self.signals.double())

    @property
    def _worth_keeping(self) -> bool:
        costs = estimates(self._shape, self.inputs.device.type)
        return costs.get(Strategy.KEEP, math.inf) <= costs[Strategy.FREE]


@dataclass(frozen=True)
class FormedRows:
    """Gradients that are formed: of biases, and of scales and shifts of normalisation layers."""

    place: Place
    values: Float[Tensor, "models rows size"]

    @property
    def numbers(self) -> int:
        """What is held, and its square."""
        return 2 * self.values[0].numel()

    def squares(self, kept: Tensor | None) -> Squares:
        """In one pass."""
        values = self.values if kept is None else self.values * self.place.of(kept).to(self.values.dtype)[:, None]
        return Squares.exact(values.square().sum(-1))

    def add(self, factors: Tensor, sums: Tensor) -> None:
        """One product with the factors."""
        self.place.of(sums).add_((factors[:, None] @ self.values)[:, 0])

    def without(self, bad: Tensor) -> FormedRows:
        """Zero rows."""
        return replace(self, values=self.values.masked_fill(bad[..., None], 0.0))

    def double(self) -> FormedRows:
        """In float64."""
        return replace(self, values=self.values.double())


def norms_of(
    terms: Sequence[Term], kept: Tensor | None, dtype: torch.dtype, bound: Bound
) -> tuple[Sequence[Term], Float[Tensor, "models rows"]]:
    """Norms of examples' gradients in float64, infinite or NaN where one is not finite, and terms with zeros there.

    Args:
        terms: of all parameters.
        kept: the mask of each model, if there are any.
        dtype: of the gradients; what is larger than its numbers is not finite.
        bound: on what the mask leaves; where norms change nothing of its factors they may be as rounded as they are.
    """
    found = _squares(terms, kept)
    if not bool(_doubtful(found, dtype, bound).any()):
        return terms, found.value.sqrt()
    wide = [term.double() for term in terms]
    norms = _squares(wide, kept).value.sqrt()
    # Of whole rows: one that is not finite counts as zero, whatever a mask leaves of it.
    whole = norms if kept is None else _squares(wide, None).value.sqrt()
    norms = norms.masked_fill(whole > torch.finfo(dtype).max, math.inf)
    return [term.without(~norms.isfinite()) for term in terms], norms


def _squares(terms: Sequence[Term], kept: Tensor | None) -> Squares:
    found = terms[0].squares(kept)
    for term in terms[1:]:
        found = found + term.squares(kept)
    return found


def _doubtful(squares: Squares, dtype: torch.dtype, bound: Bound) -> Bool[Tensor, "models rows"]:
    """Examples whose norm is not finite, or may be wrong by so much that its factor is."""
    value, slack = squares.value, squares.slack
    infinite = ~value.isfinite()
    if dtype == torch.float64 or bound.kind == "unbounded":
        return infinite
    # Inner products that cancel; below the clip norm the factor is 1 whatever the norm is.
    rounded = slack > _TRUSTED * value
    if bound.kind == "clip":
        rounded &= value + slack >= bound.norm**2
    return infinite | rounded | (value < _SMALL if _tells_short_rows_apart(bound) else False)


@cache
def _tells_short_rows_apart(bound: Bound) -> bool:
    shortest, short = bound.factors(torch.tensor([0.0, _SMALL**0.5], dtype=torch.float64)).tolist()
    return not math.isclose(shortest, short, rel_tol=_TRUSTED)
