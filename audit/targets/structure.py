"""A training step as equations for closed-form attacks: the model's operations, and what each released number is.

Everything here is public: the server sent the model, and the plan was fixed before the batch was drawn.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from leakbench.attacks.core import Network, Operation, ReleasedPart, Structure
from leakbench.attacks.core.closed_form.recursion.operations import KINDS, of_module
from leakbench.attacks.core.targets.network import LossName
from leakbench.defenses.core import (
    Block,
    Coordinates,
    Everything,
    Gradient,
    ImplicitSubspace,
    Layout,
    Loss,
    Masked,
    Scaled,
    SpanCodec,
    StepPlan,
    Subspace,
    cross_entropy,
    logistic,
    spread,
)

_SUBSPACES = (Subspace, ImplicitSubspace)
_ADDITIONS = (operator.add, operator.iadd, torch.add)
_LOSSES: dict[Loss, LossName] = {cross_entropy: "cross_entropy", logistic: "logistic"}


def structure(
    plan: StepPlan, model: nn.Module, layout: Layout, parameters: Tensor, loss: Loss, input_shape: tuple[int, ...]
) -> Structure:
    """Returns the equations of a step.

    Args:
        plan: as executed.
        model: the architecture; its trained parameters are not read.
        layout: order of the flat vectors.
        parameters: at the step [dim].
        loss: per-example loss.
        input_shape: shape of an example.
    """
    parts, start = [], 0
    for block in plan.blocks:
        parts.append(_part(block, start, layout.dim))
        start += block.codec.size
    values = {name: value.detach().clone() for name, value in model.state_dict().items()}
    sizes = zip(layout.names, layout.shapes, parameters.split(layout.sizes), strict=True)
    values |= {name: value.detach().clone().view(shape) for name, shape, value in sizes}
    network, problem = None, ""
    try:
        operations = _operations(model, values, input_shape)
        network = Network(operations=operations, parameters=values, loss=_LOSSES.get(loss, "other"))
    # A user's forward pass may raise any exception under symbolic tracing, mostly for data-dependent control flow.
    except Exception as error:
        problem = f"its forward pass cannot be traced ({type(error).__name__}: {str(error).splitlines()[0][:200]})"
    return Structure(
        network=network, names=layout.names, shapes=layout.shapes, parts=tuple(parts), why_no_network=problem
    )


def _part(block: Block, start: int, dim: int) -> ReleasedPart:
    """Describes the released numbers of one block."""
    codec, first, within = block.codec, 0, dim
    # A codec on one layer: its coordinates count from the start of the layer.
    while type(codec) is SpanCodec:
        first, codec = first + codec.start, codec.codec
        within = codec.dim
    if type(codec) is Masked and isinstance(inner := codec.codec, Subspace) and type(inner) in _SUBSPACES:
        codec = spread(inner, codec.kept)
    about: dict[str, Any] = {"kind": "other", "words": f"values of {type(codec).__name__}"}
    # Exact classes only: a subclass may encode otherwise.
    if type(codec) in (Everything, Scaled):
        about = {"kind": "coordinates", "coordinates": first + torch.arange(within), "words": "all coordinates"}
        if isinstance(codec, Scaled):
            about |= {"factors": codec.factors.detach().clone(), "words": "scaled coordinates"}
    elif isinstance(codec, Coordinates) and type(codec) is Coordinates:
        words = f"{codec.size} of {dim} coordinates"
        about = {"kind": "coordinates", "coordinates": first + codec.kept.detach().clone(), "words": words}
    elif isinstance(codec, Subspace) and type(codec) in _SUBSPACES:
        spans = tuple((first + a, first + b) for a, b in codec.spans)
        bases = tuple(basis.detach().clone() for basis in codec.bases)
        about = {"kind": "directions", "spans": spans, "bases": bases, "words": f"{codec.size} coefficients"}
    of_gradient = block.updates and type(block.query) is Gradient
    if not of_gradient:
        about["words"] = f"{about['words']} of {type(block.query).__name__}"
    return ReleasedPart(start=start, stop=start + block.codec.size, of_gradient=of_gradient, **about)


class _Shapes(fx.Interpreter):
    """Runs a traced network on an example and keeps the shape of each result."""

    def __init__(self, traced: fx.GraphModule) -> None:
        super().__init__(traced)
        self.shapes: dict[str, tuple[int, ...]] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Runs the node as `fx.Interpreter` does and stores the shape of its result."""
        result = super().run_node(n)
        if isinstance(result, Tensor):
            self.shapes[n.name] = tuple(result.shape[1:])
        return result


def _operations(model: nn.Module, values: Mapping[str, Tensor], input_shape: tuple[int, ...]) -> tuple[Operation, ...]:
    """Returns the forward pass in evaluation mode, one `Operation` per node."""
    # A copy: tracing and evaluation mode must not modify the caller's model.
    traced = fx.symbolic_trace(copy.deepcopy(model).eval())
    like = next(v for v in values.values() if v.is_floating_point())
    shapes = _Shapes(traced)
    with torch.no_grad():
        shapes.run(torch.zeros(1, *input_shape, dtype=like.dtype, device=like.device))
    modules, tied = dict(traced.named_modules()), _first_names(model)
    operations = []
    for node in traced.graph.nodes:
        if node.op == "output":
            break
        inputs = tuple(input_node.name for input_node in node.all_input_nodes)
        about = _about(node, modules)
        about |= {key: tied.get(about[key], about[key]) for key in ("weight", "bias") if about.get(key)}
        operations.append(
            Operation(name=node.name, inputs=inputs, shape=shapes.shapes.get(node.name, ()), **about),
        )
    return tuple(operations)


def _first_names(model: nn.Module) -> dict[str, str]:
    """Maps every name of a parameter to its name in the layout, for modules that share parameters."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(p), name) for name, p in model.named_parameters(remove_duplicate=False)}


def _about(node: fx.Node, modules: Mapping[str, nn.Module]) -> dict[str, Any]:
    """Returns kind, parameters and settings of an operation."""
    if node.op == "placeholder":
        return {"kind": "input", "words": "the input"}
    if node.op == "call_function" and node.target in _ADDITIONS and len(node.all_input_nodes) == 2:
        scaled = set(node.kwargs) - {"input", "other"}  # torch.add(a, b, alpha=...)
        return {"kind": "other" if scaled else "add", "words": "an addition"}
    if node.op == "call_function" and node.target in KINDS:
        return {"kind": KINDS[node.target], "words": KINDS[node.target]}
    if _flattens(node):
        return {"kind": "flatten", "words": "a flattening"}
    if node.op == "call_module":
        return of_module(str(node.target), modules[str(node.target)])
    return {"kind": "other", "words": f"{node.op} of {getattr(node.target, '__name__', node.target)}"}


def _flattens(node: fx.Node) -> bool:
    """True if an operation is `flatten(1)`, as a method or as `torch.flatten`."""
    if not (node.target == "flatten" or node.target is torch.flatten):
        return False
    arguments = [*node.args[1:], *node.kwargs.values()]
    return arguments in ([1], [1, -1])
