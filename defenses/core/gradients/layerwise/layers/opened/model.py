"""Models whose attention and recurrent modules are opened into linear layers, which have known rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from .....inputs import Inputs
from ....reference import ModelFunction
from . import attention, recurrent
from .projection import Projection

Projections = Mapping[nn.Module, tuple[Projection, ...]]
"""The linear layers of a model's opened modules."""


def projections_of(model: nn.Module) -> Projections:
    """Returns the linear layers of a model's attention and recurrent modules, for those that can be opened."""
    projections: dict[nn.Module, tuple[Projection, ...]] = {}
    for name, module in model.named_modules():
        # Exact types: a subclass may compute another function.
        if type(module) is nn.MultiheadAttention:
            projections[module] = attention.projections_of(module, name)
        elif type(module) in recurrent.FORWARDS:
            projections[module] = recurrent.projections_of(module, name)
    return {module: layers for module, layers in projections.items() if layers}


class OpenedModel(ModelFunction):
    """A model as a function that calls the linear layers of its opened modules."""

    def __init__(self, model: nn.Module, projections: Projections) -> None:
        """Takes the layers, which are recorded or hooked by the caller."""
        super().__init__(model)
        self._forwards = {module: _forward_of(module, layers) for module, layers in projections.items()}

    def __call__(self, at: Mapping[str, Tensor], batch: Inputs) -> Any:
        """Returns the outputs."""
        with ExitStack() as stack:
            for module, forward in self._forwards.items():
                stack.enter_context(_replaced(vars(module), forward))
            return super().__call__(at, batch)


def _forward_of(module: nn.Module, layers: tuple[Projection, ...]) -> Callable[..., Any]:
    if isinstance(module, nn.MultiheadAttention):
        return attention.forward_of(module, *layers)
    return recurrent.FORWARDS[type(module)](module, layers)


@contextmanager
def _replaced(attributes: dict[str, Any], forward: Callable[..., Any]) -> Iterator[None]:
    own = {"forward": attributes["forward"]} if "forward" in attributes else {}
    attributes["forward"] = forward
    try:
        yield
    finally:
        del attributes["forward"]
        attributes.update(own)
