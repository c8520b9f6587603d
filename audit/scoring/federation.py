"""Metrics of a federated training's messages and privacy, from a row a client."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd

from leakbench.leaderboard.records.details import Detail
from leakbench.leaderboard.records.record import Metric, Record


def score_federation(columns: dict[str, Any]) -> dict[str, Metric]:
    """Returns bytes a message up and a client and round down, epsilon of the worst and the median client, rounds.

    Args:
        columns: one value a client: `rounds` (scheduled), `messages` (sent), `bytes_up`, `bytes_down` (of the run),
            `epsilon` (nats; infinite without a guarantee).
    """
    table = {name: np.asarray(values, dtype=np.float64) for name, values in columns.items()}
    epsilons = table["epsilon"]
    clients = len(epsilons)
    return {
        "bytes_up": _mean_size(table, "bytes_up", "messages", "message was sent"),
        "bytes_down": _mean_size(table, "bytes_down", "rounds", "client took part"),
        "epsilon_worst": _epsilon(float(epsilons.max()), clients),
        "epsilon_median": _epsilon(float(np.median(epsilons)), clients),
        "client_rounds": Metric(value=float(table["rounds"].mean()), n=clients, better="lower"),
    }


def _mean_size(table: dict[str, np.ndarray], size: str, count: str, event: str) -> Metric:
    total, number = int(table[size].sum()), int(table[count].sum())
    if not number:
        return Metric(value=None, n=0, better="lower", reason=f"no {event}")
    return Metric(value=total / number, n=number, better="lower", detail=Detail({"total": total}))


def _epsilon(value: float, clients: int) -> Metric:
    if math.isfinite(value):
        return Metric(value=value, n=clients, better="lower")
    return Metric(value=None, n=clients, better="lower", reason="epsilon is infinite: nothing is proved")


def again(record: Record, table: pd.DataFrame) -> dict[str, Metric]:
    """Recomputes, for `--verify`, the metrics of a record from its arrays."""
    return score_federation({name: table[name].to_numpy() for name in table.columns})
