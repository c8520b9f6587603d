"""`nn.LSTM`, `nn.GRU`, `nn.RNN` and their cells as linear layers, which are recorded in place of them.

During a pass a module runs a copy of PyTorch's own forward function, in which the recurrence is ours (`recurrence.py`).
It computes the products of inputs and states, each of which is recorded as the call of a linear layer for all steps.
Everything else, such as layouts and first states, is PyTorch's. Dropout between layers is drawn by record
(`drawn_functions.py`), with the draws that replace those of PyTorch's own function. A cell calls a layer for each of
its two products.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from ....checks.synthetic_examples import tensors_of
from ....engines.interface import Unsupported
from ...shared_values import SharedValue
from .projection import Projection, with_globals
from .recurrence import Differentiated, UnrolledLayer, Weights
from .units import GRURun, LSTMRun, ReLURun, TanhRun


class FusedProjection(Projection):
    """A linear layer whose products are computed by a recurrence, which takes no values from this call."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns memory of the products' shape, whose derivatives the recurrence computes; its values are unset."""
        return inputs.new_empty(*inputs.shape[:-1], self.out_features)


def projections_of(module: nn.Module, name: str) -> tuple[Projection, ...]:
    """Returns the linear layers of a recurrent module or cell, by layer and direction; none if it is frozen."""
    if not any(parameter.requires_grad for parameter in module.parameters()):
        return ()
    if isinstance(module, nn.RNNCellBase):
        return tuple(_projection(Projection, module, name, kind, "") for kind in ("ih", "hh"))
    assert isinstance(module, nn.RNNBase)  # noqa: S101  as `FORWARDS` says
    layers: list[Projection] = []
    for suffix in _suffixes(module):
        layers.append(_projection(FusedProjection, module, name, "ih", suffix))
        layers.append(_projection(FusedProjection, module, name, "hh", suffix))
        if module.proj_size:
            layers.append(_projection(FusedProjection, module, name, "hr", suffix))
    return tuple(layers)


def _suffixes(module: nn.RNNBase) -> Iterator[str]:
    for layer in range(module.num_layers):
        yield f"_l{layer}"
        if module.bidirectional:
            yield f"_l{layer}_reverse"


def _projection(kind: type[Projection], module: nn.Module, name: str, key: str, suffix: str) -> Projection:
    weight, bias = f"weight_{key}{suffix}", f"bias_{key}{suffix}"
    return kind(module, weight, None if getattr(module, bias, None) is None else bias, f"{name}.{weight}")


class _Direction(NamedTuple):
    """The products of a layer in a direction.

    Attributes:
        into: those of the inputs.
        hidden: those of the states.
        out: those that project the states of an LSTM.
    """

    into: Projection
    hidden: Projection
    out: Projection | None = None

    def __call__(
        self,
        kind: type[UnrolledLayer],
        values: Float[Tensor, "rows t width"],
        first: Float[Tensor, "rows state"],
        first_cell: Float[Tensor, "rows _"] | None,
        *,
        reverse: bool,
    ) -> tuple[Float[Tensor, "t rows state"], Tensor, Tensor | None]:
        """Returns the states after each step, the last state and the last cell state."""
        # Sequences that the batch shares are run for each entry (`shared_values.py`).
        products, values = _by_entry(self.into(values)), _by_entry(values)
        values, first = (each.expand(len(products), *each.shape[1:]) for each in (values, first))
        first_cell = None if first_cell is None else first_cell.expand(len(products), -1)
        # Modes that replace random functions would see each of the many calls, none of which draws.
        with torch.no_grad(), torch._C.DisableTorchFunction():
            into, hidden, out = self
            projection = None if out is None else out.weight
            weights = Weights(into.weight, into.bias, hidden.weight, hidden.bias, projection)
            run = kind(values, first, first_cell, weights, reverse=reverse)
            before, unprojected = (
                None if states is None else states.transpose(0, 1).contiguous()
                for states in (run.before, run.unprojected)
            )
        of_states = _by_entry(hidden(before))  # states of a single entry have the shape of shared ones
        projected = None if out is None else _by_entry(out(unprojected))
        states, last_cell = Differentiated.apply(run, values, products, of_states, projected, first, first_cell)
        return states, states[0 if reverse else -1], last_cell


def _by_entry(values: Tensor) -> Tensor:
    return values._owner.by_entry(values) if isinstance(values, SharedValue) else values


def _forward(module: nn.RNNBase, layers: Sequence[Projection]) -> Callable[..., Any]:
    """Returns PyTorch's forward function of a recurrent module, with our recurrences."""
    ways = 2 if module.bidirectional else 1
    each = len(layers) // (module.num_layers * ways)
    directions = [_Direction(*layers[start : start + each]) for start in range(0, len(layers), each)]
    place = layers[0].place.rpartition(".")[0]

    def run(kind: type[UnrolledLayer], inputs: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        """Runs all layers; arguments as those of `torch.lstm`."""
        if not isinstance(arguments[2], bool):
            raise Unsupported(f"layer '{place}' must get a tensor of sequences, got packed sequences")
        state, _, _, _, dropout, training, _, batch_first = arguments
        values = inputs if batch_first else inputs.transpose(0, 1)
        if not values.shape[1]:
            raise Unsupported(f"layer '{place}' must get sequences of at least one step, got {list(inputs.shape)}")
        firsts, first_cells = (state, None) if isinstance(state, Tensor) else state
        states, lasts, last_cells = values, [], []
        for number, direction in enumerate(directions):
            reverse = number % ways == 1
            if number and not reverse and dropout and training:
                values = functional.dropout(values, dropout)
            first_cell = None if first_cells is None else first_cells[number]
            by_step, last, last_cell = direction(kind, values, firsts[number], first_cell, reverse=reverse)
            states = torch.cat([states, by_step], dim=2) if reverse else by_step
            lasts.append(last)
            last_cells.append(last_cell)
            if number % ways == ways - 1:
                values = states.transpose(0, 1)
        outputs = values if batch_first else states
        return outputs, *(torch.stack(each) for each in (lasts, last_cells) if each[0] is not None)

    functions = {"lstm": LSTMRun, "gru": GRURun, "rnn_tanh": TanhRun, "rnn_relu": ReLURun}
    names = types.SimpleNamespace(**{name: partial(run, kind) for name, kind in functions.items()})
    return types.MethodType(with_globals(type(module).forward, _VF=names), _WithoutFlattening(module))


class _WithoutFlattening:
    """A recurrent module as its own forward function uses it, which does not copy weights to one piece of memory.

    cuDNN needs that copy, and our recurrences do not. It would be made in each pass, and would change the module.
    """

    def __init__(self, module: nn.RNNBase) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def _update_flat_weights(self) -> None:
        """Leaves the module unchanged."""


def _cell_forward(module: nn.Module, layers: Sequence[Projection]) -> Callable[..., Any]:
    """Returns PyTorch's forward function of a cell, with calls of layers for its two products."""
    into, hidden = layers

    def lstm(inputs: Tensor, state: tuple[Tensor, Tensor], *_parameters: Any) -> tuple[Tensor, Tensor]:
        i, f, g, o = (into(inputs) + hidden(state[0])).chunk(4, dim=1)
        cell = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
        return o.sigmoid() * cell.tanh(), cell

    def gru(inputs: Tensor, state: Tensor, *_parameters: Any) -> Tensor:
        (r, z, n), (by_r, by_z, inner) = (values.chunk(3, dim=1) for values in (into(inputs), hidden(state)))
        candidate = (n + (r + by_r).sigmoid() * inner).tanh()
        return candidate + (z + by_z).sigmoid() * (state - candidate)

    def elman(activation: Callable[[Tensor], Tensor], inputs: Tensor, state: Tensor, *_parameters: Any) -> Tensor:
        return activation(into(inputs) + hidden(state))

    names = types.SimpleNamespace(
        lstm_cell=lstm,
        gru_cell=gru,
        rnn_tanh_cell=partial(elman, torch.tanh),
        rnn_relu_cell=partial(elman, torch.relu),
    )
    return types.MethodType(with_globals(type(module).forward, _VF=names), module)


FORWARDS: Mapping[type[nn.Module], Callable[[Any, Sequence[Projection]], Callable[..., Any]]] = {
    **dict.fromkeys((nn.LSTM, nn.GRU, nn.RNN), _forward),
    **dict.fromkeys((nn.LSTMCell, nn.GRUCell, nn.RNNCell), _cell_forward),
}
"""Recurrent modules, and the functions that open them: from a module and its layers to its forward function."""


def kept_numbers(layer: nn.Module, output: Any) -> int | None:
    """Estimates the numbers that the passes of a recurrent module keep for each of its inputs; None for other layers.

    Args:
        layer: any layer.
        output: its output for a batch.
    """
    if isinstance(layer, nn.RNNCellBase):
        # Products of inputs and of states, with the gates computed from them.
        gates = layer.weight_hh.shape[0]
        return 3 * next(tensors_of(output)).numel() // layer.hidden_size * gates
    if not isinstance(layer, nn.RNNBase):
        return None
    ways = 2 if layer.bidirectional else 1
    steps = next(tensors_of(output)).numel() // (ways * (layer.proj_size or layer.hidden_size))
    gates = layer.all_weights[0][1].shape[0]
    # Gates, cell states, their tanh and states, for each layer and direction.
    return steps * ways * layer.num_layers * (gates + 2 * layer.hidden_size)
