"""Axes of plots: positions of values, and the round values written as ticks."""

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Axis:
    """Axis of a plot.

    Attributes:
        title: quantity, with its unit.
        low: left or lower end, in the unit of the data.
        high: right or upper end, above `low`.
        log: whether equal ratios are equally far apart; `low` is then positive.
        infinity: whether there is a place for infinity beyond the end.
    """

    title: str
    low: float
    high: float
    log: bool = False
    infinity: bool = False

    def share(self, value: float) -> float:
        """Position of a finite value between the ends, as a fraction; values outside are clamped."""
        if self.log:
            # The logarithm is undefined at 0 and below: such values are put at the edge.
            value = max(value, self.low)
            place = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            place = (value - self.low) / (self.high - self.low)
        return min(max(place, 0.0), 1.0)

    def ticks(self, count: int) -> list[float]:
        """Returns about `count` round values between the ends."""
        # Imported here because importing matplotlib takes longer than drawing, and most of this package runs without
        # it.
        from matplotlib.ticker import LogLocator, MaxNLocator

        if self.log:
            decades = math.log10(self.high / self.low)
            # On less than 1.3 decades, powers of ten alone would be one or two ticks.
            locator = LogLocator(subs=(1, 1.5, 2, 3, 5, 7) if decades < 1.3 else (1, 2, 5) if decades < 2.5 else (1,))
        else:
            locator = MaxNLocator(count)
        found = [float(value) for value in locator.tick_values(self.low, self.high)]
        # Ticks are computed in floats, so a tick at an end may come out just beyond it.
        slack = 1e-9 * (self.high - self.low)
        return [value for value in found if self.low - slack <= value <= self.high + slack]


def axis_over(
    title: str, values: Iterable[float], *, log: bool = False, infinity: bool = False, least: float = -math.inf,
    most: float = math.inf,
) -> Axis:  # fmt: skip
    """Axis that holds all values, with a margin.

    Args:
        title: of the axis.
        values: all values to be shown, interval ends included; infinite values are ignored, and on a logarithmic axis
            also those that are not positive.
        log: whether it is logarithmic.
        infinity: whether infinite values get a place.
        least: lower end of the quantity's range, which the margin does not exceed.
        most: upper end of that range.

    Returns:
        The axis; from 0.1 to 10 (logarithmic) or 0 to 1 if there are no values.
    """
    finite = [value for value in values if math.isfinite(value) and (value > 0 or not log)]
    low, high = (min(finite), max(finite)) if finite else ((0.1, 10.0) if log else (0.0, 1.0))
    if log:
        # A single value must not shrink the axis to a sliver: its ends are at least a factor of 6 apart.
        margin = max((high / low) ** 0.08, 1.25, (6 * low / high) ** 0.5)
        return Axis(title=title, low=low / margin, high=high * margin, log=True, infinity=infinity)
    # Equal values span nothing: the margin is then a tenth of the value, or a half for 0.
    margin = 0.06 * (high - low) or 0.1 * abs(high) or 0.5
    # Half a mark beyond the range, so that a mark at its very end is not cut.
    rim = 0.02 * (high - low + 2 * margin)
    return Axis(
        title=title, low=max(low - margin, least - rim), high=min(high + margin, most + rim), infinity=infinity
    )  # fmt: skip
