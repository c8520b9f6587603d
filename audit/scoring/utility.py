"""Metrics of utility: accuracy and cross-entropy on held-out examples, with 95 % intervals over examples."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import pandas as pd
from jaxtyping import Float, Int
from numpy import ndarray
from scipy import stats
from torch import Tensor
from torch.nn import functional

from leakbench.leaderboard.records.details import CountDetail, Detail
from leakbench.leaderboard.records.record import Metric, Record

from ..evidence.claim_bounds import clopper_pearson


def score_utility(logits: Float[Tensor, "n classes"], labels: Int[Tensor, " n"]) -> dict[str, Metric]:
    """Returns `accuracy` (Clopper-Pearson) and `loss` (mean cross-entropy in nats, float64, t interval).

    A diverged model has an accuracy, in which a row of logits with a NaN counts as wrong, but no loss.

    Args:
        logits: the model's outputs on held-out examples.
        labels: the true classes, in [0, classes).

    Raises:
        ValueError: there is no example, or lengths differ.
    """
    n = len(labels)
    if n == 0 or len(logits) != n:
        raise ValueError(f"labels must have one entry per row of logits and at least one, got {n} for {len(logits)}")
    undefined = logits.isnan().any(dim=1)  # argmax treats a NaN as the largest, and could be right by chance
    correct = int(((logits.argmax(dim=1) == labels) & ~undefined).sum())
    low, high = clopper_pearson(correct, n)
    accuracy = Metric(
        value=correct / n,
        low=low,
        high=high,
        n=n,
        better="higher",
        detail=CountDetail({"correct": correct, "undefined": int(undefined.sum()), "method": "Clopper-Pearson"}),
    )
    return {"accuracy": accuracy, "loss": mean_loss(losses(logits, labels).cpu().numpy())}


def losses(logits: Float[Tensor, "n classes"], labels: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Returns the cross-entropy of each example, in nats, float64."""
    return functional.cross_entropy(logits.double(), labels.long(), reduction="none")


def mean_loss(values: Float[ndarray, " n"]) -> Metric:
    """Returns the mean of per-example losses; without a value if any loss is not finite."""
    if infinite := int((~np.isfinite(values)).sum()):
        reason = f"the loss of {infinite} of {len(values)} examples is not finite: the model diverged"
        return Metric(value=None, n=len(values), better="lower", reason=reason)
    return mean_metric(values, better="lower", single="one example", least=0.0)


def mean_metric(
    values: Float[ndarray, " n"],
    *,
    better: Literal["higher", "lower"],
    single: str,
    least: float = -math.inf,
    most: float = math.inf,
) -> Metric:
    """Returns the mean with a t interval, clipped to its possible range.

    Args:
        values: a finite number per example; at least one.
        better: direction that is good for the defender.
        single: reason for a missing interval with a single value, such as "one image".
        least: lower end of the range of the mean.
        most: upper end.
    """
    n, value = len(values), float(np.mean(values))
    if n == 1:
        return Metric(value=value, n=1, better=better, reason=single)
    # ddof=1: the unbiased variance, with the n - 1 degrees of freedom of the t quantile.
    half = float(stats.t.ppf(0.975, n - 1) * np.std(values, ddof=1) / math.sqrt(n))
    detail = {
        "min": float(np.min(values)),
        "median": float(np.median(values)),
        "max": float(np.max(values)),
        "method": "t interval",
    }
    low, high = max(least, value - half), min(most, value + half)
    return Metric(value=value, low=low, high=high, n=n, better=better, detail=Detail(detail))


def again(record: Record, table: pd.DataFrame) -> dict[str, Metric]:
    """Recomputes, for `--verify`, the metrics of a record from its arrays."""
    # An undefined prediction (NaN logits) was written as -1, an invalid label.
    right = table["label"].to_numpy() == table["predicted"].to_numpy()
    correct, n = int(right.sum()), len(right)
    low, high = clopper_pearson(correct, n)
    accuracy = Metric(value=correct / n, low=low, high=high, n=n, better="higher")
    return {"accuracy": accuracy, "loss": mean_loss(table["loss"].to_numpy())}
