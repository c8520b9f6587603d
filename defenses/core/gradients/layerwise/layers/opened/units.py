"""Units of recurrent layers: LSTM, with or without projected states, GRU, and Elman's with tanh or ReLU."""

from __future__ import annotations

import torch
from torch import Tensor

from .recurrence import Derivatives, UnrolledLayer

ATEN = torch.ops.aten


class LSTMRun(UnrolledLayer):
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


class GRURun(UnrolledLayer):
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


class _ElmanRun(UnrolledLayer):
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
