"""Accuracy of a model for each client of a federated training: on test examples in the client's class histogram."""

from __future__ import annotations

import math

from jaxtyping import Bool, Float64, Int
from torch import Tensor

from leakbench.leaderboard.records.record import Metric


def client_accuracies(
    right: Bool[Tensor, " n"], labels: Int[Tensor, " n"], histograms: Float64[Tensor, "clients classes"]
) -> Float64[Tensor, " clients"]:
    """Returns each client's accuracy: the mean of the classes' accuracies, weighted by its histogram.

    Classes without a test example are left out; a client that has no other class has NaN.

    Args:
        right: whether each test example is classified right.
        labels: classes of the same.
        histograms: fraction of each class among each client's examples.
    """
    classes = range(histograms.shape[1])
    tested = [bool((labels == c).any()) for c in classes]
    accuracy = histograms.new_tensor([float(right[labels == c].double().mean()) if tested[c] else 0.0 for c in classes])
    weights = histograms * histograms.new_tensor(tested)
    return (weights * accuracy).sum(dim=1) / weights.sum(dim=1)


def score_clients(accuracies: Float64[Tensor, " clients"]) -> dict[str, Metric]:
    """Returns `worst_client_accuracy` and `client_accuracy_std` (the population's), without intervals.

    Args:
        accuracies: of each client; NaN where unknown.
    """
    values = [value for value in accuracies.tolist() if not math.isnan(value)]
    if not values:
        reason = "no client has a class that is tested"
        return {
            "worst_client_accuracy": Metric(value=None, n=0, better="higher", reason=reason),
            "client_accuracy_std": Metric(value=None, n=0, better="lower", reason=reason),
        }
    mean = sum(values) / len(values)
    std = math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))
    return {
        "worst_client_accuracy": Metric(value=min(values), n=len(values), better="higher"),
        "client_accuracy_std": Metric(value=std, n=len(values), better="lower"),
    }
