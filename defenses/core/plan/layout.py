"""Parameter order of flat vectors: names, shapes and spans of tensors and layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from jaxtyping import Float
from torch import Tensor, nn


@dataclass(frozen=True)
class Layout:
    """Names and shapes of the trained parameters, in the order that every flat vector uses.

    Attributes:
        names: parameter names as in `model.named_parameters()`, trained ones only.
        shapes: their shapes, in the same order.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, model: nn.Module) -> Layout:
        """Returns the layout of a model, without frozen parameters (`requires_grad=False`)."""
        trained = [(name, tuple(p.shape)) for name, p in model.named_parameters() if p.requires_grad]
        if not trained:
            raise ValueError("model must have at least one parameter that requires a gradient, got none")
        names, shapes = zip(*trained, strict=True)
        return cls(names, shapes)

    @classmethod
    def flat(cls, dim: int) -> Layout:
        """Returns the layout of a single unnamed vector, for gradients that come without a model."""
        return cls(("",), ((dim,),))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of entries of each parameter."""
        return tuple(torch.Size(shape).numel() for shape in self.shapes)

    @cached_property
    def dim(self) -> int:
        """Length of a flat vector."""
        return sum(self.sizes)

    @cached_property
    def slices(self) -> tuple[tuple[int, int], ...]:
        """(start, stop) of each parameter in a flat vector."""
        stops = tuple(accumulate(self.sizes))
        return tuple(zip((0, *stops[:-1]), stops, strict=True))

    @cached_property
    def weights(self) -> tuple[tuple[int, int], ...]:
        """(start, stop) of each weight (linear, convolution, embedding, ..), without biases, norm scales and gains."""
        # The gain of a standardised convolution is no weight: it has four dimensions, but a single number per channel.
        shapes = zip(self.slices, self.shapes, strict=True)
        return tuple(span for span, shape in shapes if len(shape) == 2 or any(size > 1 for size in shape[1:]))

    @cached_property
    def layers(self) -> tuple[tuple[int, int], ...]:
        """(start, stop) of each layer: the adjacent parameters of a module, such as weight and bias."""
        spans: list[tuple[int, int]] = []
        owner: str | None = None
        for name, (start, stop) in zip(self.names, self.slices, strict=True):
            module = name.rpartition(".")[0]
            if spans and module == owner:
                spans[-1] = (spans[-1][0], stop)
            else:
                spans.append((start, stop))
            owner = module
        return tuple(spans)

    def flatten(self, tensors: Mapping[str, Tensor]) -> Float[Tensor, " dim"]:
        """Concatenates named tensors to a vector."""
        return torch.cat([tensors[name].reshape(-1) for name in self.names])

    def unflatten(self, vector: Float[Tensor, " dim"]) -> dict[str, Tensor]:
        """Splits a flat vector into named views."""
        parts = torch.split_with_sizes(vector, self.sizes)
        named = zip(self.names, parts, self.shapes, strict=True)
        return {name: part if len(shape) == 1 else part.view(shape) for name, part, shape in named}

    def read(self, model: nn.Module) -> Float[Tensor, " dim"]:
        """Returns a copy of the model's trained parameters as a vector."""
        parameters = dict(model.named_parameters())
        return self.flatten({name: parameters[name].detach() for name in self.names})

    @torch.no_grad()
    def write(self, model: nn.Module, vector: Float[Tensor, " dim"]) -> None:
        """Writes a vector into the model's trained parameters."""
        parameters = dict(model.named_parameters())
        for name, values in self.unflatten(vector).items():
            parameters[name].copy_(values)
