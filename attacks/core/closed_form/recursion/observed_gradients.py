"""Observed part of each layer's gradient: entries, or coefficients in bases of that layer alone.

Coefficients in a basis of several layers mix their gradients, and a recursion from layer to layer cannot use them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ...targets.network import Operation, ReleasedPart, SharedGradient, Structure
from ...threat_model.attack_errors import NotApplicable


@dataclass(frozen=True, kw_only=True)
class Direction:
    """Coefficients of a layer's gradient in a basis: values = of_weight^T dL/dW + of_bias^T dL/db.

    Attributes:
        of_weight: [entries of the weight, k]; None if the basis is of the bias alone.
        of_bias: [entries of the bias, k]; None if it is of the weight alone.
        values: [k].
        std: standard deviations of the noise, [k].
    """

    of_weight: Tensor | None
    of_bias: Tensor | None
    values: Tensor
    std: Tensor


@dataclass(frozen=True, kw_only=True)
class LayerGradient:
    """Observed gradient of a layer.

    Attributes:
        weight: gradient of the weight, in its shape; 0 if not released.
        observed: bool, released entries of `weight`; None for all.
        std: standard deviations of the noise on `weight`.
        bias: gradient of the bias, 0 if not released; None if the layer has no bias, none of it is released, or it is
            bounded apart from the weight.
        bias_observed: bool, released entries of `bias`; None for all.
        bias_std: standard deviations of the noise on `bias`.
        directions: coefficients in bases.
        group: number of the released part that the entries come from; entries of a part share each example's clip
            factor. -1 without entries.
    """

    weight: Tensor
    observed: Tensor | None
    std: Tensor
    bias: Tensor | None
    bias_std: Tensor | None
    bias_observed: Tensor | None = None
    directions: tuple[Direction, ...] = field(default=())
    group: int = -1

    def scaled(self, factor: float) -> "LayerGradient":
        """Divides everything by a clip factor."""
        return replace(
            self,
            weight=self.weight / factor,
            std=self.std / factor,
            bias=None if self.bias is None else self.bias / factor,
            bias_std=None if self.bias_std is None else self.bias_std / factor,
            directions=tuple(replace(d, values=d.values / factor, std=d.std / factor) for d in self.directions),
        )


def observed_gradients(
    structure: Structure, released: Tensor, noise_std: Tensor, layers: tuple[Operation, ...]
) -> dict[str, LayerGradient]:
    """Returns the observed gradient of each layer, by name of the operation.

    Args:
        structure: structure of the update.
        released: [m], undivided sums, float64.
        noise_std: [m], standard deviations of the noise on these sums.
        layers: operations with parameters.

    Raises:
        NotApplicable: a part is neither coordinates of a gradient nor coefficients of single layers.
        InconsistentObservation: the update has another number of entries than its parts.
    """
    structure.check_length(released)
    # Parts of other kinds stay in the list, so that offsets hold, but count as having no entries.
    entries = tuple(replace(p, of_gradient=p.of_gradient and p.kind == "coordinates") for p in structure.parts)
    mixed = [part for part in structure.parts if part.of_gradient and part.kind == "other"]
    if mixed or not any(part.of_gradient for part in structure.parts):
        # This call raises the structure's own error about the release.
        structure.gradients(released)
    empty = dict.fromkeys(structure.names)
    entry_structure = replace(structure, parts=entries)
    any_entries = any(part.of_gradient for part in entries)
    values = entry_structure.gradients(released) if any_entries else empty
    noise = entry_structure.gradients(noise_std) if any_entries else empty
    spans, shapes = _spans(structure), dict(zip(structure.names, structure.shapes, strict=True))
    directions = {operation.name: _directions(structure, operation, spans, released, noise_std) for operation in layers}
    _refuse_mixed(structure, layers, spans)
    gradients = {}
    for operation in layers:
        name, bias = str(operation.weight), str(operation.bias)
        if name not in shapes:
            raise NotApplicable(
                f"every layer must be trained, and {operation.words or operation.name} is frozen: it shares nothing"
            )
        hidden = released.new_zeros(shapes[name])
        nothing = LayerGradient(
            weight=hidden, observed=hidden.bool(), std=torch.zeros_like(hidden), bias=None, bias_std=None
        )
        in_entries = _with_entries(nothing, (values.get(name), noise.get(name)), (values.get(bias), noise.get(bias)))
        gradients[operation.name] = _decoded(in_entries, directions[operation.name])
    return gradients


_WithNoise = tuple[SharedGradient | None, SharedGradient | None]
"""A parameter's gradient and the standard deviations of its noise, in entries; None if no entry is released."""


def _with_entries(gradient: LayerGradient, of_weight: _WithNoise, of_bias: _WithNoise) -> LayerGradient:
    """Adds the released entries of weight and bias; without those of a bias that was bounded apart from the weight."""
    own, own_noise = of_weight
    if own is not None and own_noise is not None:
        groups = own.group[own.observed].unique()
        group = int(groups[0]) if len(groups) else -1
        gradient = replace(gradient, weight=own.values, std=own_noise.values, observed=own.observed, group=group)
    shift, noise = of_bias
    if shift is None or noise is None or not bool(shift.observed.any()):
        return gradient
    if gradient.group >= 0 and not bool((shift.group[shift.observed] == gradient.group).all()):
        return gradient
    released = None if shift.whole else shift.observed
    return replace(gradient, bias=shift.values, bias_std=noise.values, bias_observed=released)


def _decoded(gradient: LayerGradient, directions: Sequence[Direction]) -> LayerGradient:
    """Adds coefficients in bases; those in a square basis, which hides nothing, are decoded to entries."""
    remaining = []
    for d in directions:
        if not _square(d):
            remaining.append(d)
            continue
        std = float(d.std.max())
        if d.of_weight is not None:
            weight = gradient.weight + (d.of_weight @ d.values).view(gradient.weight.shape)
            gradient = replace(gradient, weight=weight, std=gradient.std + std, observed=None)
        if d.of_bias is not None:
            bias, bias_std = d.of_bias @ d.values, d.of_bias.new_full((len(d.of_bias),), std)
            gradient = replace(gradient, bias=bias, bias_std=bias_std, bias_observed=None)
    whole = gradient.observed is None or bool(gradient.observed.all())
    return replace(gradient, observed=None if whole else gradient.observed, directions=tuple(remaining))


def _square(direction: Direction) -> bool:
    rows = sum(0 if basis is None else len(basis) for basis in (direction.of_weight, direction.of_bias))
    return len(direction.values) == rows


def _spans(structure: Structure) -> dict[str, tuple[int, int]]:
    """Returns name -> its (first, index after the last) coordinate in the flat gradient."""
    start, spans = 0, {}
    for name, shape in zip(structure.names, structure.shapes, strict=True):
        spans[name] = (start, start + math.prod(shape))
        start += math.prod(shape)
    return spans


def _bases(part: ReleasedPart) -> list[tuple[int, int, Tensor, int]]:
    """Returns (first, index after the last, basis, start of its coefficients in the update)."""
    bases, start = [], part.start
    for (first, last), basis in zip(part.spans, part.bases, strict=True):
        bases.append((first, last, basis, start))
        start += basis.shape[1]
    return bases


def _directions(
    structure: Structure, layer: Operation, spans: Mapping[str, tuple[int, int]], released: Tensor, noise_std: Tensor
) -> list[Direction]:
    """Returns coefficients in bases of this layer alone."""
    directions = []
    for part in structure.parts:
        if not (part.of_gradient and part.kind == "directions"):
            continue
        for first, last, basis, start in _bases(part):
            inside = [name for name, (a, b) in spans.items() if first <= a and b <= last]
            if not inside or not set(inside) <= {layer.weight, layer.bias}:
                continue
            basis = basis.to(released)
            rows = {name: basis[spans[name][0] - first : spans[name][1] - first] for name in inside}
            directions.append(
                Direction(
                    of_weight=rows.get(layer.weight or ""),
                    of_bias=rows.get(layer.bias or ""),
                    values=released[start : start + basis.shape[1]],
                    std=noise_std[start : start + basis.shape[1]],
                )
            )
    return directions


def _refuse_mixed(structure: Structure, layers: tuple[Operation, ...], spans: Mapping[str, tuple[int, int]]) -> None:
    """Refuses bases that mix layers."""
    owner = {name: layer.name for layer in layers for name in (layer.weight, layer.bias) if name is not None}
    edges = {edge for span in spans.values() for edge in span}
    for part in structure.parts:
        if not (part.of_gradient and part.kind == "directions"):
            continue
        for first, last, _, _ in _bases(part):
            inside = {owner.get(name, name) for name, (a, b) in spans.items() if a < last and first < b}
            if len(inside) > 1 or first not in edges or last not in edges:
                raise NotApplicable(
                    "the basis of an update must be one layer's own, and coefficients of this update mix several; "
                    "inverting_gradients attacks any update"
                )
