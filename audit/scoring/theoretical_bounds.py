"""Bounds from the privacy claim, stored with each metric of a membership attack.

The bounds follow from the trade-off curve of the claim's privacy losses, for adding and for removing the record. They
hold for a test of a single record whose membership is decided by an independent coin, with any knowledge of all other
records. A threshold on a record's rank among the non-members of its run is such a test, on average over runs. On a
single run with fixed members, chance can exceed the bounds, so compare the low end of an interval.

Informed attacks differ. To score a candidate, the true contributions of all others, including the other candidates',
are subtracted from the release. A non-member's score is therefore computed from the noise itself, and a rank among
non-members of the same run is a test with more information than any test of one record: it may exceed the bounds in run
after run, and refutes nothing. Its scores over independent runs, at a fixed threshold, satisfy them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from leakbench.leaderboard.records.details import LARGEST_BY, LARGEST_NOTE, LARGEST_UNDER_CLAIM, ROC_RATES, roc_key
from leakbench.leaderboard.records.record import Metric

from .membership import FPRS

SHARED_NOISE = (
    "this attack is told everybody else's contribution, so scores of one run show its noise to whoever compares them: "
    "numbers of one run may lie above the bound, which holds over independent runs at one threshold, and refute nothing"
)
"""Reason why the bound does not apply to metrics of a single run under an informed attack."""


def with_theoretical_bounds(metrics: dict[str, Metric], curve: Any, *, informed: bool = False) -> dict[str, Metric]:
    """Returns the metrics of a membership attack, each with the largest value allowed by the claim and its source.

    Args:
        metrics: by name; metrics that do not measure a test's success are unchanged.
        curve: the claim's `TradeOff`.
        informed: whether the attack had all other contributions.
    """
    # Balanced accuracy, (TPR + 1 - FPR) / 2, is equivalent to the advantage.
    largest = {"auc": curve.auc, "advantage": curve.advantage, "balanced_accuracy": (1 + curve.advantage) / 2}
    largest |= {name: curve.tpr_at(fpr) for name, fpr in FPRS.items()}
    facts = {LARGEST_BY: curve.by} | ({LARGEST_NOTE: SHARED_NOISE} if informed else {})
    bounded = {
        name: replace(metric, detail=metric.detail | {LARGEST_UNDER_CLAIM: largest[name]} | facts)
        for name, metric in metrics.items()
        if name in largest
    }
    # The AUC carries the whole curve: a page draws it with the measured curve, and cannot compute it.
    roc = {roc_key(fpr): curve.tpr_at(fpr) for fpr in ROC_RATES}
    bounded["auc"] = replace(bounded["auc"], detail=bounded["auc"].detail | roc)
    return metrics | bounded
