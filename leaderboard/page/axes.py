"""Axes of plots: where a value lies, and which round values are written under it."""

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One axis.

    Attributes:
        title: what it shows, with its unit.
        low: left or lower end, in the unit of the data.
        high: other end, above `low`.
        log: whether equal ratios are equally far apart; `low` is then positive.
        infinity: whether there is a place for infinity behind the end.
    """

    title: str
    low: float
    high: float
    log: bool = False
    infinity: bool = False

    def share(self, value: float) -> float:
        """Where a finite value lies between the ends, as a fraction; outside of them it is moved to the nearer one."""
        if self.log:
            # No logarithm below or at 0: what lies there stands at the edge.
            value = max(value, self.low)
            place = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            place = (value - self.low) / (self.high - self.low)
        return min(max(place, 0.0), 1.0)

    def ticks(self, count: int) -> list[float]:
        """Round values between the ends, about `count` of them."""
        # Here because importing matplotlib takes longer than drawing, and most of this package does without.
        from matplotlib.ticker import LogLocator, MaxNLocator

        if self.log:
            decades = math.log10(self.high / self.low)
            # On less than 1.3 decades powers of ten alone are one tick or two.
            locator = LogLocator(subs=(1, 1.5, 2, 3, 5, 7) if decades < 1.3 else (1, 2, 5) if decades < 2.5 else (1,))
        else:
            locator = MaxNLocator(count)
        found = [float(value) for value in locator.tick_values(self.low, self.high)]
        # Ticks are computed in floats, and one at an end may come out just beyond it.
        slack = 1e-9 * (self.high - self.low)
        return [value for value in found if self.low - slack <= value <= self.high + slack]


def axis_over(
    title: str, values: Iterable[float], *, log: bool = False, infinity: bool = False, least: float = -math.inf,
    most: float = math.inf,
) -> Axis:  # fmt: skip
    """An axis with room for all values and a margin.

    Args:
        title: of the axis.
        values: everything to be shown, interval ends included; what is infinite is left out, and what is not
            positive as well on a logarithmic axis.
        log: whether it is logarithmic.
        infinity: whether infinite values get a place.
        least: end of the range that the quantity has: the margin does not go beyond.
        most: other end.

    Returns:
        The axis; from 0.1 to 10, or 0 to 1, when there are no values.
    """
    finite = [value for value in values if math.isfinite(value) and (value > 0 or not log)]
    low, high = (min(finite), max(finite)) if finite else ((0.1, 10.0) if log else (0.0, 1.0))
    if log:
        # A single value is no reason to show a sliver of the axis: its ends are a factor of 6 apart at least.
        margin = max((high / low) ** 0.08, 1.25, (6 * low / high) ** 0.5)
        return Axis(title=title, low=low / margin, high=high * margin, log=True, infinity=infinity)
    # Equal values span nothing: then a tenth of the value, and for 0 a half.
    margin = 0.06 * (high - low) or 0.1 * abs(high) or 0.5
    # Beyond the range there is room for half a mark, so that one at its very end is not cut.
    rim = 0.02 * (high - low + 2 * margin)
    return Axis(
        title=title, low=max(low - margin, least - rim), high=min(high + margin, most + rim), infinity=infinity
    )  # fmt: skip
