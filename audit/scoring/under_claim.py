"""What the claim allows, beside each number of a membership attack: bound, attack and gap are read together.

By the trade-off curve of the claim's own losses, in both orders of the removal. The bounds hold for a test of one
record whose membership an independent coin decides. On one trained model, with its members fixed, chance can exceed
them, so compare the low end of an interval.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from leaderboard.metrics import LARGEST_BY, LARGEST_UNDER_CLAIM, ROC_RATES, roc_key
from leaderboard.records.record import Metric

from .membership import FPRS


def beside_claim(metrics: dict[str, Metric], curve: Any) -> dict[str, Metric]:
    """The metrics of a membership attack, each with the largest value that a claim allows, and by what that is known.

    Args:
        metrics: by name; those that are no success of a test are as they were.
        curve: the claim's `TradeOff`.
    """
    # Balanced accuracy, (TPR + 1 - FPR) / 2, is the same statement as the advantage.
    largest = {"auc": curve.auc, "advantage": curve.advantage, "balanced_accuracy": (1 + curve.advantage) / 2}
    largest |= {name: curve.tpr_at(fpr) for name, fpr in FPRS.items()}
    found = {
        name: replace(metric, detail=metric.detail | {LARGEST_UNDER_CLAIM: largest[name], LARGEST_BY: curve.by})
        for name, metric in metrics.items()
        if name in largest
    }
    # With the AUC, the whole curve: a page draws it beside the measured one, and can compute none.
    roc = {roc_key(fpr): curve.tpr_at(fpr) for fpr in ROC_RATES}
    found["auc"] = replace(found["auc"], detail=found["auc"].detail | roc)
    return metrics | found
