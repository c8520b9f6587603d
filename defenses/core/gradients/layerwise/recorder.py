"""Records each layer's input and the loss's derivative by its output, in one forward and one backward pass.

Parameters do not require gradients here, so autograd computes activation gradients only, about half of a backward
pass's arithmetic. Per-example gradients of a parameter are products of the two recorded tensors, and are formed once
it is known whether norms, sums or rows of them are wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge

from ...randomness.record_draws import one_pass
from ..checks.synthetic_examples import mapped
from ..engines.interface import Unsupported
from ..reference import Loss
from .buffers import Buffers

_NO_MASKS: Mapping[str, Tensor] = MappingProxyType({})
# Numbers that layers put out for a batch, up to which their derivatives are kept until all are there.
_AT_ONCE = 2**20
# Numbers that are copied in less time than a function of our own takes in PyTorch's graph.
_COPIED = 2**14


class Use(NamedTuple):
    """One call of one layer.

    Attributes:
        layer: the layer.
        name: where it is in the model.
        inputs: what went in.
        signals: derivatives of the summed loss by what came out, of the output's shape.
        statistics: mean and 1 / standard deviation [entries, groups] that a GroupNorm's backward pass has kept; None
            where there are none.
        buffers: gives buffers for rows that are kept until the sums are done; None where no caller says when that is,
            or where nobody wants norms.
        masks: of "weight" or "bias", the part of it whose norms will be asked for, where that is not all of it.
    """

    layer: nn.Module
    name: str
    inputs: Tensor
    signals: Tensor
    statistics: tuple[Tensor, Tensor] | None = None
    buffers: Buffers | None = None
    masks: Mapping[str, Tensor] = _NO_MASKS


def record(
    forward: Callable[[Tensor], Tensor],
    layers: Mapping[nn.Module, str],
    inputs: Tensor,
    targets: Tensor,
    loss: Loss,
    take: Callable[[Use], None],
    buffers: Buffers | None = None,
    begins: Callable[[nn.Module, Tensor], None] = lambda _layer, _output: None,
) -> None:
    """Runs a batch forward and backward, and hands over each call of a layer as soon as the backward pass has met it.

    What is not kept then is freed while the pass goes on. Of a small batch all calls are handed over at its end, which
    takes the pass less time.

    Args:
        forward: the model as a function of its inputs, at parameters that need no gradient.
        layers: the layers to record, with their names.
        inputs: the batch.
        targets: of the batch.
        loss: per-example loss.
        take: gets each call that the loss depends on, in the order of the backward pass.
        buffers: handed on in each `Use`.
        begins: told of each layer, with its output, in front of which nothing is differentiated.

    Raises:
        Unsupported: when a layer's input was changed in place after the call.
    """
    under_way = [True]
    calls: list[tuple[GradientEdge, Callable[[Tensor | None], None]]] = []
    numbers = 0

    def note(layer: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal numbers
        output = forward(*args, **kwargs)
        if not under_way:  # called by a copy of the layer that was made in the pass
            return output
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if len(given) != 1 or not isinstance(output, Tensor):
            raise Unsupported(f"layer '{layers[layer]}' must map one tensor to one tensor, got {len(given)} tensors")
        if output._is_view():
            # A change in place of a view, as by nn.ReLU(inplace=True) after a Linear with sequence dimensions, goes to
            # what it is a view of, and the pass backward then goes by the view's own node no more.
            output = output.clone()
        if not output.requires_grad:
            begins(layer, output)
        traced = _traced(output)
        seen, version = given[0].detach(), given[0]._version
        statistics = _statistics(output) if isinstance(layer, nn.GroupNorm) else None

        def meet(signals: Tensor | None) -> None:
            # A plain backward pass would find this out by itself; here nothing was saved for the weight's gradient.
            if seen._version != version:
                raise Unsupported(f"the input of layer '{layers[layer]}' must not be changed in place after its call")
            if signals is not None:  # without a graph of its own, as all that a backward pass computes
                take(Use(layer, layers[layer], seen, signals, statistics, buffers))

        # The node stays what it is when the output is changed in place after this. The edge keeps it alive where the
        # model forgets the output: a `_Begin` of Python's would end with that up to PyTorch 2.13.
        if not traced.requires_grad:
            raise Unsupported(f"layer '{layers[layer]}' must not be called without gradients, as under torch.no_grad()")
        calls.append((get_gradient_edge(traced), meet))
        numbers += traced.numel()
        return traced

    # In the place of its `forward`, not by a hook: PyTorch calls a layer that has hooks in a slower way.
    own = [(layer, vars(layer), vars(layer).get("forward")) for layer in layers]
    try:
        for layer, attributes, _ in own:
            attributes["forward"] = partial(note, layer, layer.forward)
        with torch.enable_grad(), one_pass():
            losses = _losses(loss, forward(inputs.detach()), targets.detach())
    finally:
        under_way.clear()
        for _, attributes, before in own:
            if before is None:
                attributes.pop("forward", None)
            else:
                attributes["forward"] = before
    if not (losses.requires_grad and calls):  # no recorded layer leads to the loss, and all gradients are zero
        return
    ones = torch.ones_like(losses)
    if numbers <= _AT_ONCE:
        met = _derivatives(losses, ones, [edge for edge, _ in calls])
        for (_, meet), signals in zip(reversed(calls), reversed(met), strict=True):
            meet(signals)
        return
    while calls:  # of which none is left here: what the pass has met is freed
        _hooked(*calls.pop())
    # To the ends of the graph, all of which are switches: nothing that outlives this call gets a gradient.
    losses.backward(ones)


def _derivatives(losses: Tensor, ones: Tensor, edges: list[GradientEdge]) -> tuple[Tensor | None, ...]:
    """Derivatives at edges of the graph: None where the losses do not depend on one."""
    if type(losses) is not Tensor:
        return torch.autograd.grad(losses, edges, ones, allow_unused=True)
    # Private to PyTorch: what `grad` calls when it has looked at its arguments, which takes 25 us.
    found: tuple[Tensor | None, ...] = _engine_run_backward(
        (losses,), (ones,), False, False, tuple(edges), True, accumulate_grad=False
    )
    return found


def _hooked(edge: GradientEdge, meet: Callable[[Tensor | None], None]) -> None:
    # The hook must not hold its node: the two would keep each other, and all activations, alive.
    number = edge.output_nr
    edge.node.register_prehook(lambda signals: meet(signals[number]))


def _traced(output: Tensor) -> Tensor:
    """A layer's output in the graph of the backward pass, which the first layers' outputs begin."""
    # These depend on nothing that is differentiated. They must not be leaves, which nothing may change in place, as
    # nn.ReLU(inplace=True) does.
    if output.requires_grad:
        return output
    if output.numel() <= _COPIED and output.is_floating_point():
        return output.detach().requires_grad_().clone()
    traced = _Begin.apply(output, _switch(output))
    assert isinstance(traced, Tensor)  # noqa: S101  for the type checker: apply is not typed
    return traced


class _Begin(torch.autograd.Function):
    """Makes a tensor part of the graph without a copy: where the differentiated part of a model begins."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, switch: Tensor) -> Tensor:
        # Declared as changed in place: autograd would else return a view, which nn.ReLU(inplace=True) must not change.
        ctx.mark_dirty(values)
        return values

    @staticmethod
    def backward(ctx: Any, *signals: Tensor) -> tuple[None, None]:
        # The graph ends here: the hook on this node has met the derivative, and nothing behind wants one.
        return None, None


def _statistics(output: Tensor) -> tuple[Tensor, Tensor] | None:
    """Mean and 1 / standard deviation that a GroupNorm's graph node has kept, if the output comes straight from one."""
    node: Any = output.grad_fn
    if node is None or node.name() != "NativeGroupNormBackward0":
        return None
    # Private to PyTorch, hence the default: without them the rule of GroupNorm computes the statistics again.
    mean, scale = (getattr(node, f"_saved_result{number}", None) for number in (1, 2))
    # Detached, because the node's results hold the node.
    return None if mean is None or scale is None else (mean.detach(), scale.detach())


def _switch(like: Tensor) -> Tensor:
    return torch.zeros((), dtype=like.dtype, device=like.device, requires_grad=True)


def _losses(loss: Loss, outputs: Any, targets: Tensor) -> Tensor:
    """One loss per example; a function that averages over its batch is called on batches of one."""
    losses = loss(outputs, targets)
    if losses.shape == (targets.shape[0],):
        return losses

    def of_one(output: Any, target: Tensor) -> Tensor:
        return loss(mapped(output, lambda tensor: tensor.unsqueeze(0), scalars=True), target.unsqueeze(0)).sum()

    return torch.vmap(of_one)(outputs, targets)
