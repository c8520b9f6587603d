"""One forward and one backward pass that leave what went into every layer and the derivatives by what came out.

Parameters take no part in the differentiation, so the backward pass forms input gradients only; a parameter's own
gradients are products of what is recorded here, and are formed when it is known what is wanted of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..rows import Loss
from .interface import Unsupported


@dataclass(frozen=True)
class Use:
    """One call of one layer.

    Attributes:
        layer: the layer.
        name: where it is in the model.
        inputs: what went in.
        signals: derivatives of the summed loss by what came out, of the output's shape.
    """

    layer: nn.Module
    name: str
    inputs: Tensor
    signals: Tensor


@dataclass(frozen=True)
class _Call:
    layer: nn.Module
    name: str
    inputs: Tensor
    version: int
    edge: GradientEdge


def record(
    forward: Callable[[Tensor], Tensor], layers: Mapping[nn.Module, str], inputs: Tensor, targets: Tensor, loss: Loss
) -> Sequence[Use]:
    """Runs a batch forward and backward.

    Args:
        forward: the model as a function of its inputs, at parameters that need no gradient.
        layers: the layers to record, with their names.
        inputs: the batch.
        targets: of the batch.
        loss: per-example loss.

    Returns:
        The calls that the loss depends on, in the order in which they were made.

    Raises:
        Unsupported: when a layer's input was changed in place after the call.
    """
    calls: list[_Call] = []

    def note(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if len(given) != 1 or not isinstance(output, Tensor):
            raise Unsupported(f"layer '{layers[layer]}' must map one tensor to one tensor, got {len(given)} tensors")
        # The first layers' outputs depend on nothing that is differentiated: they begin the graph. They must
        # not be leaves, which nothing may change in place, as nn.ReLU(inplace=True) does.
        traced = output if output.requires_grad else _Begin.apply(output, _switch(output))
        assert isinstance(traced, Tensor)  # noqa: S101  for the type checker: apply is not typed
        # An edge stays where it is when the output is changed in place after this.
        calls.append(_Call(layer, layers[layer], given[0].detach(), given[0]._version, get_gradient_edge(traced)))
        return traced

    handles = [layer.register_forward_hook(note, with_kwargs=True) for layer in layers]
    try:
        with torch.enable_grad():
            outputs = forward(inputs)
            total = _losses(loss, outputs, targets).sum()
    finally:
        for handle in handles:
            handle.remove()
    if not (calls and total.requires_grad):
        return ()
    signals = torch.autograd.grad(total, [call.edge for call in calls], allow_unused=True)
    for call in calls:
        # A plain backward pass would find this out by itself; here nothing was saved for the weight's gradient.
        if call.inputs._version != call.version:
            raise Unsupported(f"the input of layer '{call.name}' must not be changed in place after its call")
    return [Use(c.layer, c.name, c.inputs, s) for c, s in zip(calls, signals, strict=True) if s is not None]


class _Begin(torch.autograd.Function):
    """Passes a tensor on, untouched and uncopied, as something that is differentiated."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, switch: Tensor) -> Tensor:
        ctx.mark_dirty(values)
        return values

    @staticmethod
    def backward(ctx: Any, *signals: Tensor) -> tuple[None, None]:
        return None, None


def _switch(like: Tensor) -> Tensor:
    return torch.zeros((), dtype=like.dtype, device=like.device, requires_grad=True)


def _losses(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """One loss per example, also by a function that averages over the batch that it is given."""
    losses = loss(outputs, targets)
    if losses.shape == (len(outputs),):
        return losses
    return torch.vmap(lambda o, t: loss(o.unsqueeze(0), t.unsqueeze(0)).sum())(outputs, targets)
