"""Counts that a fraction stands for: how many of so many coordinates are dropped, and how a number is dealt out.

Decimal settings are no binary fractions: 0.3 of a third of 1000 is 100, and in float64 99.99999999999999. Rounded down
as it is, such a product loses a coordinate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

_TOLERANCE = 2.0**-50
"""Relative; eight roundings' worth. A product of a decimal setting, a quotient of counts and a count has four."""


def floor_of(fraction: float, count: int) -> int:
    """A fraction of a count, rounded down; what rounding alone keeps below a whole number is that number.

    Args:
        fraction: in [0, 1]; a decimal setting, perhaps times a quotient of counts.
        count: of which it is taken.
    """
    return min(math.floor(fraction * count * (1 + _TOLERANCE)), count)


def dealt(total: int, weights: Sequence[float]) -> list[int]:
    """Whole numbers in proportion to weights that sum to `total`, by the largest remainders; of equals the first.

    Args:
        total: to be dealt out.
        weights: positive, at least one.
    """
    whole = math.fsum(weights)
    shares = [weight / whole for weight in weights]
    found = [floor_of(share, total) for share in shares]
    # To nine digits: equal weights have equal remainders, whatever they round to.
    order = sorted(range(len(found)), key=lambda i: (found[i] - round(shares[i] * total, 9), i))
    for i in order[: total - sum(found)]:
        found[i] += 1
    return found
