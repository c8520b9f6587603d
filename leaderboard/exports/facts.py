"""Facts beside a number, for formats that have a place for a number and none for its meaning."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

_KEPT = (
    *("row_id", "defense", "settings", "control", "unit", "epsilon", "epsilon_reason", "delta", "relation", "sampling"),
    *("epsilon_unverified", "low", "high", "n", "seeds", "attack", "looks", "at_least", "reason"),
    *("largest_under_claim", "bound_relation", "controls", "rank", "flags", "version"),
)


def facts(line: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a number of the tidy table cannot be read without, as JSON values; an infinite epsilon is "inf".

    Args:
        line: of the tidy table. Columns without a value are left out.
    """
    kept = {name: line[name] for name in _KEPT if line[name] not in (None, "")}
    return {name: "inf" if value == math.inf else value for name, value in kept.items()}


def unmeasured(lines: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Returns the reason of every metric without a value.

    Args:
        lines: of one row of the board.
    """
    return {line["metric"]: line["reason"] or "not measured" for line in lines if line["value"] is None}
