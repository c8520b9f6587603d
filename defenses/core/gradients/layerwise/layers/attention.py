"""`nn.MultiheadAttention` as its linear layers, which are recorded in place of it.

PyTorch's function gets its weights as arguments and calls no layer. During a pass the module runs copies of PyTorch's
own functions, in which the products are calls of layers here; masks, dropout and everything else are PyTorch's. For
inputs of one width queries, keys and values come from a single layer; otherwise from three without biases, because the
three biases are one parameter, which is added by a function (`shared_values.py`), as the learned keys and values of
`add_bias_kv` are.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from ...reference import ModelFunction


class Projection(nn.Module):
    """A linear layer with the weight and bias of an attention module, read anew at every call.

    Attributes:
        place: its name, for messages.
    """

    def __init__(self, owner: nn.Module, weight: str, bias: str | None, place: str) -> None:
        """Takes the module that holds the parameters, and their names there."""
        super().__init__()
        # Not as a submodule, whose parameters would be listed twice.
        vars(self)["_held"] = (owner, weight, bias)
        self.place = place
        self.out_features, self.in_features = getattr(owner, weight).shape

    @property
    def weight(self) -> Tensor:
        """The weight [out, in]."""
        owner, weight, _ = vars(self)["_held"]
        return getattr(owner, weight)

    @property
    def bias(self) -> Tensor | None:
        """The bias [out], if there is one."""
        owner, _, bias = vars(self)["_held"]
        return None if bias is None else getattr(owner, bias)

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns the products [..., out]."""
        return functional.linear(inputs, self.weight, self.bias)


Projections = Mapping[nn.MultiheadAttention, tuple[Projection, ...]]
"""The linear layers of attention modules: into queries, keys and values, by one or by three, and out of their heads."""


def projections_of(model: nn.Module) -> Projections:
    """Returns the linear layers of a model's attention modules."""
    return {
        module: (*_into(module, name), Projection(module.out_proj, "weight", "bias", f"{name}.out_proj"))
        for name, module in model.named_modules()
        if type(module) is nn.MultiheadAttention
    }


def _into(module: nn.MultiheadAttention, name: str) -> list[Projection]:
    if module.in_proj_weight is not None:
        return [Projection(module, "in_proj_weight", "in_proj_bias", f"{name}.in_proj")]
    return [Projection(module, f"{part}_proj_weight", None, f"{name}.{part}_proj") for part in "qkv"]


class AttentionModel(ModelFunction):
    """A model as a function that calls the linear layers of its attention modules."""

    def __init__(self, model: nn.Module, projections: Projections) -> None:
        """Takes the layers, which are recorded or hooked by the caller."""
        super().__init__(model)
        self._forwards = {module: _forward(module, *layers) for module, layers in projections.items()}

    def __call__(self, at: Mapping[str, Tensor], batch: Tensor) -> Any:
        """Returns the outputs."""
        with ExitStack() as stack:
            for module, forward in self._forwards.items():
                stack.enter_context(_replaced(vars(module), forward))
            return super().__call__(at, batch)


@contextmanager
def _replaced(attributes: dict[str, Any], forward: Callable[..., Any]) -> Iterator[None]:
    own = {"forward": attributes["forward"]} if "forward" in attributes else {}
    attributes["forward"] = forward
    try:
        yield
    finally:
        del attributes["forward"]
        attributes.update(own)


def _forward(module: nn.MultiheadAttention, *layers: Projection) -> Callable[..., Any]:
    """Returns PyTorch's forward function of an attention module, with calls of layers for its products."""
    *into, out = layers
    batch: list[int] = []

    def project(*inputs: Tensor) -> list[Tensor]:
        """Queries, keys and values [length, batch, width]; of equal inputs by one product."""
        batch[:] = [inputs[0].shape[1]]
        projected = dict[int, Sequence[Tensor]]()
        for values in inputs[:3]:
            if id(values) not in projected:
                products = into[0](values.transpose(0, 1)).transpose(0, 1)
                projected[id(values)] = products.chunk(3, dim=-1)
        return [projected[id(values)][number].contiguous() for number, values in enumerate(inputs[:3])]

    def project_each(*arguments: Any) -> list[Tensor]:
        """Queries, keys and values of other widths: arguments are three inputs, three weights and three biases."""
        batch[:] = [arguments[0].shape[1]]
        products = [
            layer(values.transpose(0, 1)).transpose(0, 1) for layer, values in zip(into, arguments, strict=False)
        ]
        return [(a if b is None else a + b).contiguous() for a, b in zip(products, arguments[6:], strict=True)]

    def linear(heads: Tensor, *_parameters: Tensor) -> Tensor:
        """Output [length * batch, width], position by position."""
        return out(heads.unflatten(0, (-1, batch[0])).transpose(0, 1)).transpose(0, 1).flatten(0, 1)

    # Without their dispatch to function modes, which would call PyTorch's own function.
    attend = _with_globals(
        functional.multi_head_attention_forward,
        linear=linear,
        _in_projection_packed=project,
        _in_projection=project_each,
        has_torch_function=lambda _arguments: False,
    )
    names = types.SimpleNamespace(**{**vars(functional), "multi_head_attention_forward": attend})
    # The fused kernel of evaluation mode, which calls neither, is left out as where PyTorch traces.
    whole = _with_globals(nn.MultiheadAttention.forward, F=names, _is_make_fx_tracing=lambda: True)
    return types.MethodType(whole, module)


def _with_globals(function: Any, **names: Any) -> types.FunctionType:
    """Returns a copy of a function that sees other objects under some global names."""
    copied = types.FunctionType(
        function.__code__, {**function.__globals__, **names}, function.__name__, function.__defaults__
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied
