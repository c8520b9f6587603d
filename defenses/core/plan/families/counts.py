"""Counts from fractions: the number of coordinates to drop, and the apportionment of a total by weights.

Decimal settings are not exact binary fractions: 0.3 of a third of 1000 is 100, but 99.99999999999999 in float64.
Rounded down directly, such a product loses a coordinate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

_TOLERANCE = 2.0**-50
"""Relative tolerance, eight roundings; a product of a decimal setting, a quotient of counts and a count has four."""


def floor_of(fraction: float, count: int) -> int:
    """Computes floor(fraction * count), without the error of a product that float64 puts just below an integer.

    Args:
        fraction: fraction in [0, 1]; a decimal setting, perhaps times a quotient of counts.
        count: nonnegative integer.
    """
    return min(math.floor(fraction * count * (1 + _TOLERANCE)), count)


def dealt(total: int, weights: Sequence[float]) -> list[int]:
    """Apportions `total` in proportion to weights by the largest remainders; ties go to the first.

    Args:
        total: number to apportion.
        weights: positive weights, at least one.
    """
    whole = math.fsum(weights)
    shares = [weight / whole for weight in weights]
    counts = [floor_of(share, total) for share in shares]
    # Remainders are rounded to nine digits, because those of equal weights differ by rounding error.
    order = sorted(range(len(counts)), key=lambda i: (counts[i] - round(shares[i] * total, 9), i))
    for i in order[: total - sum(counts)]:
        counts[i] += 1
    return counts
