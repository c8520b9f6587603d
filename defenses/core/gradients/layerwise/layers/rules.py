"""Per-layer rules of the layerwise engine: from a recorded call to per-example gradients of weight and bias.

To add a layer, write a function from a call to its terms and add it to `KNOWN`; the equality tests cover it as soon as
one of their architectures contains it. Types are matched exactly: a subclass may compute another function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import prod

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from ...engines.interface import Unsupported
from ..factors import FactoredGradient, GradientRows, Lookup
from ..recorder import Use
from .convolution import Convolution
from .convolution_settings import Geometry, padding_of
from .linear import Outer, OuterSum
from .opened.projection import Projection
from .opened.recurrent import FusedProjection

FactoredGradients = dict[str, FactoredGradient]
"""The gradients of "weight" and "bias", if the layer has a bias."""


def linear(use: Use, layer: nn.Linear, examples: int) -> FactoredGradients:
    """Linear, with or without sequence dimensions."""
    inputs, signals = use.inputs, use.signals
    if inputs.numel() == examples * layer.in_features:
        # The derivatives already are the bias's rows; without a bias, the entry is unused.
        if inputs.dim() != 2:
            inputs = inputs.reshape(examples, layer.in_features)
            signals = signals.reshape(examples, layer.out_features)
        bias = GradientRows(signals)
        return {"weight": Outer(inputs, signals, bias), "bias": bias}
    inputs = inputs.reshape(examples, -1, layer.in_features)
    signals = signals.reshape(examples, -1, layer.out_features)
    weight = OuterSum(inputs, signals, None if use.buffers is None else partial(use.buffers, layer))
    terms: FactoredGradients = {"weight": weight if use.buffers is None else weight.formed()}
    return terms if layer.bias is None else {**terms, "bias": GradientRows(signals.sum(dim=1))}


def convolution(use: Use, layer: nn.Conv1d | nn.Conv2d, examples: int) -> FactoredGradients:
    """Convolutions over one or two dimensions, with any stride, padding, dilation and groups."""
    inputs, signals = use.inputs, use.signals
    padded = layer.padding_mode != "zeros"
    if padded:
        # The weight's gradient takes patches of the padded input, whatever the padding. F.pad: last axis first.
        padding = [size for pair in reversed(padding_of(layer)) for size in pair]
        inputs = F.pad(inputs, padding, mode=layer.padding_mode)
    if isinstance(layer, nn.Conv1d):
        inputs, signals = inputs.unsqueeze(2), signals.unsqueeze(2)
    geometry = Geometry.of(layer, padded=padded)
    views = inputs.shape[0] // examples
    buffers = None if use.buffers is None else partial(use.buffers, layer)
    factored = Convolution(inputs, signals, geometry, views=views, buffers=buffers)
    weight = factored if buffers is None else factored.formed()
    if layer.bias is None:
        return {"weight": weight}
    return {"weight": weight, **_by_example(examples, bias=signals.sum(dim=(2, 3)))}


def group_norm(use: Use, layer: nn.GroupNorm, examples: int) -> FactoredGradients:
    """GroupNorm: two sums over positions, from the mean and standard deviation of the forward pass."""
    inputs, signals = use.inputs, use.signals
    images, channels, *spatial = signals.shape
    mean, scale = (
        values.view(images, layer.num_groups).repeat_interleave(channels // layer.num_groups, dim=1)
        for values in use.statistics or _statistics(inputs, layer)
    )
    # Centred first: sum s x - mean sum s loses digits if the mean is much larger than the standard deviation.
    products = (inputs - mean.view(images, channels, *[1] * len(spatial))).mul_(signals)
    over = tuple(range(2, signals.dim()))
    weight, bias = (values.sum(dim=over) if over else values for values in (products, signals))
    return _by_example(examples, weight=weight * scale, bias=bias)


def _statistics(inputs: Tensor, layer: nn.GroupNorm) -> tuple[Tensor, Tensor]:
    images, channels, positions = inputs.shape[0], inputs.shape[1], prod(inputs.shape[2:])
    # The forward pass's own order, channels last on the CPU and contiguous otherwise, gives its statistics to the last
    # bit; kernels refuse any other.
    last = inputs.is_cpu and inputs.dim() == 4 and inputs.is_contiguous(memory_format=torch.channels_last)
    values = inputs if last else inputs.contiguous()
    return torch.native_group_norm(values, None, None, images, channels, positions, layer.num_groups, layer.eps)[1:]


def layer_norm(use: Use, layer: nn.LayerNorm, examples: int) -> FactoredGradients:
    """LayerNorm over the last dimensions, whatever comes before them."""
    shape = list(layer.normalized_shape)
    # Without weight and bias: the weight's gradient is the derivative times the normalised input.
    normal = torch.native_layer_norm(use.inputs, shape, None, None, layer.eps)[0]
    size = prod(shape)
    weight, bias = ((values.reshape(examples, -1, size).sum(dim=1)) for values in (normal * use.signals, use.signals))
    return {"weight": GradientRows(weight), "bias": GradientRows(bias)}


def image_layer_norm(use: Use, layer: nn.LayerNorm, examples: int) -> FactoredGradients:
    """LayerNorm over the channels of images, with the channels in the second dimension or in the last."""
    if getattr(layer, "data_format", "channels_first") == "channels_first":
        use = use._replace(inputs=use.inputs.movedim(1, -1), signals=use.signals.movedim(1, -1))
    return layer_norm(use, layer, examples)


def rms_norm(use: Use, layer: nn.RMSNorm, examples: int) -> FactoredGradients:
    """RMSNorm over the last dimensions, whatever comes before them."""
    normal = F.rms_norm(use.inputs, layer.normalized_shape, None, layer.eps)
    return {"weight": GradientRows((normal * use.signals).reshape(examples, -1, prod(layer.normalized_shape)).sum(1))}


def transposed_linear(use: Use, layer: nn.Module, examples: int) -> FactoredGradients:
    """GPT-2's Conv1D, a linear layer whose weight is [in, out]: the factors change places."""
    width, out = use.inputs.shape[-1], use.signals.shape[-1]
    inputs, signals = use.inputs.reshape(examples, -1, width), use.signals.reshape(examples, -1, out)
    if inputs.shape[1] == 1:
        return {"weight": Outer(signals[:, 0], inputs[:, 0]), "bias": GradientRows(signals[:, 0])}
    return {"weight": OuterSum(signals, inputs), "bias": GradientRows(signals.sum(dim=1))}


def instance_norm(use: Use, layer: nn.InstanceNorm1d | nn.InstanceNorm2d, examples: int) -> FactoredGradients:
    """InstanceNorm without running statistics."""
    normal = F.instance_norm(use.inputs, eps=layer.eps)
    spatial = tuple(range(2, use.inputs.dim()))
    weight, bias = (normal * use.signals).sum(dim=spatial), use.signals.sum(dim=spatial)
    return _by_example(examples, weight=weight, bias=bias)


def embedding(use: Use, layer: nn.Embedding, examples: int) -> FactoredGradients:
    """Embedding; the vector at the padding index is never trained."""
    entries = use.inputs.reshape(examples, -1)
    signals = use.signals.reshape(examples, -1, layer.embedding_dim)
    if layer.padding_idx is not None:
        signals = torch.where((entries == layer.padding_idx).unsqueeze(2), 0.0, signals)
    return {"weight": Lookup(entries, signals, vocabulary=layer.num_embeddings)}


def prelu(use: Use, layer: nn.PReLU, examples: int) -> FactoredGradients:
    """PReLU: the sum of the negative inputs times the derivatives, by channel or over all."""
    products = use.signals * use.inputs.clamp(max=0)
    if layer.num_parameters == 1:
        return {"weight": GradientRows(products.reshape(examples, -1).sum(dim=1, keepdim=True))}
    by_channel = products.flatten(2).sum(dim=2) if products.dim() > 2 else products
    return _by_example(examples, weight=by_channel)


LayerRule = Callable[..., FactoredGradients]
"""(use, layer, examples) -> the terms of the layer's parameters."""

KNOWN: Mapping[type[nn.Module], LayerRule] = {
    nn.Linear: linear,
    Projection: linear,
    FusedProjection: linear,
    nn.Conv1d: convolution,
    nn.Conv2d: convolution,
    nn.GroupNorm: group_norm,
    nn.LayerNorm: layer_norm,
    nn.RMSNorm: rms_norm,
    nn.InstanceNorm1d: instance_norm,
    nn.InstanceNorm2d: instance_norm,
    nn.Embedding: embedding,
    nn.PReLU: prelu,
}


# Layers of libraries that are not imported here, by module and name of their type.
_OF_OTHERS: Mapping[tuple[str, str], LayerRule] = {
    ("transformers.pytorch_utils", "Conv1D"): transposed_linear,
    ("timm.layers.norm", "LayerNorm"): layer_norm,
    ("timm.layers.norm", "LayerNorm2d"): image_layer_norm,
    ("transformers.models.convnext.modeling_convnext", "ConvNextLayerNorm"): image_layer_norm,
}


def rule_of(layer: nn.Module) -> LayerRule | None:
    """Returns the rule of a layer; None for an unknown layer."""
    kind = parametrize.type_before_parametrizations(layer)
    return KNOWN.get(kind) or _OF_OTHERS.get((kind.__module__, kind.__qualname__))


def refuse_settings(layer: nn.Module, name: str) -> None:
    """Refuses settings under which a known layer changes its weights in a forward pass, or mixes examples.

    Raises:
        Unsupported: names the setting.
    """
    if isinstance(layer, nn.Embedding):
        if layer.max_norm is not None:
            raise Unsupported(f"embedding '{name}' must have max_norm=None, which changes weights in forward passes")
        if layer.scale_grad_by_freq:
            raise Unsupported(f"embedding '{name}' must not have scale_grad_by_freq, which counts the whole batch")


def _by_example(examples: int, **values: Tensor) -> FactoredGradients:
    """Converts rows of images to rows of examples, whose gradients are sums over their images."""
    return {
        slot: GradientRows(rows if rows.shape[0] == examples else rows.unflatten(0, (examples, -1)).sum(dim=1))
        for slot, rows in values.items()
    }
