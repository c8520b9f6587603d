"""Recurrences of `nn.LSTM`, `nn.GRU` and `nn.RNN` over a sequence, and the derivatives by their pre-activations.

A recurrent layer adds two linear products at each step, W_ih x_t + b_ih and W_hh h_(t-1) + b_hh. Its weights have the
gradients of linear layers over a sequence, sum_t d_t x_tᵀ and sum_t d_t h_(t-1)ᵀ, with d_t the derivatives by these
products: equal for both in an LSTM and an RNN, not in a GRU, whose reset gate multiplies a part of the second. Nodes of
autograd for each operation of each step would take longer than the arithmetic, so backpropagation through time is
written out. Products of inputs, and factors of derivatives that no later step changes, are computed for several steps
at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...numerics.full_precision import device_type

ATEN = torch.ops.aten
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


class Recurrence:
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
        self._weights = Weights(*(None if values is None else values.to(dtype) for values in weights))
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


class LSTMRun(Recurrence):
    """An LSTM, with or without projection of its states."""

    def _run(self, first_cell: Tensor | None) -> None:
        assert first_cell is not None  # noqa: S101  an LSTM has one
        hidden, projection, width = self._weights.hidden, self._weights.projection, first_cell.shape[1]
        self._i, self._f, self._g, self._o = self._gates.split(width, dim=2)
        self._cells_before, cells = self._before_and_after(first_cell)
        self._tanh, states = cells.new_empty(cells.shape), self.after
        if projection is not None:
            states = self.unprojected = cells.new_empty(cells.shape)
        both = self._gates[:, :, : 2 * width]
        for step in self._steps():
            torch.addmm(self._gates[step], self.before[step], hidden.T, out=self._gates[step])
            both[step].sigmoid_()
            entering, leaving = self._g[step].tanh_(), self._o[step].sigmoid_()
            cell = torch.mul(self._f[step], self._cells_before[step], out=cells[step])
            cell.addcmul_(self._i[step], entering)
            torch.mul(leaving, torch.tanh(cell, out=self._tanh[step]), out=states[step])
            if projection is not None:
                torch.mm(states[step], projection.T, out=self.after[step])
        self.last_cell = cells[self._order[-1]]

    def derivatives(self, outputs: Tensor, last_cell: Tensor | None, *, by_inputs: bool) -> Derivatives:
        """Returns the derivatives by backpropagation through time."""
        assert last_cell is not None  # noqa: S101  an LSTM has one
        projection, cell = self._weights.projection, last_cell.clone()
        width = cell.shape[1]
        signals, by_step = self._signals(4 * width)
        by_i, by_f, by_g, by_o = by_step.split(width, dim=2)
        through_cell = by_step[:, :, : 3 * width].unflatten(2, (3, width))
        projected = None if projection is None else outputs.new_empty(outputs.transpose(0, 1).shape)
        state = outputs[self._order[-1]]
        for block, steps in self._backwards():
            # d_i = dc g σ'(i), d_f = dc c_(t-1) σ'(f), d_g = dc i tanh'(g), d_o = dm tanh(c) σ'(o), with m = o tanh(c).
            i, f, g, o = (gate[block] for gate in (self._i, self._f, self._g, self._o))
            ATEN.sigmoid_backward.grad_input(g, i, grad_input=by_i[block])
            ATEN.sigmoid_backward.grad_input(self._cells_before[block], f, grad_input=by_f[block])
            ATEN.tanh_backward.grad_input(i, g, grad_input=by_g[block])
            ATEN.sigmoid_backward.grad_input(self._tanh[block], o, grad_input=by_o[block])
            to_cell = ATEN.tanh_backward(o, self._tanh[block])
            for step, earlier in steps:
                if projected is not None and projection is not None:
                    projected[:, step] = state
                    state = state @ projection
                cell.addcmul_(state, to_cell[step - block.start])
                through_cell[step].mul_(cell.unsqueeze(1))
                by_o[step].mul_(state)
                cell.mul_(self._f[step])
                state = self._passed_on(outputs, earlier, by_step[step])
        inputs = self._by_inputs(signals, needed=by_inputs)
        return Derivatives(inputs, signals, signals, projected, state, cell)


class GRURun(Recurrence):
    """A GRU: h_t = (1 - z) n + z h_(t-1), n = tanh(W_in x_t + b_in + r (W_hn h_(t-1) + b_hn))."""

    def _bias(self) -> Tensor | None:
        """Returns b_ih, with b_hh for the gates outside of which it is added."""
        bias, hidden = self._weights.inputs_bias, self._weights.hidden_bias
        if bias is None or hidden is None:
            return bias
        outside = 2 * len(bias) // 3
        return torch.cat([bias[:outside] + hidden[:outside], bias[outside:]])

    def _run(self, first_cell: Tensor | None) -> None:
        hidden, bias, width = self._weights.hidden, self._weights.hidden_bias, self.before.shape[2]
        self._r, self._z, self._n = self._gates.split(width, dim=2)
        self._inner, both = self.before.new_empty(self.before.shape), self._gates[:, :, : 2 * width]
        of_both, of_inner = hidden[: 2 * width].T, hidden[2 * width :].T
        for step in self._steps():
            before = self.before[step]
            torch.addmm(both[step], before, of_both, out=both[step]).sigmoid_()
            if bias is None:
                torch.mm(before, of_inner, out=self._inner[step])
            else:
                torch.addmm(bias[2 * width :], before, of_inner, out=self._inner[step])
            candidate = self._n[step].addcmul_(self._r[step], self._inner[step]).tanh_()
            torch.lerp(candidate, before, self._z[step], out=self.after[step])

    def derivatives(self, outputs: Tensor, last_cell: Tensor | None, *, by_inputs: bool) -> Derivatives:
        """Returns the derivatives by backpropagation through time."""
        width = outputs.shape[2]
        signals, by_step = self._signals(4 * width)
        by_r, by_z, by_inner, by_n = by_step.split(width, dim=2)
        each, of_hidden = by_step.unflatten(2, (4, width)), by_step[:, :, : 3 * width]
        state = outputs[self._order[-1]]
        for block, steps in self._backwards():
            # All are multiples of dh: d_n = dh (1 - z) tanh'(n), d_z = dh (h_(t-1) - n) σ'(z), d_r = d_n a σ'(r) and,
            # by the product a = W_hn h_(t-1) + b_hn, d_a = d_n r.
            r, z, n, inner = (values[block] for values in (self._r, self._z, self._n, self._inner))
            ATEN.tanh_backward.grad_input(1 - z, n, grad_input=by_n[block])
            ATEN.sigmoid_backward.grad_input(inner, r, grad_input=by_r[block])
            by_r[block].mul_(by_n[block])
            ATEN.sigmoid_backward.grad_input(self.before[block] - n, z, grad_input=by_z[block])
            torch.mul(by_n[block], r, out=by_inner[block])
            for step, earlier in steps:
                each[step].mul_(state.unsqueeze(1))
                kept = state * self._z[step]
                state = self._passed_on(outputs, earlier, of_hidden[step]).add_(kept)
        products = torch.cat([signals[:, :, : 2 * width], signals[:, :, 3 * width :]], dim=2)
        inputs = self._by_inputs(products, needed=by_inputs)
        return Derivatives(inputs, products, signals[:, :, : 3 * width], None, state, None)


class _ElmanRun(Recurrence):
    """An RNN with an activation."""

    def _run(self, first_cell: Tensor | None) -> None:
        for step in self._steps():
            after = self.after[step]
            torch.addmm(self._gates[step], self.before[step], self._weights.hidden.T, out=after)
            self._activate(after)

    def derivatives(self, outputs: Tensor, last_cell: Tensor | None, *, by_inputs: bool) -> Derivatives:
        """Returns the derivatives by backpropagation through time."""
        (signals, by_step), state = self._signals(outputs.shape[2]), outputs[self._order[-1]]
        for block, steps in self._backwards():
            slopes = self._slopes(self.after[block])
            for step, earlier in steps:
                torch.mul(slopes[step - block.start], state, out=by_step[step])
                state = self._passed_on(outputs, earlier, by_step[step])
        inputs = self._by_inputs(signals, needed=by_inputs)
        return Derivatives(inputs, signals, signals, None, state, None)

    def _activate(self, values: Tensor) -> None:
        raise NotImplementedError(f"{type(self).__name__} must define _activate(values)")

    def _slopes(self, states: Tensor) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} must define _slopes(states)")


class TanhRun(_ElmanRun):
    """An RNN with tanh."""

    def _activate(self, values: Tensor) -> None:
        values.tanh_()

    def _slopes(self, states: Tensor) -> Tensor:
        return ATEN.tanh_backward(torch.ones_like(states), states)


class ReLURun(_ElmanRun):
    """An RNN with ReLU."""

    def _activate(self, values: Tensor) -> None:
        values.relu_()

    def _slopes(self, states: Tensor) -> Tensor:
        return (states > 0).to(states.dtype)


class Differentiated(torch.autograd.Function):
    """Results of a recurrence that has run, as functions of its inputs, products and first states."""

    @staticmethod
    def forward(ctx: Any, run: Recurrence, *_differentiated: Tensor | None) -> tuple[Tensor, Tensor | None]:
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
    def backward(ctx: Any, *signals: Any) -> tuple[Tensor | None, ...]:
        """Returns the derivatives; they can be computed once, because the run's memory is freed."""
        run, ctx.run = ctx.run, None
        outputs, last_cell = signals
        return None, *run.derivatives(outputs.to(run.after.dtype), last_cell, by_inputs=ctx.needs_input_grad[1])


def _within(block: slice, *, reverse: bool) -> Iterator[int]:
    steps = range(block.start, block.stop)
    yield from reversed(steps) if reverse else steps
