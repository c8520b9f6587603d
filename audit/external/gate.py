"""Rules that fail an audit: `tpr_at_1pct_fpr>0.05` fails it if the TPR is significantly larger than 0.05.

A metric has a confidence interval, so a rule compares an end of it with the limit. `>` alone compares the lower end,
and `<` the upper end: the rule is broken if the audit proves the excess, which small samples rarely do.
`metric.high>x` is broken unless the audit excludes the excess, which takes many samples; `metric.value>x` compares the
estimate. A metric that was not measured breaks its rule.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from leakbench.leaderboard.metrics import METRICS
from leakbench.leaderboard.records.record import Metric

from ..catalog.messages import no_such

Side = Literal["low", "high", "value"]

OF_MODEL = ("epsilon_lower", "accuracy_gap")
"""Metrics of the audit as a whole, not of an attack."""

_RULE = re.compile(
    r"(?:(?P<attack>[\w./:-]+?):)?(?P<metric>[\w.%]+?)(?:\.(?P<side>low|high|value))?(?P<sign>[<>])(?P<limit>[^<>=]+)"
)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Limit on a metric, which the audit must keep.

    Attributes:
        text: as given.
        attack: name of the attack; empty for the strongest attack, which the audit chooses, and for metrics of no
            attack.
        metric: its name.
        side: end of the interval that is compared.
        above: whether values above the limit break the rule, else values below.
        limit: in the metric's unit.
    """

    text: str
    attack: str
    metric: str
    side: Side
    above: bool
    limit: float

    def broken(self, metrics: Mapping[tuple[str, str], Metric]) -> str | None:
        """Returns the sentence on how the rule is broken; None if it is kept.

        Args:
            metrics: maps (attack, metric) to its measurement; attack is empty for the strongest attack and the whole
                audit.
        """
        metric = metrics.get((self.attack, self.metric))
        whose = f"{self.attack}'s {self.metric}" if self.attack else self.metric
        if metric is None or metric.value is None:
            why = "no attack that ran has it" if metric is None else metric.reason
            return f"{self.text}: {whose} was not measured, for {why}"
        number = {"low": metric.low, "high": metric.high, "value": metric.value}[self.side]
        if number is None:
            # A lower bound is its own lower end.
            if self.side != "low" or self.metric != "epsilon_lower":
                return f"{self.text}: {whose} has no {self.side} end, for {metric.reason or 'it has no interval'}"
            number = metric.value
        if (number > self.limit) if self.above else (number < self.limit):
            side = {"low": "lower end", "high": "upper end", "value": "estimate"}[self.side]
            return f"{self.text}: the {side} of {whose} is {number:.4g} (estimate {metric.value:.4g}, n {metric.n})"
        return None


def rules(texts: Sequence[str], attacks: Sequence[str]) -> list[Rule]:
    """Parses the rules of `--fail-if`.

    Args:
        texts: such as `tpr_at_1pct_fpr>0.05`, `rmia:auc.high>0.6` or `epsilon_lower>2`.
        attacks: names that a rule may use.

    Raises:
        ValueError: a text is no rule, or names an unknown metric or attack.
    """
    known = [*(name for name, row in METRICS.items() if row.kind == "membership"), *OF_MODEL]
    parsed = []
    for text in texts:
        match = _RULE.fullmatch("".join(text.split()))
        try:
            limit = float(match["limit"]) if match else math.nan
        except ValueError:
            limit = math.nan
        if match is None or not math.isfinite(limit):
            raise ValueError(
                f"--fail-if must be METRIC>NUMBER or METRIC<NUMBER, as 'tpr_at_1pct_fpr>0.05' or 'rmia:auc.high>0.6', "
                f"got {text!r}"
            )
        attack, metric, above = match["attack"] or "", match["metric"], match["sign"] == ">"
        if metric not in known:
            raise ValueError(no_such("metric", metric, known))
        if attack and attack not in attacks:
            raise ValueError(no_such("attack", attack, attacks))
        side: Side = match["side"] or ("low" if above else "high")  # pyright: ignore[reportAssignmentType] -- by the pattern
        parsed.append(Rule(text=text, attack=attack, metric=metric, side=side, above=above, limit=limit))
    return parsed
