"""Clip factor of an example's gradient if the last layer leaves it open: with 1 or 2 logits and no bias gradient.

The factor c is then a further unknown in h = c <W, k x^T>. If every operation before the logit is homogeneous, no
equation decides it: s x gives c k(f) s / k(s f) of the gradient of x at every layer, so that all inputs s x of a longer
gradient are clipped to the same update. Biases, tanh and sigmoid fix the scale of every result, and only the true
factor makes a layer's two sets of equations agree. It is the factor with the smallest residual.
"""

import math
from collections.abc import Callable, Mapping

from ...targets.network import Network
from ...threat_model.attack_errors import InconsistentObservation, RankDeficient
from .observed_gradients import LayerGradient
from .operations import HOMOGENEOUS, LAYERS
from .order import without_identities

SMALLEST = 1e-4
"""Smallest clip factor of the search."""

TRIED = 48
"""Number of factors of the first round, equally far apart in logarithms."""

SHARPENED = 60
"""Steps of golden sections around each of them."""

DIPS = 6
"""Number of factors to search around, the best first: activations near their ends make the minimum narrow."""

ENOUGH = 1e-6
"""Residual of the equations below which no other minimum is tried."""

GOLDEN = (math.sqrt(5) - 1) / 2


def untold(network: Network, gradients: Mapping[str, LayerGradient]) -> bool:
    """Returns whether the last layer's own gradient leaves the clip factor open."""
    head = without_identities(network).operations[-1]
    own = gradients[head.name]
    shows = own.bias is not None and bool(own.bias.any())
    return len(own.weight) <= 2 and not shows


def identifiable(network: Network, gradients: Mapping[str, LayerGradient]) -> bool:
    """Returns whether the layers before the last can determine a factor that it leaves open, the same for all."""
    *body, _ = without_identities(network).operations
    fixed = any(operation.kind not in HOMOGENEOUS or operation.bias is not None for operation in body)
    groups = {own.group for own in gradients.values() if own.group >= 0}
    return fixed and len(groups) == 1 and any(operation.kind in LAYERS for operation in body)


def sharpest(residual: Callable[[float], float]) -> float:
    """Returns the factor in (0, 1] with the smallest residual of the equations.

    Args:
        residual: residual for a factor; it raises `InconsistentObservation` if no example has the gradient, and
            `RankDeficient` if that leaves a layer open, as many activations at the ends of their range do.
    """

    def left(log_factor: float) -> float:
        try:
            return residual(math.exp(log_factor))
        except (InconsistentObservation, RankDeficient):  # a wrong factor carries no information
            return math.inf

    width = -math.log(SMALLEST) / (TRIED - 1)
    tried = sorted((-width * number for number in range(TRIED)), key=left)
    best = tried[0], math.inf
    for centre in tried[:DIPS]:
        minimum = _by_golden_sections(left, centre - width, min(0.0, centre + width))
        best = min(best, minimum, key=lambda point: point[1])
        if best[1] < ENOUGH:
            break
    return math.exp(best[0])


def _by_golden_sections(value: Callable[[float], float], low: float, high: float) -> tuple[float, float]:
    """Returns the minimum of a function with a single dip between two ends, and its value there."""
    a, b = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
    at_a, at_b = value(a), value(b)
    for _ in range(SHARPENED):
        if at_a <= at_b:
            high, b, at_b = b, a, at_a
            a = high - GOLDEN * (high - low)
            at_a = value(a)
        else:
            low, a, at_a = a, b, at_b
            b = low + GOLDEN * (high - low)
            at_b = value(b)
    return (a, at_a) if at_a <= at_b else (b, at_b)
