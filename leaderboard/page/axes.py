"""Axes of plots: titles, ranges, ticks, and the strip for infinite values beyond the upper end."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

STRIP = 0.1
"""Width of the strip for infinite values, as a fraction of the axis before it."""


@dataclass(frozen=True, kw_only=True)
class Axis:
    """Axis of a plot.

    Attributes:
        title: quantity, with its unit.
        low: left or lower end, in the unit of the data.
        high: right or upper end of the finite values, above `low`.
        log: whether the scale is logarithmic; `low` is then positive.
        infinity: whether a strip beyond `high` holds infinite values.
        digits: format of its labels, as of D3; "d" for whole numbers.
    """

    title: str
    low: float
    high: float
    log: bool = False
    infinity: bool = False
    digits: str = "~g"

    def at(self, share: float) -> float:
        """Value at a fraction of the way from `low` to `high`."""
        return self.low * (self.high / self.low) ** share if self.log else self.low + share * (self.high - self.low)

    @property
    def end(self) -> float:
        """End of the drawing, with the strip for infinity."""
        return self.at(1 + STRIP) if self.infinity else self.high

    def number(self, value: float) -> float:
        """Finite value at which a value is drawn; values outside of the axis are put at its end."""
        return self.at(1 + STRIP / 2) if math.isinf(value) else min(max(value, self.low), self.high)

    def share(self, value: float) -> float:
        """Position of a value as a fraction of the drawing."""
        scale = math.log if self.log else float
        low, high = scale(self.low), scale(self.end)
        return (scale(self.number(value)) - low) / (high - low)

    def ticks(self) -> list[float]:
        """Returns round values of a logarithmic axis, as many as can be read."""
        decades = math.log10(self.high / self.low)
        # On less than 1.3 decades, powers of ten alone would be one or two ticks.
        digits = ("1", "1.5", "2", "3", "5", "7") if decades < 1.3 else ("1", "2", "5") if decades < 2.5 else ("1",)
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        values = [float(f"{digit}e{power}") for power in powers for digit in digits]
        return [value for value in values if self.low <= value <= self.high]


def axis_over(
    title: str, values: Iterable[float], *, log: bool = False, infinity: bool = False, least: float = -math.inf,
    most: float = math.inf, digits: str = "~g",
) -> Axis:  # fmt: skip
    """Axis that holds all values, with a margin.

    Args:
        title: of the axis.
        values: all values to be shown, interval ends included; infinite values are ignored, and on a logarithmic axis
            also those that are not positive.
        log: whether it is logarithmic.
        infinity: whether infinite values get a strip.
        least: lower end of the quantity's range, which the margin does not exceed.
        most: upper end of that range.
        digits: format of its labels, as of D3; "d" for whole numbers.

    Returns:
        The axis; from 0.1 to 10 (logarithmic) or 0 to 1 if there are no values.
    """
    finite = [value for value in values if math.isfinite(value) and (value > 0 or not log)]
    low, high = (min(finite), max(finite)) if finite else ((0.1, 10.0) if log else (0.0, 1.0))
    if log:
        # A single value must not shrink the axis to a sliver: its ends are at least a factor of 6 apart.
        margin = max((high / low) ** 0.08, 1.25, (6 * low / high) ** 0.5)
        return Axis(title=title, low=low / margin, high=high * margin, log=True, infinity=infinity, digits=digits)
    # Equal values span nothing: the margin is then a tenth of the value, or a half for 0.
    margin = 0.06 * (high - low) or 0.1 * abs(high) or 0.5
    # The axis extends half a mark beyond the range, so that a mark at its very end is not cut.
    rim = 0.02 * (high - low + 2 * margin)
    return Axis(
        title=title, low=max(low - margin, least - rim), high=min(high + margin, most + rim), infinity=infinity,
        digits=digits,
    )  # fmt: skip
