"""Recurrences of `nn.LSTM`, `nn.GRU` and `nn.RNN` over a sequence, and the derivatives by their pre-activations.

A recurrent layer adds two linear products at each step, W_ih x_t + b_ih and W_hh h_(t-1) + b_hh. Its weights have the
gradients of linear layers over a sequence, sum_t d_t x_tᵀ and sum_t d_t h_(t-1)ᵀ, with d_t the derivatives by these
products: equal for both in an LSTM and an RNN, not in a GRU, whose reset gate multiplies a part of the second. Nodes of
autograd for each operation of each step would take longer than the arithmetic, so backpropagation through time is
written out. Products of inputs, and factors of derivatives that no later step changes, are computed for several steps
at once.

Guarantee:
    An example's states and derivatives are computed from its own row of the inputs, first states and outputs'
    derivatives: each operation is elementwise in the rows, or multiplies each row with the same matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from ....numerics.full_precision import device_type

# Bytes of the gates of some steps, which stay in the cache of a CPU between their uses; a GPU needs large launches.
_AT_ONCE = 2**20


class Weights(NamedTuple):
    """Parameters of a recurrence.

    Attributes:
        inputs: W_ih.
        inputs_bias: b_ih, if there is one.
        hidden: W_hh.
        hidden_bias: b_hh, if there is one.
        projection: W_hr of an LSTM whose states are projected.
    """

    inputs: Float[Tensor, "gates width"]
    inputs_bias: Float[Tensor, " gates"] | None
    hidden: Float[Tensor, "gates state"]
    hidden_bias: Float[Tensor, " gates"] | None
    projection: Float[Tensor, "state cell"] | None = None

    def converted(self, dtype: torch.dtype) -> Weights:
        """Returns the parameters in a dtype."""
        inputs_bias, hidden_bias, projection = (
            None if values is None else values.to(dtype)
            for values in (self.inputs_bias, self.hidden_bias, self.projection)
        )
        return Weights(self.inputs.to(dtype), inputs_bias, self.hidden.to(dtype), hidden_bias, projection)


class Derivatives(NamedTuple):
    """Derivatives of the loss by a recurrence's inputs, products and first states.

    Attributes:
        inputs: by the inputs, unless they are not needed.
        products: by W_ih x_t + b_ih.
        hidden: by W_hh h_(t-1) + b_hh; the same tensor if they are equal.
        projected: by W_hr m_t, if there is one.
        first: by the first state.
        first_cell: by the first cell state, if there is one.
    """

    inputs: Float[Tensor, "rows t width"] | None
    products: Float[Tensor, "rows t gates"]
    hidden: Float[Tensor, "rows t gates"]
    projected: Float[Tensor, "rows t state"] | None
    first: Float[Tensor, "rows state"]
    first_cell: Float[Tensor, "rows cell"] | None


class UnrolledLayer:
    """A recurrence that has run over a sequence, with the values that its derivatives need.

    Attributes:
        before: state that each step begins with.
        after: state that each step ends with.
        unprojected: states of an LSTM before their projection, if they are projected.
        last_cell: last cell state of an LSTM.
    """

    unprojected: Float[Tensor, "t rows cell"] | None = None
    last_cell: Float[Tensor, "rows cell"] | None = None
    _gates: Float[Tensor, "t rows gates"]

    def __init__(
        self,
        inputs: Float[Tensor, "rows t width"],
        first: Float[Tensor, "rows state"],
        first_cell: Float[Tensor, "rows cell"] | None,
        weights: Weights,
        *,
        reverse: bool,
    ) -> None:
        """Runs over a sequence.

        Args:
            inputs: inputs of all steps.
            first: first state.
            first_cell: first cell state, for an LSTM.
            weights: parameters of the recurrence.
            reverse: True to begin with the last step.
        """
        device = device_type(inputs)
        # Products in place are not autocast, and all of one dtype nothing is widened on the way.
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else inputs.dtype
        self._weights = weights.converted(dtype)
        (rows, steps, _), gates = inputs.shape, len(weights.inputs)
        self._inputs = inputs.transpose(0, 1).to(dtype)
        self._gates = self._inputs.new_empty(steps, rows, gates)
        self._reverse, self._order = reverse, list(range(steps))[:: -1 if reverse else 1]
        self._at_once = steps
        if inputs.is_cpu:
            self._at_once = max(1, _AT_ONCE // max(1, rows * gates * self._gates.element_size()))
        self.before, self.after = self._before_and_after(first.to(dtype))
        self._run(None if first_cell is None else first_cell.to(dtype))
        del self._inputs

    def derivatives(
        self, outputs: Float[Tensor, "t rows state"], last_cell: Float[Tensor, "rows cell"] | None, *, by_inputs: bool
    ) -> Derivatives:
        """Returns the derivatives by backpropagation through time.

        Args:
            outputs: derivatives by the states after each step.
            last_cell: derivative by the last cell state of an LSTM.
            by_inputs: whether the derivative by the inputs is needed.
        """
        raise NotImplementedError(f"{type(self).__name__} must define derivatives(outputs, last_cell, by_inputs)")

    def _run(self, first_cell: Tensor | None) -> None:
        raise NotImplementedError(f"{type(self).__name__} must define _run(first_cell)")

    def _bias(self) -> Tensor | None:
        """Returns the constant that the products of the inputs are added to."""
        bias, hidden = self._weights.inputs_bias, self._weights.hidden_bias
        return bias if hidden is None or bias is None else bias + hidden

    def _steps(self) -> Iterator[int]:
        """Yields the steps in their order, once the products of their inputs are in the gates."""
        weight, bias = self._weights.inputs, self._bias()
        for block in self._blocks():
            products = self._gates[block].view(-1, len(weight))
            inputs = self._inputs[block].reshape(len(products), -1)
            if bias is None:
                torch.mm(inputs, weight.T, out=products)
            else:
                torch.addmm(bias, inputs, weight.T, out=products)
            yield from _within(block, reverse=self._reverse)

    def _blocks(self) -> Iterator[slice]:
        """Yields slices of steps, in their order."""
        steps = len(self._order)
        starts = range(0, steps, self._at_once)
        for start in reversed(starts) if self._reverse else starts:
            yield slice(start, min(start + self._at_once, steps))

    def _backwards(self) -> Iterator[tuple[slice, list[tuple[int, int | None]]]]:
        """Yields slices of steps from the last to the first, with their steps, each with the step before it."""
        earlier = dict(zip(self._order, [None, *self._order], strict=False))
        for block in reversed([*self._blocks()]):
            yield block, [(step, earlier[step]) for step in _within(block, reverse=not self._reverse)]

    def _before_and_after(self, first: Tensor) -> tuple[Tensor, Tensor]:
        """Returns memory for states before and after each step, in which a state lies once."""
        states = first.new_empty(len(self._order) + 1, *first.shape)
        states[-1 if self._reverse else 0] = first
        return (states[1:], states[:-1]) if self._reverse else (states[:-1], states[1:])

    def _signals(self, width: int) -> tuple[Tensor, Tensor]:
        """Returns memory for derivatives, by rows and by steps."""
        steps, rows, _ = self._gates.shape
        signals = self._gates.new_empty(rows, steps, width)
        return signals, signals.transpose(0, 1)

    def _by_inputs(self, products: Tensor, *, needed: bool) -> Tensor | None:
        """Returns the derivative by the inputs through their products."""
        return products.flatten(0, 1).mm(self._weights.inputs).view(*products.shape[:2], -1) if needed else None

    def _passed_on(self, outputs: Tensor, earlier: int | None, signals: Tensor) -> Tensor:
        """Returns the derivative by a state through the product of the step after it, and its own as an output."""
        hidden = self._weights.hidden
        return signals @ hidden if earlier is None else torch.addmm(outputs[earlier], signals, hidden)


class Differentiated(torch.autograd.Function):
    """Results of a recurrence that has run, as functions of its inputs, products and first states."""

    @staticmethod
    def forward(ctx: Any, run: UnrolledLayer, *_differentiated: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Returns the states after each step and the last cell state.

        Args:
            ctx: PyTorch's.
            run: the recurrence.
            _differentiated: tensors in the order of `Derivatives`, whose values the run has used.
        """
        ctx.run = run
        # Copies, because a model may change its tensors in place.
        return run.after.clone(), None if run.last_cell is None else run.last_cell.clone()

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  the decorator hides the names
        ctx: Any, outputs: Tensor, last_cell: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Returns the derivatives; they can be computed once, because the run's memory is freed."""
        run, ctx.run = ctx.run, None
        return None, *run.derivatives(outputs.to(run.after.dtype), last_cell, by_inputs=ctx.needs_input_grad[1])


def _within(block: slice, *, reverse: bool) -> Iterator[int]:
    steps = range(block.start, block.stop)
    yield from reversed(steps) if reverse else steps
