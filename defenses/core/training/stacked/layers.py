"""Supported layers of a stack: the forward pass with a leading model axis, and the per-example gradients as terms.

To add a layer with parameters, write a class with `forward` and `terms`, and name it in `KINDS`; a module without
parameters that takes each example by itself has a line in `EXAMPLE_BY_EXAMPLE`. The equality tests cover it as soon as
a test network has it. Types are matched exactly: a subclass may compute something else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from ...gradients.layerwise.layers.convolution_settings import Geometry
from .patches import patches
from .stack_error import StackError
from .terms import FormedRows, OneProduct, Place, ProductSum, Term

Activations = Float[Tensor, "models rows ..."]
"""Inputs and outputs of a layer: a model axis, an axis of examples, and the shape of an example."""

_ELEMENTWISE = (
    *(nn.Tanh, nn.ReLU, nn.Sigmoid, nn.GELU, nn.LeakyReLU, nn.ELU, nn.SiLU, nn.Softplus, nn.Identity),
    *(nn.SELU, nn.Mish, nn.Softsign),
)
_POOLING = (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d)

EXAMPLE_BY_EXAMPLE: frozenset[type[nn.Module]] = frozenset((*_ELEMENTWISE, *_POOLING, nn.Flatten, nn.GroupNorm))
"""Modules that take the examples of all models as a single batch; a group norm is here only if it has no parameters."""


@runtime_checkable
class StackedLayer(Protocol):
    """The same layer of all models of a stack."""

    def forward(self, inputs: Activations, at: Float[Tensor, "models dim"]) -> tuple[Activations, Tensor]:
        """Returns the outputs at these parameters, without gradients for them, and the tensor that `terms` needs."""
        ...

    def terms(self, entering: Tensor, signals: Activations) -> tuple[Term, ...]:
        """Returns its parameters' gradients, from the tensor of `forward` and the losses' gradients at the outputs."""
        ...


class StackedLinear:
    """A linear layer, with or without dimensions between the examples and the features."""

    def __init__(self, layer: nn.Linear, weight: Place, bias: Place | None) -> None:
        """Takes the layer of any of the models, and the places of its parameters."""
        self.weight, self.bias = weight, bias

    def forward(self, inputs: Activations, at: Tensor) -> tuple[Tensor, Tensor]:
        """Computes a matrix product for each model."""
        flat, weight = inputs.flatten(1, -2), self.weight.of(at).mT
        out = flat.bmm(weight) if self.bias is None else self.bias.of(at)[:, None] + flat.bmm(weight)
        return out.unflatten(1, inputs.shape[1:-1]), inputs.detach()

    def terms(self, entering: Tensor, signals: Activations) -> tuple[Term, ...]:
        """Returns a single product per example, or a sum of products over positions."""
        if entering.dim() == 3:
            return (OneProduct(self.weight, self.bias, entering, signals),)
        inputs, signals = entering.flatten(2, -2), signals.flatten(2, -2)
        weight = ProductSum(self.weight, inputs[:, None], signals[:, None])
        return (weight,) if self.bias is None else (weight, FormedRows(self.bias, signals.sum(2)))


class StackedConvolution:
    """A convolution over two dimensions, with any stride, padding, dilation and groups, as a product with patches."""

    def __init__(self, layer: nn.Conv2d, weight: Place, bias: Place | None) -> None:
        """Takes the layer of any of the models, and the places of its parameters."""
        # Pixels before channels: in another convolution's output, the channels of a pixel are contiguous.
        self.weight, self.bias = replace(weight, order=(0, 2, 3, 1), groups=layer.groups), bias
        self.geometry = Geometry.of(layer)
        top, bottom, left, right = self.geometry.padding
        self.padding = (left, right, top, bottom)
        self.mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode

    def forward(self, inputs: Activations, at: Tensor) -> tuple[Tensor, Tensor]:
        """Computes a product for each model and group; the output has its channels last in memory."""
        if inputs.dim() != 5:
            raise StackError(f"a stacked convolution must be of images with channels, got {list(inputs.shape[2:])}")
        models, examples = inputs.shape[:2]
        images = inputs.flatten(0, 1)
        padded = F.pad(images, self.padding, mode=self.mode) if any(self.padding) else images
        rows, columns = self.geometry.positions(padded.shape[2], padded.shape[3])
        unfolded = patches(padded, self.geometry, models)
        out = unfolded.flatten(2, 3) @ self.weight.read(at).mT
        if self.bias is not None:
            out = out + self.bias.of(at).unflatten(1, (self.geometry.groups, 1, -1))
        by_pixel = out.unflatten(2, (examples, rows, columns)).permute(0, 2, 1, 5, 3, 4)
        return by_pixel.flatten(2, 3), unfolded.detach()

    def terms(self, entering: Tensor, signals: Activations) -> tuple[Term, ...]:
        """Returns sums over positions for the weight, and the signals' sums for the bias."""
        by_group = signals.unflatten(2, (self.geometry.groups, -1)).permute(0, 2, 1, 4, 5, 3).flatten(3, 4).contiguous()
        weight = ProductSum(self.weight, entering, by_group)
        return (weight,) if self.bias is None else (weight, FormedRows(self.bias, signals.sum((-1, -2))))


class StackedGroupNorm:
    """A group norm with a scale and a shift for each channel."""

    def __init__(self, layer: nn.GroupNorm, weight: Place, bias: Place | None) -> None:
        """Takes the layer of any of the models, and the places of its parameters."""
        self.groups, self.eps, self.weight, self.bias = layer.num_groups, layer.eps, weight, bias

    def forward(self, inputs: Activations, at: Tensor) -> tuple[Tensor, Tensor]:
        """Normalises each example by itself; scales and shifts are its model's."""
        normal = F.group_norm(inputs.flatten(0, 1), self.groups, eps=self.eps).unflatten(0, inputs.shape[:2])
        behind = (1,) * (inputs.dim() - 3)
        out = normal * self.weight.of(at).unflatten(1, (1, -1, *behind))
        if self.bias is not None:
            out = out + self.bias.of(at).unflatten(1, (1, -1, *behind))
        return out, normal.detach()

    def terms(self, entering: Tensor, signals: Activations) -> tuple[Term, ...]:
        """Returns sums over pixels."""
        pixels = tuple(range(3, entering.dim()))
        scales, shifts = (gradient.sum(pixels) if pixels else gradient for gradient in (entering * signals, signals))
        scale = FormedRows(self.weight, scales)
        return (scale,) if self.bias is None else (scale, FormedRows(self.bias, shifts))


KINDS: Mapping[type[nn.Module], Callable[..., StackedLayer]] = {
    nn.Linear: StackedLinear,
    nn.Conv2d: StackedConvolution,
    nn.GroupNorm: StackedGroupNorm,
}
"""Layers that have parameters."""
