"""`nn.MultiheadAttention` as its two linear layers, which are recorded in place of it.

During a pass the module runs copies of PyTorch's own functions, in which the two products are calls of layers here;
masks, dropout and everything else are PyTorch's.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from .projection import Projection, with_globals


def projections_of(module: nn.MultiheadAttention, name: str) -> tuple[Projection, ...]:
    """Returns the linear layers into and out of the heads; none if queries, keys and values differ in width."""
    if module.in_proj_weight is None:
        return ()
    return (
        Projection(module, "in_proj_weight", "in_proj_bias", f"{name}.in_proj"),
        Projection(module.out_proj, "weight", "bias", f"{name}.out_proj"),
    )


def forward_of(module: nn.MultiheadAttention, into: Projection, out: Projection) -> Callable[..., Any]:
    """Returns PyTorch's forward function of an attention module, with calls of layers for its two products."""
    batch: list[int] = []

    def project(*inputs: Tensor) -> list[Tensor]:
        """Queries, keys and values [length, batch, width]; of equal inputs by one product."""
        batch[:] = [inputs[0].shape[1]]
        projected = dict[int, Sequence[Tensor]]()
        for values in inputs[:3]:
            if id(values) not in projected:
                products = into(values.transpose(0, 1)).transpose(0, 1)
                projected[id(values)] = products.chunk(3, dim=-1)
        return [projected[id(values)][number].contiguous() for number, values in enumerate(inputs[:3])]

    def linear(heads: Tensor, *_parameters: Tensor) -> Tensor:
        """Output [length * batch, width], position by position."""
        return out(heads.unflatten(0, (-1, batch[0])).transpose(0, 1)).transpose(0, 1).flatten(0, 1)

    # Without their dispatch to function modes, which would call PyTorch's own function.
    attend = with_globals(
        functional.multi_head_attention_forward,
        linear=linear,
        _in_projection_packed=project,
        has_torch_function=lambda _arguments: False,
    )
    names = types.SimpleNamespace(**{**vars(functional), "multi_head_attention_forward": attend})
    # The fused kernel of evaluation mode, which calls neither, is left out as where PyTorch traces.
    whole = with_globals(nn.MultiheadAttention.forward, F=names, _is_make_fx_tracing=lambda: True)
    return types.MethodType(whole, module)
