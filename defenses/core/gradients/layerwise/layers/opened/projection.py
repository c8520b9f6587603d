"""A linear layer that stands for a product inside of another layer, whose function gets its weights as arguments.

The modules that `model.py` lists compute several products and call no layer for them. During a pass they run copies of
PyTorch's own functions that call layers of this kind, which are recorded as any other.
"""

from __future__ import annotations

import types
from typing import Any

from torch import Tensor, nn
from torch.nn import functional


class Projection(nn.Module):
    """A linear layer with a weight and bias of another module, read anew at every call.

    Attributes:
        place: its name, for messages.
    """

    def __init__(self, owner: nn.Module, weight: str, bias: str | None, place: str) -> None:
        """Takes the module that holds the parameters, their names there (no bias: None), and its own name."""
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


def with_globals(function: Any, **names: Any) -> types.FunctionType:
    """Returns a copy of a function that sees other objects under some global names."""
    copied = types.FunctionType(
        function.__code__, {**function.__globals__, **names}, function.__name__, function.__defaults__
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied
