"""Metrics of the rounds of a federated training, from a row a round."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from leakbench.leaderboard.records.record import Metric, Record


def score_rounds(columns: dict[str, Any], *, summed: bool = False) -> dict[str, Metric]:
    """Returns the accuracy and the relative drift, averaged over rounds, without intervals: rounds are dependent.

    Args:
        columns: one value a round: `accuracy`, and `drift`, NaN for a round with fewer than two replies.
        summed: whether the server sees the sum of replies alone, so that there is no drift.
    """
    accuracy = np.asarray(columns["accuracy"], dtype=np.float64)
    drift = np.asarray(columns["drift"], dtype=np.float64)
    measured = drift[np.isfinite(drift)]
    if len(measured):
        spread = Metric(value=float(measured.mean()), n=len(measured), better="lower")
    else:
        reason = "no round had two finite replies, or a mean beside 0"
        reason = "aggregation = 'sum' shows no single reply" if summed else reason
        spread = Metric(value=None, n=0, better="lower", reason=reason)
    return {
        "round_accuracy": Metric(value=float(accuracy.mean()), n=len(accuracy), better="higher"),
        "relative_drift": spread,
    }


def again(record: Record, table: pd.DataFrame) -> dict[str, Metric]:
    """Recomputes, for `--verify`, the metrics of a record from its arrays."""
    summed = (record.task.get("federated") or {}).get("aggregation") == "sum"
    return score_rounds({name: table[name].to_numpy() for name in ("accuracy", "drift")}, summed=summed)
