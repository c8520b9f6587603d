"""Targets: limits on ratios, and whether a run meets them; a missed target is shown and is no error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .harness import Ratio, SpeedComparison


@dataclass(frozen=True, kw_only=True)
class SpeedTarget:
    """Limit on a ratio of a comparison.

    Attributes:
        case: name of the comparison.
        way: that is to reach it.
        against: other way.
        quantity: "speed-up" is the other way's time over ours, "time" and "memory" are ours over the other's.
        limit: on the median; a minimum for a speed-up, a maximum otherwise.
    """

    case: str
    way: str
    against: str
    quantity: Literal["speed-up", "time", "memory"]
    limit: float

    @property
    def words(self) -> str:
        """The target in words."""
        match self.quantity:
            case "speed-up":
                return f"{self.way} at least {self.limit:g} times as fast as {self.against}"
            case "time":
                return f"{self.way} at most {self.limit:g} times the time of {self.against}"
            case "memory":
                return f"{self.way} at most {self.limit:g} times the extra memory of {self.against}"

    def judge(self, comparisons: Sequence[SpeedComparison]) -> Verdict:
        """Returns whether it is met, judged by the median."""
        matching = [c for c in comparisons if c.name == self.case]
        value = self._value(matching[0]) if matching else "not part of this run"
        if isinstance(value, str):
            return Verdict(target=self, reason=value)
        median = value.median if isinstance(value, Ratio) else value
        return Verdict(target=self, value=value, met=median >= self.limit if self._is_least else median <= self.limit)

    @property
    def _is_least(self) -> bool:
        return self.quantity == "speed-up"

    def _value(self, comparison: SpeedComparison) -> Ratio | float | str:
        if self.quantity == "memory":
            return comparison.memory_ratio(self.way, self.against)
        if self.quantity == "speed-up":
            return comparison.time_ratio(self.against, self.way)
        return comparison.time_ratio(self.way, self.against)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Outcome of a target, with the ratio that decides it.

    Attributes:
        target: that was judged.
        value: ratio; None if there is none.
        met: whether the limit is met; None if unknown.
        reason: why there is no value.
    """

    target: SpeedTarget
    value: Ratio | float | None = None
    met: bool | None = None
    reason: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Converts the verdict for JSON."""
        value = self.value
        return {
            "case": self.target.case,
            "target": self.target.words,
            "quantity": self.target.quantity,
            "limit": self.target.limit,
            "value": value.median if isinstance(value, Ratio) else value,
            "low": value.low if isinstance(value, Ratio) else None,
            "high": value.high if isinstance(value, Ratio) else None,
            "n": value.n if isinstance(value, Ratio) else None,
            "met": self.met,
            "reason": self.reason or None,
        }
