"""Clip factor that the last layer's gradient leaves undetermined: with 1 or 2 logits and no gradient of a bias.

The factor c is then a further unknown in h = c <W, k x^T>. If every operation before the logit f is homogeneous, no
equation determines it: the input s x has the gradient of x times s k(s f) / k(f), at every layer, so that all inputs s
x whose gradients are longer than the bound are clipped to the same update. Biases, tanh and sigmoid fix the scale of
every result; then only the true factor makes the two sets of equations of each layer agree, and it is found as the
factor with the smallest residual.
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
"""Number of factors on the first, logarithmic grid."""

SHARPENED = 60
"""Steps of golden section search around each chosen factor of the grid."""

DIPS = 6
"""Number of grid factors that are searched around, the best first: saturated activations make the minimum narrow."""

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
    """Returns whether layers before the last determine the clip factor: not homogeneous, and clipped together."""
    *body, _ = without_identities(network).operations
    fixed = any(operation.kind not in HOMOGENEOUS or operation.bias is not None for operation in body)
    groups = {own.group for own in gradients.values() if own.group >= 0}
    return fixed and len(groups) == 1 and any(operation.kind in LAYERS for operation in body)


def sharpest(residual: Callable[[float], float]) -> float:
    """Returns the factor in (0, 1] with the smallest residual of the equations.

    Args:
        residual: residual for a factor; it raises `InconsistentObservation` if no example has the gradient, and
            `RankDeficient` if a layer's input is undetermined, as with many saturated activations.
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
    """Returns the minimum of a unimodal function between two ends, and its value there."""
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
