"""Equations of a layer's input x: W x = z - b from its output z, and K x = g from the gradient g of its weight.

K is linear in the derivatives k of the loss with respect to the layer's output: the outer product k (x) . for a linear
layer, correlations with k for a convolution. R-GAP calls W x = z - b the weight constraints and K x = g the gradient
constraints (section 3.2). Noisy entries are weighted by the inverse of their variance if the solver uses weights.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .convolution import Convolved, WeightGradient
from .linear_systems import Equations
from .maps import Coefficients, LinearMap, OuterProduct
from .observed_gradients import LayerGradient

EXACTLY = 1e-24
"""Variance attributed to exact values, over their mean square, for rounding."""


@dataclass(frozen=True, kw_only=True)
class Known:
    """Known entries of a tensor.

    Attributes:
        value: in its shape.
        where: bool, the entries that are known; None for all.
        variance: variance of each entry's error; None if not used.
    """

    value: Tensor
    where: Tensor | None = None
    variance: Tensor | None = None


def of_result(
    linear: LinearMap, known: Known, *, source: Literal["output", "branch"], layer: int, weighted: bool
) -> Equations:
    """Returns equations of a tensor from the known entries of its image under a linear map.

    Args:
        linear: the map.
        known: the image.
        source: `output`, the image is a layer's output; `branch`, it is the remainder of a sum.
        layer: number of the layer, for errors.
        weighted: whether entries are weighted by their variance.
    """
    weights = None if known.where is None else known.where.to(known.value)
    if weighted:
        variance = torch.zeros_like(known.value) if known.variance is None else known.variance
        precision = (variance + _floor(known.value)).reciprocal()
        weights = precision if weights is None else weights * precision
    value = known.value if weights is None else torch.where(weights > 0, known.value, 0.0)
    return Equations(map=linear, target=value, weights=weights, layer=layer, source=source)


def of_gradient(
    own: LayerGradient, linear: LinearMap, slopes: Tensor, *, layer: int, weighted: bool
) -> list[Equations]:
    """Returns equations of a layer's input from its weight's gradient: released entries, and coefficients in bases.

    Args:
        own: observed part of the gradient.
        linear: the layer without its bias.
        slopes: derivatives of the loss with respect to the layer's output.
        layer: its number, for errors.
        weighted: whether entries are weighted by the variance of their noise.
    """
    gradient = gradient_of(linear, slopes)
    maps: list[tuple[LinearMap, Tensor, Tensor, Tensor | None]] = []
    if own.observed is None or bool(own.observed.any()):
        maps.append((gradient(own.observed), own.weight, own.std, own.observed))
    for direction in own.directions:
        if direction.of_weight is not None:
            shift = 0.0 if direction.of_bias is None else _in_bias(linear, slopes) @ direction.of_bias
            coefficients = Coefficients(gradient(None), direction.of_weight)
            maps.append((coefficients, direction.values - shift, direction.std, None))
    systems = []
    for each, target, std, observed in maps:
        weights = None
        if weighted:
            weights = (std.square() + _floor(target)).reciprocal()
            weights = weights if observed is None else weights * observed
        systems.append(Equations(map=each, target=target, weights=weights, layer=layer, source="gradient"))
    return systems


def bias_misfit(own: LayerGradient, linear: LinearMap, slopes: Tensor) -> float:
    """Returns the relative distance of a layer's bias gradient from that predicted by k; 0 if unseen."""
    if own.bias is None or not bool(own.bias.any()):
        return 0.0
    predicted = _in_bias(linear, slopes)
    predicted = predicted if own.bias_observed is None else predicted * own.bias_observed
    return float((own.bias - predicted).norm() / own.bias.norm())


def gradient_of(linear: LinearMap, slopes: Tensor) -> Callable[[Tensor | None], WeightGradient | OuterProduct]:
    """Returns a function of a mask -> map from a layer's input to those entries of its weight's gradient."""
    if isinstance(linear, Convolved):
        return lambda observed: WeightGradient(slopes, linear.geometry, tuple(linear.weight.shape), observed)
    return lambda observed: OuterProduct(slopes, linear.unknowns, observed)


def _in_bias(linear: LinearMap, slopes: Tensor) -> Tensor:
    """Returns the gradient of a layer's bias from the derivatives with respect to its output."""
    return slopes.flatten(1).sum(dim=1) if isinstance(linear, Convolved) else slopes


def _floor(values: Tensor) -> float:
    return EXACTLY * float(values.square().mean()) + 1e-30
