"""Metrics of the classes that messages give away: the fraction of named classes that are the clients' largest.

An attack names one or more classes of every client. A named class is right if the client holds it, and if fewer classes
than were named are more frequent among the client's examples: of a single name, if it is the most frequent class. The
floor is the larger of two guesses that read no message: a class that is drawn by its frequency among all clients'
examples, and, for every client, the classes that are the most frequent among these. The second is right of nearly all
clients where one class is the most frequent everywhere. Clients are the sample: their messages are of one training, so
the interval is conditional on it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from leakbench.leaderboard.records.record import Metric, Record

from ..evidence.claim_bounds import clopper_pearson

COLUMNS = ("client", "class", "score", "held", "named", "examples")
"""Columns of the arrays, a row per client and class: the attack's score, the true fraction of the class (for
scorers alone), whether the attack named it, and the number of the client's examples."""


def score_client_property(columns: dict[str, Any]) -> dict[str, Metric]:
    """Returns `classes_named` with an interval over clients, and `classes_named_floor`; n counts clients.

    Args:
        columns: one value a client and class, as in `COLUMNS`.
            Clients without a row were not attacked.

    Raises:
        ValueError: a client without a named class, or whose fractions do not sum to 1.
    """
    table = pd.DataFrame({name: np.asarray(columns[name]) for name in COLUMNS})
    if not len(table):
        reason = "no client sent a message"
        absent = Metric(value=None, n=0, better="lower", reason=reason)
        return {"classes_named": absent, "classes_named_floor": absent}
    _, codes = np.unique(table["class"].to_numpy(), return_inverse=True)
    weights = table["held"].to_numpy(dtype=np.float64) * table["examples"].to_numpy(dtype=np.float64)
    # Whole numbers, up to rounding, so that equally frequent classes are equal.
    totals = np.bincount(codes, weights=weights).round(6)
    table["frequency"] = totals[codes] / totals.sum()
    shares, drawn, constant = [], [], []
    for client, rows in table.groupby("client"):
        fractions, named = rows["held"].to_numpy(dtype=np.float64), rows["named"].to_numpy(dtype=bool)
        if not named.any() or not np.isclose(fractions.sum(), 1):
            raise ValueError(f"client {client} must have a named class, and fractions that sum to 1")
        right = _right(fractions, int(named.sum()))
        shares.append(float(right[named].mean()))
        of_all = rows["frequency"].to_numpy(dtype=np.float64)
        drawn.append(float(of_all[right].sum()))
        constant.append(float(_largest(of_all, int(named.sum()))[right].sum()))
    n = len(shares)
    value = float(np.mean(shares))
    floor = Metric(value=max(float(np.mean(drawn)), float(np.mean(constant))), n=n, better="lower")
    if all(share in (0.0, 1.0) for share in shares):
        low, high = clopper_pearson(int(sum(shares)), n)
    else:  # shares of several names: Hoeffding's interval, which needs no more than their range
        half = np.sqrt(np.log(2 / 0.05) / (2 * n))
        low, high = max(0.0, value - half), min(1.0, value + half)
    return {
        "classes_named": Metric(value=value, low=float(low), high=float(high), n=n, better="lower"),
        "classes_named_floor": floor,
    }


def _right(fractions: np.ndarray, named: int) -> np.ndarray:
    """Returns which classes count as right if this many are named: those held, and among the largest, ties included."""
    larger = (fractions[None, :] > fractions[:, None]).sum(axis=1)
    return (fractions > 0) & (larger < named)


def _largest(frequency: np.ndarray, named: int) -> np.ndarray:
    """Returns the probability of each class to be the name, or one of the names drawn at random, of the largest."""
    sure = (frequency[None, :] >= frequency[:, None]).sum(axis=1) <= named
    last = frequency[~sure].max() if not sure.all() else np.nan
    tied = frequency == last
    shares = sure.astype(np.float64)
    shares[tied] = (named - sure.sum()) / max(1, tied.sum())
    return shares / named


def again(record: Record, table: pd.DataFrame) -> dict[str, Metric]:
    """Recomputes, for `--verify`, the metrics of a record from its arrays."""
    return score_client_property({name: table[name].to_numpy() for name in COLUMNS})
