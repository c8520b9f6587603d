"""`nn.MultiheadAttention` as its linear layers, which are recorded in place of it.

PyTorch's function gets its weights as arguments and calls no layer. During a pass the module runs copies of PyTorch's
own functions, in which the products are calls of layers here; masks, dropout and everything else are PyTorch's. For
inputs of one width queries, keys and values come from a single layer; otherwise from three without biases, because the
three biases are one parameter, which is added by a function (`shared_values.py`), as the learned keys and values of
`add_bias_kv` are.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from .projection import Projection, with_globals


def projections_of(module: nn.MultiheadAttention, name: str) -> tuple[Projection, ...]:
    """Returns the linear layers into queries, keys and values, by one or by three, and out of the heads."""
    out = Projection(module.out_proj, "weight", "bias", f"{name}.out_proj")
    if module.in_proj_weight is not None:
        return Projection(module, "in_proj_weight", "in_proj_bias", f"{name}.in_proj"), out
    return *(Projection(module, f"{part}_proj_weight", None, f"{name}.{part}_proj") for part in "qkv"), out


def forward_of(module: nn.MultiheadAttention, *layers: Projection) -> Callable[..., Any]:
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
    attend = with_globals(
        functional.multi_head_attention_forward,
        linear=linear,
        _in_projection_packed=project,
        _in_projection=project_each,
        has_torch_function=lambda _arguments: False,
    )
    names = types.SimpleNamespace(**{**vars(functional), "multi_head_attention_forward": attend})
    # The fused kernel of evaluation mode, which calls neither, is left out as where PyTorch traces.
    whole = with_globals(nn.MultiheadAttention.forward, F=names, _is_make_fx_tracing=lambda: True)
    return types.MethodType(whole, module)
