"""Targets: limits on ratios, and whether a run meets them; a missed target is shown and is no error.

A ratio that is bound by arithmetic, on any processor here, has its bound instead of a limit: it is a fact, neither met
nor missed.
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
        way: that is to reach it.
        against: other way.
        quantity: "speed-up" is the other way's time over ours, "time" and "memory" are ours over the other's.
        limit: on the median; a minimum for a speed-up, a maximum otherwise; None if no processor here can reach one.
        bound: why it has no limit, as "41 Mflop an example".
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

    def judge(self, comparisons: Sequence[SpeedComparison]) -> Verdict:
        """Returns whether it is met, judged by the median."""
        matching = [c for c in comparisons if c.name == self.case]
        value = self._value(matching[0]) if matching else "not part of this run"
        if isinstance(value, str):
            return Verdict(target=self, reason=value)
        if self.limit is None:
            return Verdict(target=self, value=value)
        median = value.median if isinstance(value, Ratio) else value
        met = median >= self.limit if self.quantity == "speed-up" else median <= self.limit
        return Verdict(target=self, value=value, met=met)

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
        met: whether the limit is met; None if unknown, or without a limit.
        reason: why there is no value.
    """

    target: SpeedTarget
    value: Ratio | float | None = None
    met: bool | None = None
    reason: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Converts the verdict for JSON."""
        value, none = self.value, {"median": self.value, "low": None, "high": None, "n": None}
        ratio = asdict(value) if isinstance(value, Ratio) else none
        return {
            "case": self.target.case,
            "target": self.target.words,
            "quantity": self.target.quantity,
            "limit": self.target.limit,
            "bound": self.target.bound or None,
            "value": ratio.pop("median"),
            **ratio,
            "met": self.met,
            "reason": self.reason or None,
        }
