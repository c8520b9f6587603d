"""Recurrences of `nn.LSTM`, `nn.GRU` and `nn.RNN` over a sequence, and the derivatives by their pre-activations.

A recurrent layer adds two linear products at each step, W_ih x_t + b_ih and W_hh h_(t-1) + b_hh. Its weights have the
gradients of linear layers over a sequence, sum_t d_t x_tᵀ and sum_t d_t h_(t-1)ᵀ, with d_t the derivatives by these
products: equal for both in an LSTM and an RNN, not in a GRU, whose reset gate multiplies a part of the second. Nodes of
autograd for each operation of each step would take longer than the arithmetic, so backpropagation through time is
written out: factors that no later step changes are computed for all steps at once, time first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

ATEN = torch.ops.aten


class Weights(NamedTuple):
    """Parameters inside of the recurrence.

    Attributes:
        hidden: W_hh.
        bias: b_hh, if there is one.
        projection: W_hr of an LSTM whose states are projected, if they are.
    """

    hidden: Float[Tensor, "gates state"]
    bias: Float[Tensor, " gates"] | None
    projection: Float[Tensor, "state width"] | None = None


class Derivatives(NamedTuple):
    """Derivatives of the loss by a recurrence's products and first states.

    Attributes:
        products: by W_ih x_t + b_ih.
        hidden: by W_hh h_(t-1) + b_hh; the same tensor if they are equal.
        projected: by W_hr m_t, if there is one.
        first: by the first state.
        first_cell: by the first cell state, if there is one.
    """

    products: Float[Tensor, "rows t gates"]
    hidden: Float[Tensor, "rows t gates"]
    projected: Float[Tensor, "rows t state"] | None
    first: Float[Tensor, "rows state"]
    first_cell: Float[Tensor, "rows width"] | None


class Recurrence:
    """A recurrence that has run over a sequence, with the values that its derivatives need.

    Attributes:
        before: state that each step begins with.
        after: state that each step ends with.
        unprojected: states of an LSTM before their projection, if they are projected.
        last_cell: last cell state of an LSTM.
    """

    unprojected: Float[Tensor, "t rows width"] | None = None
    last_cell: Float[Tensor, "rows width"] | None = None

    def __init__(
        self,
        products: Float[Tensor, "rows t gates"],
        first: Float[Tensor, "rows state"],
        first_cell: Float[Tensor, "rows width"] | None,
        weights: Weights,
        *,
        reverse: bool,
    ) -> None:
        """Runs over a sequence.

        Args:
            products: W_ih x_t + b_ih of all steps.
            first: first state.
            first_cell: first cell state, for an LSTM.
            weights: parameters of the recurrence.
            reverse: True to begin with the last step.
        """
        # Under autocast the products are in bfloat16; with the rest in the same dtype nothing is widened on the way.
        self._weights = Weights(*(None if values is None else values.to(products.dtype) for values in weights))
        steps = products.shape[1]
        self._reverse, self._order = reverse, list(range(steps))[:: -1 if reverse else 1]
        self.before, self.after = _before_and_after(steps, first.to(products.dtype), reverse=reverse)
        self._run(products.transpose(0, 1), None if first_cell is None else first_cell.to(products.dtype))

    def derivatives(
        self, outputs: Float[Tensor, "t rows state"], last_cell: Float[Tensor, "rows width"] | None
    ) -> Derivatives:
        """Returns the derivatives, given those by the states after each step and by the last cell state."""
        raise NotImplementedError(f"{type(self).__name__} must define derivatives(outputs, last_cell)")

    def _run(self, products: Float[Tensor, "t rows gates"], first_cell: Tensor | None) -> None:
        raise NotImplementedError(f"{type(self).__name__} must define _run(products, first_cell)")

    def _backwards(self) -> Iterator[tuple[int, int | None]]:
        """Yields the steps from the last to the first, each with the step before it."""
        yield from zip(self._order[::-1], [*self._order[-2::-1], None], strict=True)

    def _with_bias(self, products: Tensor) -> Tensor:
        """Returns W_ih x_t + b_ih + b_hh, in memory by steps."""
        values = _by_steps(products)
        bias = self._weights.bias
        return values.copy_(products) if bias is None else torch.add(products, bias, out=values)


class LSTMRun(Recurrence):
    """An LSTM, with or without projection of its states."""

    def _run(self, products: Tensor, first_cell: Tensor | None) -> None:
        assert first_cell is not None  # noqa: S101  an LSTM has one
        (hidden, _, projection), width = self._weights, first_cell.shape[1]
        self._gates = self._with_bias(products)
        self._i, self._f, self._g, self._o = self._gates.split(width, dim=2)
        self._cells_before, cells = _before_and_after(len(products), first_cell, reverse=self._reverse)
        self._tanh, states = cells.new_empty(cells.shape), self.after
        if projection is not None:
            states = self.unprojected = cells.new_empty(cells.shape)
        both = self._gates[:, :, : 2 * width]
        for step in self._order:
            gates = self._gates[step]
            torch.addmm(gates, self.before[step], hidden.T, out=gates)
            both[step].sigmoid_()
            entering, leaving = self._g[step].tanh_(), self._o[step].sigmoid_()
            cell = torch.mul(self._f[step], self._cells_before[step], out=cells[step])
            cell.addcmul_(self._i[step], entering)
            torch.mul(leaving, torch.tanh(cell, out=self._tanh[step]), out=states[step])
            if projection is not None:
                torch.mm(states[step], projection.T, out=self.after[step])
        self.last_cell = cells[self._order[-1]]

    def derivatives(self, outputs: Tensor, last_cell: Tensor | None) -> Derivatives:
        """Returns the derivatives by backpropagation through time."""
        assert last_cell is not None  # noqa: S101  an LSTM has one
        hidden, _, projection = self._weights
        signals, cell = _by_steps(self._gates), last_cell.clone()
        parts = signals.split(cell.shape[1], dim=2)
        # d_i = dc g σ'(i), d_f = dc c_(t-1) σ'(f), d_g = dc i tanh'(g), d_o = dm tanh(c) σ'(o), with m = o tanh(c).
        ATEN.sigmoid_backward.grad_input(self._g, self._i, grad_input=parts[0])
        ATEN.sigmoid_backward.grad_input(self._cells_before, self._f, grad_input=parts[1])
        ATEN.tanh_backward.grad_input(self._i, self._g, grad_input=parts[2])
        ATEN.sigmoid_backward.grad_input(self._tanh, self._o, grad_input=parts[3])
        to_cell = ATEN.tanh_backward(self._o, self._tanh)
        of_cell = signals[:, :, : 3 * cell.shape[1]].unflatten(2, (3, cell.shape[1]))
        projected = None if projection is None else outputs.new_empty(outputs.shape)
        state = outputs[self._order[-1]]
        for step, earlier in self._backwards():
            if projected is not None and projection is not None:
                projected[step] = state
                state = state @ projection
            cell.addcmul_(state, to_cell[step])
            of_cell[step].mul_(cell.unsqueeze(1))
            parts[3][step].mul_(state)
            cell.mul_(self._f[step])
            state = _passed_on(outputs, earlier, signals[step], hidden)
        products = _by_rows(signals)
        return Derivatives(products, products, None if projected is None else _by_rows(projected), state, cell)


class GRURun(Recurrence):
    """A GRU: h_t = (1 - z) n + z h_(t-1), n = tanh(W_in x_t + b_in + r (W_hn h_(t-1) + b_hn))."""

    def _run(self, products: Tensor, first_cell: Tensor | None) -> None:
        (hidden, bias, _), width = self._weights, self.before.shape[2]
        gates, inner = _by_steps(products), products.new_empty(self.before.shape)
        gates.copy_(products)
        both, (r, z, n) = gates[:, :, : 2 * width], gates.split(width, dim=2)
        of_both, of_inner = hidden[: 2 * width].T, hidden[2 * width :].T
        if bias is not None:
            both += bias[: 2 * width]
        for step in self._order:
            before = self.before[step]
            torch.addmm(both[step], before, of_both, out=both[step]).sigmoid_()
            if bias is None:
                torch.mm(before, of_inner, out=inner[step])
            else:
                torch.addmm(bias[2 * width :], before, of_inner, out=inner[step])
            candidate = n[step].addcmul_(r[step], inner[step]).tanh_()
            torch.lerp(candidate, before, z[step], out=self.after[step])
        self._r, self._z, self._n, self._inner = r, z, n, inner

    def derivatives(self, outputs: Tensor, last_cell: Tensor | None) -> Derivatives:
        """Returns the derivatives by backpropagation through time."""
        width = outputs.shape[2]
        # All are multiples of dh: d_n = dh (1 - z) tanh'(n), d_z = dh (h_(t-1) - n) σ'(z), d_r = d_n a σ'(r) and, by
        # the product a = W_hn h_(t-1) + b_hn, d_a = d_n r.
        signals = _by_steps(outputs, 4 * width)
        by_r, by_z, by_inner, by_n = signals.split(width, dim=2)
        ATEN.tanh_backward.grad_input(1 - self._z, self._n, grad_input=by_n)
        ATEN.sigmoid_backward.grad_input(self._inner, self._r, grad_input=by_r)
        by_r.mul_(by_n)
        ATEN.sigmoid_backward.grad_input(self.before - self._n, self._z, grad_input=by_z)
        torch.mul(by_n, self._r, out=by_inner)
        each, of_hidden = signals.unflatten(2, (4, width)), signals[:, :, : 3 * width]
        state = outputs[self._order[-1]]
        for step, earlier in self._backwards():
            each[step].mul_(state.unsqueeze(1))
            kept = state * self._z[step]
            state = _passed_on(outputs, earlier, of_hidden[step], self._weights.hidden).add_(kept)
        products = torch.cat([_by_rows(signals[:, :, : 2 * width]), _by_rows(by_n)], dim=2)
        return Derivatives(products, _by_rows(of_hidden), None, state, None)


class _ElmanRun(Recurrence):
    """An RNN with an activation."""

    def _run(self, products: Tensor, first_cell: Tensor | None) -> None:
        summed = self._with_bias(products)
        for step in self._order:
            after = torch.addmm(summed[step], self.before[step], self._weights.hidden.T, out=self.after[step])
            self._activate(after)

    def derivatives(self, outputs: Tensor, last_cell: Tensor | None) -> Derivatives:
        """Returns the derivatives by backpropagation through time."""
        signals, state = self._slopes(), outputs[self._order[-1]]
        for step, earlier in self._backwards():
            signals[step].mul_(state)
            state = _passed_on(outputs, earlier, signals[step], self._weights.hidden)
        products = _by_rows(signals)
        return Derivatives(products, products, None, state, None)

    def _activate(self, values: Tensor) -> None:
        raise NotImplementedError(f"{type(self).__name__} must define _activate(values)")

    def _slopes(self) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} must define _slopes()")


class TanhRun(_ElmanRun):
    """An RNN with tanh."""

    def _activate(self, values: Tensor) -> None:
        values.tanh_()

    def _slopes(self) -> Tensor:
        return ATEN.tanh_backward(torch.ones_like(self.after), self.after)


class ReLURun(_ElmanRun):
    """An RNN with ReLU."""

    def _activate(self, values: Tensor) -> None:
        values.relu_()

    def _slopes(self) -> Tensor:
        return (self.after > 0).to(self.after.dtype)


class Differentiated(torch.autograd.Function):
    """States and last cell state of a recurrence that has run, as functions of its products and first states."""

    @staticmethod
    def forward(ctx: Any, run: Recurrence, *_differentiated: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Returns the states [t, rows, state] and the last cell state.

        Args:
            ctx: PyTorch's.
            run: the recurrence.
            _differentiated: tensors in the order of `Derivatives`; products inside of the run by their shapes only.
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
        return None, *run.derivatives(outputs.to(run.after.dtype), last_cell)


def _before_and_after(steps: int, first: Tensor, *, reverse: bool) -> tuple[Tensor, Tensor]:
    """Returns memory for states before and after each step, in which a state lies once."""
    states = first.new_empty(steps + 1, *first.shape)
    states[-1 if reverse else 0] = first
    return (states[1:], states[:-1]) if reverse else (states[:-1], states[1:])


def _by_steps(like: Tensor, width: int | None = None) -> Tensor:
    return like.new_empty(*like.shape[:2], like.shape[2] if width is None else width)


def _by_rows(values: Float[Tensor, "t rows width"]) -> Float[Tensor, "rows t width"]:
    return values.transpose(0, 1).contiguous()


def _passed_on(outputs: Tensor, earlier: int | None, signals: Tensor, hidden: Tensor) -> Tensor:
    """Returns the derivative by a state through the product of the step after it, and its own as an output."""
    return signals @ hidden if earlier is None else torch.addmm(outputs[earlier], signals, hidden)
