"""Targets: limits on ratios of time and memory, and whether a run meets them; a missed target is reported, no error.

A ratio whose arithmetic alone exceeds any such limit on the processors measured has that bound instead of a limit, and
is neither met nor missed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from .harness import Ratio, SpeedComparison

_WORDS = {
    "speed-up": "{way} at least {limit:g} times as fast as {against}",
    "time": "{way} at most {limit:g} times the time of {against}",
    "memory": "{way} at most {limit:g} times the extra memory of {against}",
}


@dataclass(frozen=True, kw_only=True)
class SpeedTarget:
    """Limit on a ratio of a comparison.

    Attributes:
        case: name of the comparison.
        way: way that the limit is on.
        against: way that it is compared with.
        quantity: "speed-up" is the other way's time over ours, "time" and "memory" are ours over the other's.
        limit: on the median; a minimum for a speed-up, a maximum otherwise; None with a bound.
        bound: arithmetic that rules a limit out, as "41 Mflop an example"; empty with a limit.
    """

    case: str
    way: str
    against: str
    quantity: Literal["speed-up", "time", "memory"]
    limit: float | None = None
    bound: str = ""

    @property
    def words(self) -> str:
        """The target in words."""
        if self.limit is None:
            return f"{self.way}, {self.quantity} relative to {self.against}: bound by {self.bound}"
        return _WORDS[self.quantity].format(way=self.way, limit=self.limit, against=self.against)

    def judge(self, comparisons: Sequence[SpeedComparison]) -> dict[str, Any]:
        """Returns the outcome, as plain data: `met` is judged by the median, and None if unknown or without a limit."""
        matching = [c for c in comparisons if c.name == self.case]
        value, met = self._value(matching[0]) if matching else "not part of this run", None
        ratio = asdict(value) if isinstance(value, Ratio) else {"median": value, "low": None, "high": None, "n": None}
        median, reason = (None, value) if isinstance(value, str) else (ratio["median"], None)
        if self.limit is not None and median is not None:
            met = median >= self.limit if self.quantity == "speed-up" else median <= self.limit
        return {
            "case": self.case,
            "target": self.words,
            "quantity": self.quantity,
            "limit": self.limit,
            "bound": self.bound or None,
            "value": median,
            "low": ratio["low"],
            "high": ratio["high"],
            "n": ratio["n"],
            "met": met,
            "reason": reason,
        }

    def _value(self, comparison: SpeedComparison) -> Ratio | float | str:
        if self.quantity == "memory":
            return comparison.memory_ratio(self.way, self.against)
        if self.quantity == "speed-up":
            return comparison.time_ratio(self.against, self.way)
        return comparison.time_ratio(self.way, self.against)
