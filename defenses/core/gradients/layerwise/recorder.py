"""Records each layer's input and the loss's gradient at its output, in a single forward and backward pass.

Parameters do not require gradients here, so autograd computes activation gradients only, about half of a backward
pass's arithmetic. Per-example gradients of a parameter are products of the two recorded tensors, and are formed once it
is known whether norms, sums or rows of them are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge

from ...inputs import Inputs
from ...randomness.record_draws import one_pass
from ..checks.synthetic_examples import mapped
from ..engines.interface import Unsupported
from ..numerics.full_precision import (
    device_type,
    forward_precision,
    outside_of_passes,
    product_precision,
    reduced,
    widened,
)
from ..reference import Loss
from .buffers import Buffers
from .shared_values import SharedPass, plainly

Leaf = tuple[Tensor, Callable[[Tensor | None], None]]
"""Tensor that the graph begins with, and a receiver of its derivative."""
_Call = tuple[GradientEdge, Callable[[Tensor | None], None]]
# Outputs of all layers for a batch, up to which their derivatives are kept until the pass ends.
_AT_ONCE = 2**20
# Size of a tensor whose copy takes less time than a custom function in PyTorch's graph.
_COPIED = 2**14


class Use(NamedTuple):
    """A call of a layer.

    Attributes:
        layer: the layer.
        name: its place in the model.
        inputs: the layer's input.
        signals: gradient of the summed loss at the output, of the output's shape.
        statistics: mean and 1 / standard deviation [entries, groups] that a GroupNorm saved for its backward pass; None
            if there are none.
        buffers: source of memory for rows that are kept until the sums are done; None if no caller returns the memory,
            or no norms are needed.
    """

    layer: nn.Module
    name: str
    inputs: Tensor
    signals: Tensor
    statistics: tuple[Tensor, Tensor] | None = None
    buffers: Buffers | None = None


def record(
    forward: Callable[[Inputs], Any],
    layers: Mapping[nn.Module, str],
    inputs: Inputs,
    targets: Tensor,
    loss: Loss,
    take: Callable[[Use], None],
    buffers: Buffers | None = None,
    begins: Callable[[nn.Module, Tensor], None] = lambda _layer, _output: None,
    leaves: Sequence[Leaf] = (),
    shared: SharedPass | None = None,
) -> None:
    """Runs a batch forward and backward, and hands each call of a layer to `take` when the backward pass reaches it.

    Tensors that `take` does not keep are then freed during the pass. For a small batch all calls are handed over at the
    end of the pass, which is faster.

    Args:
        forward: the model as a function of its inputs, at parameters that need no gradient.
        layers: the layers to record, with their names.
        inputs: the batch.
        targets: targets of the batch.
        loss: per-example loss.
        take: receives each call that the loss depends on, in the order of the backward pass.
        buffers: passed on in each `Use`.
        begins: receives each layer whose input needs no gradient, with its output.
        leaves: tensors of the graph that `forward` uses beside the inputs, and receivers of their derivatives.
        shared: values that all entries of the batch share, in this pass; None if there are none.

    Raises:
        Unsupported: if a layer's input was changed in place after the call.
    """
    under_way = [True]
    calls: list[_Call] = [(get_gradient_edge(leaf), meet) for leaf, meet in leaves]
    numbers = sum(leaf.numel() for leaf, _ in leaves)
    hand_over = _in_float32(take) if reduced() else take

    def of_value(layer: nn.Module, entering: Tensor, version: int, signals: Tensor) -> None:
        """Hands over a call that is made once for all entries, with the derivatives by its output for each."""
        if entering._version != version:
            raise Unsupported(f"the input of layer '{layers[layer]}' must not be changed in place after its call")
        of_entries = by_entry(plainly(entering).detach(), len(targets))
        if signals.dim() > 1 and signals.shape[1] == 1 and entering.shape[:1] == (1,):
            signals = signals.squeeze(1)
        hand_over(Use(layer, layers[layer], of_entries, signals, None, buffers))

    def note(layer: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal numbers
        if not under_way:  # called by a copy of the layer that was made in the pass
            return forward(*args, **kwargs)
        if shared is None:
            output = forward(*args, **kwargs)
        else:
            with shared.layer():
                output = forward(*args, **kwargs)
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if len(tensors) != 1 or not isinstance(output, Tensor):
            raise Unsupported(f"layer '{layers[layer]}' must map one tensor to one tensor, got {len(tensors)} tensors")
        if shared is not None:
            value = shared.of_layer(tensors[0], output, partial(of_value, layer, tensors[0], tensors[0]._version))
            if value is not None:
                return value
        entering, version = tensors[0].detach(), tensors[0]._version
        if output._is_view():
            # An in-place change of a view, as by nn.ReLU(inplace=True) after a Linear with sequence dimensions, applies
            # to its base, and the backward pass then no longer uses the view's own node.
            output = output.clone()
        if not output.requires_grad:
            begins(layer, output)
        traced = _traced(output)
        statistics = _statistics(output) if isinstance(layer, nn.GroupNorm) else None

        def meet(signals: Tensor | None) -> None:
            # A plain backward pass would detect this itself; here nothing was saved for the weight's gradient.
            if entering._version != version:
                raise Unsupported(f"the input of layer '{layers[layer]}' must not be changed in place after its call")
            if signals is not None:  # without a graph of its own, as all results of a backward pass
                hand_over(Use(layer, layers[layer], entering, signals, statistics, buffers))

        # The node stays valid if the output is changed in place later. The edge keeps it alive if the model drops the
        # output: a Python `_Begin` node would be freed then up to PyTorch 2.13.
        if not traced.requires_grad:
            raise Unsupported(f"layer '{layers[layer]}' must not be called without gradients, as under torch.no_grad()")
        calls.append((get_gradient_edge(traced), meet))
        numbers += traced.numel()
        return traced

    # Replaces `forward` instead of adding a hook: PyTorch calls layers with hooks more slowly.
    own = [(layer, vars(layer), vars(layer).get("forward")) for layer in layers]
    try:
        for layer, attributes, _ in own:
            attributes["forward"] = partial(note, layer, layer.forward)
        with torch.enable_grad(), one_pass(), forward_precision(device_type(targets)):
            outputs = forward(inputs.detach())
            outputs = mapped(outputs, widened, keep_unknown=True) if reduced() else outputs
            losses = example_losses(loss, outputs, targets.detach())
    finally:
        under_way.clear()
        for _, attributes, before in own:
            _restore(attributes, before)
    if shared is not None:
        calls = [(get_gradient_edge(copies.leaf), copies.meet) for copies in shared.leaves] + calls
        numbers += sum(copies.leaf.numel() for copies in shared.leaves)
    if losses.requires_grad and calls:  # else no recorded layer leads to the loss, and all gradients are zero
        with product_precision():
            _backward(losses, calls, at_once=numbers <= _AT_ONCE)
            if shared is not None:
                shared.finish()


def _in_float32(take: Callable[[Use], None]) -> Callable[[Use], None]:
    """Returns `take` for factors of a pass in reduced precision, which are converted, and products in float32."""

    def hand_over(use: Use) -> None:
        with outside_of_passes():
            take(use._replace(inputs=widened(use.inputs), signals=widened(use.signals)))

    return hand_over


def by_entry(values: Tensor, entries: int) -> Tensor:
    """Returns values of all entries of a batch as a view with values for each: by the first dimension if it is 1."""
    return values.expand(entries, *(values.shape[1:] if values.shape[:1] == (1,) else values.shape))


def _restore(attributes: dict[str, Any], forward: Any) -> None:
    if forward is None:
        attributes.pop("forward", None)
    else:
        attributes["forward"] = forward


def _backward(losses: Tensor, calls: list[_Call], *, at_once: bool) -> None:
    """Hands each call its derivative: all at the end of the pass, or each when the pass reaches it."""
    ones = torch.ones_like(losses)
    if at_once:
        met = _derivatives(losses, ones, [edge for edge, _ in calls])
        for (_, meet), signals in zip(reversed(calls), reversed(met), strict=True):
            meet(signals)
        return
    while calls:  # popped, so that tensors are freed once the pass has met them
        _hooked(*calls.pop())
    # The graph's leaves were all made for this call (switches, copied outputs, detached biases of first layers), so no
    # tensor that outlives it gets a gradient.
    losses.backward(ones)


def _derivatives(losses: Tensor, ones: Tensor, edges: list[GradientEdge]) -> tuple[Tensor | None, ...]:
    """Derivatives at edges of the graph: None for an edge that the losses do not depend on."""
    if type(losses) is not Tensor:
        return torch.autograd.grad(losses, edges, ones, allow_unused=True)
    # Private to PyTorch: the function that `grad` calls after checking its arguments, which takes 25 us.
    derivatives: tuple[Tensor | None, ...] = _engine_run_backward(
        (losses,), (ones,), False, False, tuple(edges), True, accumulate_grad=False
    )
    return derivatives


def _hooked(edge: GradientEdge, meet: Callable[[Tensor | None], None]) -> None:
    # The hook must not hold its node: the two would keep each other, and all activations, alive.
    number = edge.output_nr
    edge.node.register_prehook(lambda signals: meet(signals[number]))


def _traced(output: Tensor) -> Tensor:
    """Returns a layer's output as part of the autograd graph, which begins at the first layers' outputs."""
    # Such outputs do not depend on any differentiated tensor. They must not be leaves, which cannot be changed in
    # place, as by nn.ReLU(inplace=True).
    if output.requires_grad:
        return output
    if output.numel() <= _COPIED and output.is_floating_point():
        return output.detach().requires_grad_().clone()
    traced = _Begin.apply(output, _switch(output))
    assert isinstance(traced, Tensor)  # noqa: S101  for the type checker: apply is not typed
    return traced


class _Begin(torch.autograd.Function):
    """Makes a tensor part of the graph without a copy: the start of the differentiated part of a model."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, switch: Tensor) -> Tensor:
        # Declared as changed in place: autograd would else return a view, which nn.ReLU(inplace=True) must not change.
        ctx.mark_dirty(values)
        return values

    @staticmethod
    def backward(ctx: Any, *signals: Tensor) -> tuple[None, None]:
        # The graph ends here: the hook on this node has met the derivative, and nothing behind needs it.
        return None, None


def _statistics(output: Tensor) -> tuple[Tensor, Tensor] | None:
    """Returns mean and 1 / standard deviation that a GroupNorm's graph node saved, if the output is its result."""
    node: Any = output.grad_fn
    if node is None or node.name() != "NativeGroupNormBackward0":
        return None
    # Private to PyTorch, hence the default: without them the rule of GroupNorm computes the statistics again.
    mean, scale = (getattr(node, f"_saved_result{number}", None) for number in (1, 2))
    # Detached, because the node's results hold the node.
    return None if mean is None or scale is None else (mean.detach(), scale.detach())


def _switch(like: Tensor) -> Tensor:
    return torch.zeros((), dtype=like.dtype, device=like.device, requires_grad=True)


def example_losses(loss: Loss, outputs: Any, targets: Tensor) -> Float[Tensor, " entries"]:
    """Returns the loss of each example; a function that averages over its batch is called on batches of one."""
    losses = loss(outputs, targets)
    if losses.shape == (targets.shape[0],):
        return losses

    def of_one(output: Any, target: Tensor) -> Tensor:
        return loss(mapped(output, lambda tensor: tensor.unsqueeze(0), scalars=True), target.unsqueeze(0)).sum()

    return torch.vmap(of_one)(outputs, targets)
