"""Common base of the Opacus and BackPACK engines: a hooked copy of the model, and checks for uses that hooks miss.

A hook observes the calls of its layer, and no other use of a parameter or a tensor. Uses of a parameter outside of its
layer, changes in place and partly used calls are found from autograd's graph and by counting calls, and are refused:
the libraries would silently give wrong rows.
"""

from __future__ import annotations

import copy
import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.func import vmap

from ...inputs import Inputs, called, joined
from ...plan.layout import Layout
from ...randomness.record_draws import entries, one_pass
from ..reference import Loss
from .interface import PerExample, Unsupported

Edge = tuple[object, int]
"""Destination of a gradient: a node of autograd's graph, and the index of its output."""


class Hooked(PerExample, ABC):
    """Engine of a library that registers hooks on a copy of the model.

    At every call the copy gets the model's parameters (or another point) and buffers; it is rebuilt if the mode, a
    device or a dtype changes. Its structure, and attributes that are not tensors, are those of the model when it was
    built.
    """

    def __init__(self, model: nn.Module, loss: Loss, layout: Layout) -> None:
        """Copies the model and lets the library register its hooks on the copy.

        Raises:
            Unsupported: if the model has a layer that the library does not support, or computes wrongly.
            ModuleNotFoundError: without the library; the message names the extra.
        """
        super().__init__(model, loss, layout)
        self._calls: Counter[nn.Module] = Counter()
        self._overwritten: list[tuple[str, Tensor]] = []
        self._examples = 0
        self._build()

    @abstractmethod
    def _attach(self, model: nn.Module) -> list[nn.Module]:
        """Registers the library's hooks on the copy; returns the hooked layers. Refuses unsupported layers."""

    @abstractmethod
    def _knows_uses(self, layer: nn.Module) -> bool:
        """Returns whether a call of the layer uses each of its own parameters exactly once, and no other."""

    @abstractmethod
    def _unanswered(self, layer: nn.Module) -> int:
        """Returns the number of the layer's calls that still await a gradient after the backward pass."""

    @abstractmethod
    def _taken(self, parameter: nn.Parameter) -> Tensor | None:
        """Returns the rows [n, *shape] that the library stored at a parameter."""

    @abstractmethod
    def _forget(self, layer: nn.Module) -> None:
        """Removes the library's state of a call at a layer and at its parameters."""

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """Context in which the library requires the backward pass to run."""
        yield

    def _build(self) -> None:
        self._fingerprint, self._probed = _fingerprint(self.model), False
        # Always contiguous, as are the inputs of every layer in `_check_call`: Opacus 1.6 reads a convolution's inputs
        # by strides computed from their shape, and is silently wrong for channels-last inputs and views.
        model = copy.deepcopy(self.model).to(memory_format=torch.contiguous_format)
        for name, parameter in model.named_parameters():
            # The user's own gradients would be copied too, and taken for per-example results.
            parameter.grad = None
            parameter.requires_grad_(name in self.layout.names)
        self._copy = model
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._names = {module: name for name, module in model.named_modules()}
        self._layers = self._attach(model)
        self._owners = {p: [m for m in self._layers if _is_in(p, m)] for p in self._parameters.values()}
        for layer in self._layers:
            layer.register_forward_pre_hook(self._check_call, with_kwargs=True)
        for module in model.modules():
            if getattr(module, "inplace", False) is True:
                module.register_forward_pre_hook(self._keep_input)

    def each(self, inputs: Inputs, targets: Tensor, point: Float[Tensor, " dim"] | None) -> Float[Tensor, "rows dim"]:
        """Rows that the library stored at the parameters, checked for uses that it may have missed."""
        if _fingerprint(self.model) != self._fingerprint:
            self._build()
        try:
            self._probe(inputs)
            self._follow(point)
            self._examples = len(inputs)
            with torch.enable_grad(), warnings.catch_warnings():
                # PyTorch's warning, at every hooked layer whose input needs no gradient, always so for the first; the
                # hook still gets the gradient of the output, which is all that the libraries read.
                warnings.filterwarnings("ignore", "Full backward hook is firing when gradients are", UserWarning)
                # Also PyTorch's: Opacus takes integer inputs of a layer for mixed precision, which is then not used.
                warnings.filterwarnings("ignore", r"In \w+ autocast, but the target dtype is not", UserWarning)
                # A clone, because an in-place first layer would change the caller's; contiguous, as the parameters.
                cloned_inputs = inputs.detach().clone(memory_format=torch.contiguous_format)
                value = _summed(self.loss, self._outputs(cloned_inputs), targets.detach())
                # Counted before the backward pass, which frees the graph.
                uses = _edges(value)
                self._check_overwritten(uses)
                if value.requires_grad:
                    with self._listening():
                        value.backward()
            self._check_answers()
            return torch.cat([self._rows_of(name, uses) for name in self.layout.names], dim=1)
        finally:
            # After errors too: leftovers of a call would be taken for the next call's.
            for layer in self._layers:
                self._forget(layer)
            for parameter in self._parameters.values():
                parameter.grad = None
            self._calls.clear()
            self._overwritten.clear()

    def _follow(self, point: Tensor | None) -> None:
        """Moves the copy to the model's current parameters, or to another point."""
        values = {} if point is None else self.layout.unflatten(point)
        with torch.no_grad():
            theirs = dict(self.model.named_parameters())
            for name, mine in self._copy.named_parameters():
                mine.copy_(values.get(name, theirs[name]))
            theirs = dict(self.model.named_buffers())
            for name, mine in self._copy.named_buffers():
                mine.copy_(theirs[name])

    def _probe(self, inputs: Inputs) -> None:
        """Runs the copy once with one more example, to detect a dimension that equals the batch size by coincidence.

        Such a dimension does not grow with the batch. Its entries would be taken for examples, each a mixture of all.
        """
        if not self._probed:
            self._examples = len(inputs) + 1
            devices = [inputs.device] if inputs.is_cuda else []
            with torch.no_grad(), torch.random.fork_rng(devices), entries(None):
                called(self._copy, joined([inputs, inputs[:1]]))
            self._probed = True

    def _outputs(self, inputs: Inputs) -> Any:
        try:
            with one_pass():
                return called(self._copy, inputs)
        except RuntimeError as error:
            if "BackwardHookFunction" not in str(error):
                raise
            raise Unsupported(
                f"what a layer takes or gives must not be changed in place, which hooks of {self.name} forbid; "
                "write x = x + y instead of x += y"
            ) from error

    def _check_call(self, layer: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
        """Checks before each call of a watched layer: a single input, with the batch dimension first."""
        if len(arguments) != 1 or named or not isinstance(arguments[0], Tensor):
            self.refuse(layer, "must be called with one tensor and nothing else")
        (inputs,) = arguments
        if inputs.dim() == 0 or len(inputs) != self._examples:
            self.refuse(layer, f"must have the batch as its first dimension, got an input of shape {[*inputs.shape]}")
        if torch.is_grad_enabled():
            self._calls[layer] += 1
        return (inputs.contiguous(),), named

    def _keep_input(self, module: Any, arguments: tuple[Any, ...]) -> None:
        """Runs an in-place activation out of place, because PyTorch forbids in-place changes behind a hooked layer.

        The result is the same if nothing else reads the tensor that would be overwritten, which `_check_overwritten`
        verifies.
        """
        module.inplace = not arguments[0].requires_grad
        if not module.inplace:
            self._overwritten.append((self._names[module], arguments[0]))

    def _check_overwritten(self, uses: Counter[Edge]) -> None:
        for name, tensor in self._overwritten:
            if uses[_edge(tensor)] > 1:
                raise Unsupported(f"layer '{name}' must not change in place what is read elsewhere too")

    def _check_answers(self) -> None:
        for layer in self._layers:
            # Opacus pops recorded inputs last first: a gradient would be paired with the input of a call without one.
            if 0 < self._unanswered(layer) < self._calls[layer]:
                self.refuse(layer, "must not be used several times where the loss depends on some of its outputs only")

    def _rows_of(self, name: str, uses: Counter[Edge]) -> Tensor:
        """Returns a parameter's columns; zeros if the loss does not depend on it."""
        parameter = self._parameters[name]
        if parameter.grad is None:
            return parameter.new_zeros(self._examples, parameter.numel())
        owners = self._owners[parameter]
        watched = sum(self._calls[layer] - self._unanswered(layer) for layer in owners)
        # Edges into the parameter against answered calls: a surplus edge is a use that no hook has observed.
        rows = self._taken(parameter)
        if rows is None or (all(map(self._knows_uses, owners)) and watched != uses[_edge(parameter)]):
            raise Unsupported(
                f"parameter '{name}' must not be used outside of its layer, where {self.name} cannot see it"
            )
        return rows.detach().reshape(self._examples, -1)

    def refuse(self, layer: nn.Module, why: str) -> NoReturn:
        """Raises `Unsupported` with the place and type of a layer."""
        place = f"layer '{self._names[layer]}'" if self._names[layer] else "the model itself"
        raise Unsupported(f"{place} ({type(layer).__name__}) {why}")


def missing(error: ModuleNotFoundError, module: str, engine: str) -> ModuleNotFoundError:
    """Returns the error for an engine whose library is not installed: a sentence that names the extra."""
    if (error.name or module).partition(".")[0] != module:
        return error  # installed, but a dependency of its own is missing
    text = f"engine '{engine}' needs {module}, which is not installed: pip install 'leakbench[engines]'"
    return ModuleNotFoundError(text, name=module)


def _summed(loss: Loss, outputs: Any, targets: Tensor) -> Tensor:
    """Returns the sum of all examples' losses; example by example if the loss takes a mean over its batch."""
    values = loss(outputs, targets)
    if values.shape == (len(targets),):
        return values.sum()

    def one(output: Tensor, target: Tensor) -> Tensor:
        return loss(output.unsqueeze(0), target.unsqueeze(0)).sum()

    try:
        return vmap(one)(outputs, targets).sum()
    except RuntimeError as error:
        shape = list(values.shape)
        raise Unsupported(
            f"loss must give one value per example, got shape {shape} for {len(targets)} examples, "
            f"and one by one it fails ({first_line(error)})"
        ) from error


def first_line(error: Exception) -> str:
    """Returns the first line of an error's message."""
    return str(error).partition("\n")[0]


def _edges(value: Tensor) -> Counter[Edge]:
    """Counts the gradients that flow into each place of the graph behind a value."""
    edges: Counter[Edge] = Counter()
    ahead = [] if value.grad_fn is None else [value.grad_fn]
    visited = set(ahead)
    while ahead:
        for node, number in ahead.pop().next_functions:
            if node is not None:
                edges[node, number] += 1
                if node not in visited:
                    visited.add(node)
                    ahead.append(node)
    return edges


def _edge(tensor: Tensor) -> Edge:
    edge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def _is_in(parameter: nn.Parameter, module: nn.Module) -> bool:
    return any(parameter is own for own in module.parameters())


def _fingerprint(model: nn.Module) -> tuple[object, ...]:
    """Returns modes, devices and dtypes of the model, for which the copy is rebuilt when they change."""
    return (
        *(module.training for module in model.modules()),
        *((parameter.device, parameter.dtype) for parameter in model.parameters()),
    )
