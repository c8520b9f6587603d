"""The reference engine: rows by `torch.func.vmap(grad)`, for every layer that torch.func supports."""

from __future__ import annotations

from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from ...inputs import Inputs
from ..reference import per_example_gradients
from .interface import PerExample


class TorchFunc(PerExample):
    """Materialises every row; the other engines are checked against it."""

    name: ClassVar[str] = "torch.func"

    def each(self, inputs: Inputs, targets: Tensor, point: Float[Tensor, " dim"] | None) -> Float[Tensor, "rows dim"]:
        """Rows by vmap over the gradient of an example."""
        return per_example_gradients(self.model, self.loss, self.layout, inputs, targets, parameters=point).detach()
