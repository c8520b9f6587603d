"""Linear layer near the input: the released part of its gradient, and network inputs from layer inputs.

The layer's inputs must determine the network's inputs: the layer is the first, or every operation before it can be
inverted (flattening, an affine map by channel, a smooth activation, a linear layer of full column rank). A convolution
is a linear layer on patches, with an input row for each position of each example.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import fold, unfold

from ..targets.network import Network, Operation, Structure
from ..threat_model.attack_errors import NotApplicable
from .least_squares import least_squares
from .recursion.operations import ACTIVATIONS, INJECTIVE, LAYERS, invert


@dataclass(frozen=True, kw_only=True)
class InputLayer:
    """Linear layer, and the part of its gradient that an update shows.

    Attributes:
        name: name of the weight, for messages.
        weight: float64 [m, n]; for a convolution n is the size of a patch.
        bias: float64 [m]; 0 without a bias.
        gradient: float64 [m, n], of the undivided sums; 0 if not released.
        observed: bool [m, n].
        bias_gradient: float64 [m].
        bias_observed: bool [m]; False without a bias.
        before: operations before the layer, from the input on.
        parameters: parameters of the network.
        shape: shape of the layer's input for an example.
        settings: settings of a convolution; empty for a linear layer.
        weight_at: int64 [m, n], index of each entry in the release.
        bias_at: int64 [m], the same.
        weight_scale: float64 [m, n], factor from the released number to the entry; 0 if not released.
        bias_scale: float64 [m], the same.
    """

    name: str
    weight: Tensor
    bias: Tensor
    gradient: Tensor
    observed: Tensor
    bias_gradient: Tensor
    bias_observed: Tensor
    before: tuple[Operation, ...]
    parameters: Mapping[str, Tensor] = field(repr=False)
    shape: tuple[int, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    weight_at: Tensor = field(repr=False)
    bias_at: Tensor = field(repr=False)
    weight_scale: Tensor = field(repr=False)
    bias_scale: Tensor = field(repr=False)

    @property
    def positions(self) -> int:
        """Number of patches of an example; 1 for a linear layer."""
        return 1 if not self.settings else self.unfolded(torch.zeros(1, *self.shape)).shape[1]

    def unfolded(self, inputs: Tensor) -> Tensor:
        """Maps layer inputs [k, *shape] to rows [k, positions, n]."""
        if not self.settings:
            return inputs.reshape(len(inputs), 1, -1)
        return unfold(inputs, **_geometry(self.settings)).mT

    def shown(self, contributions: Tensor) -> tuple[Tensor, Tensor]:
        """Maps released values [k, released] of single examples to their part of weight [k, m, n] and bias [k, m]."""
        values = contributions.double()
        of_weight = values[:, self.weight_at.clamp(min=0)] * self.weight_scale
        return of_weight, self.shown_of_bias(contributions)

    def shown_of_bias(self, contributions: Tensor) -> Tensor:
        """Maps released values [k, released] of single examples to their part of the bias [k, m]."""
        return contributions[:, self.bias_at.clamp(min=0)].double() * self.bias_scale


def relu_layer(structure: Structure, released: Tensor, expected_batch: float) -> InputLayer:
    """Returns the first linear layer or convolution followed by a ReLU, if all operations before it can be inverted.

    Args:
        structure: structure of the update.
        released: [released], divided sums.
        expected_batch: divisor of the sums.

    Raises:
        NotApplicable: the network has none, or the update does not show its gradient.
    """
    at, before = _input_operations(structure.known_network())
    words = at.words or at.name
    if at.bias is None:
        raise NotApplicable(f"{words} must have a bias, whose gradient gives the scale of the inputs; it has none")
    layer, groups = _read(structure, released, expected_batch, at, before)
    if not bool(layer.bias_observed.any()):
        raise NotApplicable(f"the update must show gradients of weight and bias of {words}, and it shows none of one")
    if groups > 1:
        raise NotApplicable(
            f"weight and bias of {words} must be bounded together, and they lie in {groups} parts of the update: "
            "the factors by which these shorten an example differ, and the scale of the inputs is lost"
        )
    return layer


def first_linear_layer(structure: Structure, released: Tensor, expected_batch: float) -> InputLayer:
    """Returns the first linear layer, followed by any operation, if all operations before it can be inverted.

    Args:
        structure: structure of the update.
        released: [released], divided sums.
        expected_batch: divisor of the sums.

    Returns:
        The layer. Its bias counts as not released if it was bounded apart from the weight, with other clip factors.

    Raises:
        NotApplicable: the network has none, or the update does not show its gradient.
    """
    before: list[Operation] = []
    for operation in structure.known_network().operations:
        words = operation.words or operation.name
        if before and operation.inputs != (before[-1].name,):
            raise NotApplicable(
                f"the layers up to the first linear one must be a chain, and {words} takes "
                f"{', '.join(operation.inputs) or 'nothing'}"
            )
        if operation.kind == "linear":
            if len(operation.shape) != 1:
                raise NotApplicable(f"{words} must give one vector an example, got {list(operation.shape)}")
            layer, groups = _read(structure, released, expected_batch, operation, tuple(before))
            if groups == 1:
                return layer
            if bool((~layer.observed).any()) or groups > 2:
                raise NotApplicable(
                    f"the weight of {words} must be bounded as a whole, and it lies in several parts of the update"
                )
            return replace(layer, bias_observed=torch.zeros_like(layer.bias_observed))
        if operation.kind not in INJECTIVE:
            raise NotApplicable(
                f"a linear layer must come before {words} ({operation.kind}), which cannot be undone: behind it the "
                "inputs of the layer are no images"
            )
        before.append(operation)
    raise NotApplicable("a linear layer must be there to invert, and the network has none")


def _read(
    structure: Structure, released: Tensor, expected_batch: float, at: Operation, before: tuple[Operation, ...]
) -> tuple[InputLayer, int]:
    """Returns a layer with the released part of its gradient, and the number of parts in which that was bounded."""
    words, weight_name, bias_name = at.words or at.name, at.weight, at.bias
    if weight_name is None:
        raise NotApplicable(f"{words} must have a weight of its own, and it has none")
    uses = [
        operation
        for operation in structure.known_network().operations
        if weight_name in (operation.weight, operation.bias)
    ]
    if len(uses) > 1:
        raise NotApplicable(f"{words} must be used once in the network, and its weight is used {len(uses)} times")
    gradients = structure.gradients(released)
    if weight_name not in gradients or (bias_name is not None and bias_name not in gradients):
        raise NotApplicable(f"weight and bias of {words} must be trained, and they are frozen")
    # Indices and factors of the released numbers, read by the same function as the gradient.
    count = torch.ones_like(released, dtype=torch.float64)
    scale, place = structure.gradients(count), structure.gradients(torch.arange(len(released)).to(count))
    values = structure.known_network().parameters

    def read(name: str) -> tuple[Tensor, Tensor]:
        factors = scale[name].values
        where = (place[name].values / torch.where(factors == 0, 1.0, factors)).round().long()
        return where, factors

    weight, rows = gradients[weight_name], len(values[weight_name])
    if not bool(weight.observed.any()):
        raise NotApplicable(f"the update must show the gradient of the weight of {words}, and it shows none of it")
    weight_at, weight_scale = read(weight_name)
    none = torch.zeros(rows, dtype=torch.float64, device=released.device)
    groups = [weight.group[weight.observed]]
    bias, bias_gradient, bias_observed, bias_at, bias_scale = none, none, none.bool(), none.long(), none
    if bias_name is not None:
        shown = gradients[bias_name]
        bias, bias_gradient, bias_observed = values[bias_name].double(), shown.values.double(), shown.observed
        bias_at, bias_scale = read(bias_name)
        groups.append(shown.group[shown.observed])
    layer = InputLayer(
        name=words,
        weight=values[weight_name].double().reshape(rows, -1),
        bias=bias,
        gradient=weight.values.double().reshape(rows, -1) * expected_batch,
        observed=weight.observed.reshape(rows, -1),
        bias_gradient=bias_gradient * expected_batch,
        bias_observed=bias_observed,
        before=before,
        parameters=values,
        shape=before[-1].shape,
        settings=at.settings,
        weight_at=weight_at.reshape(rows, -1),
        bias_at=bias_at,
        weight_scale=weight_scale.reshape(rows, -1),
        bias_scale=bias_scale,
    )
    return layer, len(torch.cat(groups).unique())


def _input_operations(network: Network) -> tuple[Operation, tuple[Operation, ...]]:
    """Returns the first layer followed by a ReLU, and the operations before it."""
    by_input: dict[str, list[Operation]] = {}
    for operation in network.operations:
        for name in operation.inputs:
            by_input.setdefault(name, []).append(operation)
    before: list[Operation] = []
    for operation in network.operations:
        if before and operation.inputs != (before[-1].name,):
            raise NotApplicable(
                f"the layers up to the first ReLU must be a chain, and {operation.words or operation.name} takes "
                f"{', '.join(operation.inputs) or 'nothing'}"
            )
        takers = by_input.get(operation.name, [])
        # Another operation on the layer's output would give a gradient to neurons that the ReLU switches off.
        if operation.kind in LAYERS and [taker.kind for taker in takers] == ["relu"]:
            if operation.kind == "linear" and len(operation.shape) != 1:
                raise NotApplicable(
                    f"{operation.words or operation.name} must give one vector an example, got {list(operation.shape)}"
                )
            if operation.kind == "conv2d" and operation.settings.get("groups", 1) != 1:
                raise NotApplicable(
                    f"{operation.words or operation.name} must have one group, got {operation.settings['groups']}"
                )
            return operation, tuple(before)
        if operation.kind not in INJECTIVE:
            raise NotApplicable(
                "a linear layer or convolution with a ReLU behind it must come before "
                f"{operation.words or operation.name} ({operation.kind}), which cannot be undone"
            )
        before.append(operation)
    raise NotApplicable("a linear layer or convolution must have a ReLU behind it, and the network has none")


def undone(layer: InputLayer, rows: Tensor) -> Tensor:
    """Returns inputs of the network from inputs of the layer.

    Args:
        layer: the layer; operations before it are inverted, last first.
        rows: float64 [k, *layer.shape].

    Returns:
        [k, *input_shape], float64; by least squares at linear layers, whose outputs fill only a subspace.
    """
    for operation, earlier in zip(reversed(layer.before), [*reversed(layer.before[:-1]), None], strict=True):
        rows = _undo(operation, layer.parameters, rows)
        if earlier is not None:
            rows = rows.reshape(len(rows), *earlier.shape)
    return rows


def _undo(operation: Operation, parameters: Mapping[str, Tensor], rows: Tensor) -> Tensor:
    if operation.kind in ACTIVATIONS:
        if not (slope := float(operation.settings.get("slope", 1.0))) > 0:
            raise NotApplicable(
                f"{operation.words or operation.name} must have a positive slope to be undone, got {slope}"
            )
        return invert(operation, rows).before
    if operation.kind == "batch_norm":
        by_channel = (1, -1, *[1] * (rows.ndim - 2))
        value = {name: parameters[operation.settings[name]].double() for name in ("mean", "variance")}
        factor = (value["variance"] + operation.settings["eps"]).rsqrt()
        factor = factor if operation.weight is None else factor * parameters[operation.weight].double()
        shift = factor.new_zeros(()) if operation.bias is None else parameters[operation.bias].double().view(by_channel)
        if not bool(factor.all()):
            raise NotApplicable(
                f"{operation.words or operation.name} must keep every channel to be undone, and it multiplies by 0"
            )
        return (rows - shift) / factor.view(by_channel) + value["mean"].view(by_channel)
    if operation.kind == "linear" and operation.weight is not None:
        weight = parameters[operation.weight].double()
        size = torch.linalg.svdvals(weight)
        if weight.shape[0] < weight.shape[1] or float(size[-1]) < 1e-8 * float(size[0]):
            raise NotApplicable(
                f"{operation.words or operation.name} must keep all of its {weight.shape[1]} inputs to be undone, and "
                f"it maps them to {int((size >= 1e-8 * size[0]).sum())} dimensions"
            )
        shifted = rows if operation.bias is None else rows - parameters[operation.bias].double()
        return least_squares(weight, shifted.T).T
    return rows


def assembled(layer: InputLayer, patches: Tensor, tolerance: float) -> Tensor:
    """Assembles patches into images whose overlapping pixels agree and whose padding is zero.

    Every patch is tried as the top left patch of an image. The image is then laid position by position, each time with
    the patch that best fits the pixels laid before.

    Args:
        layer: a convolution.
        patches: float64 [k, n], in any order.
        tolerance: largest difference of pixels that agree.

    Returns:
        int64 [images, positions]: indices of the patches of each image; images share no patch.

    Raises:
        NotApplicable: patches do not overlap, so that their positions are undetermined.
    """
    geometry = _geometry(layer.settings)
    size = layer.shape[0] * layer.shape[1] * layer.shape[2]
    # Pixels are counted from 1; 0 after unfolding is padding.
    numbers = torch.arange(1, size + 1, dtype=torch.float64).view(1, *layer.shape)
    at = unfold(numbers, **geometry)[0].T.long().to(patches.device)  # [positions, n]
    laid = torch.zeros(size + 1, dtype=torch.bool, device=patches.device)
    laid[0] = True
    canvas = patches.new_zeros(len(patches), size + 1)
    chosen = torch.zeros(len(patches), len(at), dtype=torch.int64, device=patches.device)
    worst = patches.new_zeros(len(patches))
    first = torch.arange(len(patches), device=patches.device)
    for position, pixels in enumerate(at):
        overlapping = laid[pixels]
        if position and not bool((overlapping & (pixels > 0)).any()):
            raise NotApplicable(
                f"patches of {layer.name} must overlap to be put together, and those of its {len(at)} positions do not"
            )
        off = (canvas[:, None, pixels] - patches[None]).abs() * overlapping  # [top left, patch, n]
        best = off.amax(dim=2)
        miss, pick = (best.diagonal(), first) if position == 0 else best.min(dim=1)
        chosen[:, position], worst = pick, torch.maximum(worst, miss)
        canvas[:, pixels] = torch.where(overlapping, canvas[:, pixels], patches[pick])
        laid[pixels] = True
        canvas[:, 0] = 0
    fits = chosen[worst <= tolerance]
    ways = [row for row in fits.unique(dim=0) if len(row.unique()) == len(row)]
    images = torch.stack(ways) if ways else chosen[:0]
    # If two images share a patch, at least one of them is wrong; neither is kept.
    shares = torch.bincount(images.flatten(), minlength=len(patches))
    return images[(shares[images] == 1).all(dim=1)] if len(images) else images


def images_of(layer: InputLayer, rows: Tensor) -> Tensor:
    """Maps rows [k, positions, n] to layer inputs [k, *shape], as means over overlapping patches."""
    if not layer.settings:
        return rows.reshape(len(rows), *layer.shape)
    geometry = _geometry(layer.settings)
    once = torch.ones_like(rows)
    total, count = (fold(x.mT, layer.shape[1:], **geometry) for x in (rows, once))
    return total / count.clamp(min=1)


def _geometry(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings of a convolution as arguments of `unfold`."""
    return {name: settings[name] for name in ("kernel_size", "stride", "padding", "dilation")}
