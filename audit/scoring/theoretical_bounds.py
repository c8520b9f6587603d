"""What the claim allows, beside each number of a membership attack: bound, attack and gap are read together.

By the trade-off curve of the claim's own losses, in both orders of the removal. The bounds hold for a test of one
record whose membership an independent coin decides, whatever is known of all others. A threshold among candidates of
one run is such a test, on average over runs: a record's rank among non-members. Of one run, with its members fixed,
chance can exceed the bounds, so compare the low end of an interval.

An informed attack is another matter. To score one candidate, everybody else's true contribution is taken off the
release, the other candidates' included. So what a non-member is scored by is the noise itself, and a rank among
non-members of the same run is a test that was told more than any test of one record: it may lie above the bounds, run
after run, and refutes nothing. Its scores over independent runs, at one threshold, keep them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from leakbench.leaderboard.metrics import LARGEST_BY, LARGEST_NOTE, LARGEST_UNDER_CLAIM, ROC_RATES, roc_key
from leakbench.leaderboard.records.record import Metric

from .membership import FPRS

SHARED_NOISE = (
    "this attack is told everybody else's contribution, so scores of one run show its noise to whoever compares them: "
    "numbers of one run may lie above the bound, which holds over independent runs at one threshold, and refute nothing"
)
"""Why the bound is none on numbers of one run where an attack is informed."""


def beside_claim(metrics: dict[str, Metric], curve: Any, *, informed: bool = False) -> dict[str, Metric]:
    """The metrics of a membership attack, each with the largest value that a claim allows, and by what that is known.

    Args:
        metrics: by name; those that are no success of a test are as they were.
        curve: the claim's `TradeOff`.
        informed: whether the attack was told everybody else's contribution.
    """
    # Balanced accuracy, (TPR + 1 - FPR) / 2, is the same statement as the advantage.
    largest = {"auc": curve.auc, "advantage": curve.advantage, "balanced_accuracy": (1 + curve.advantage) / 2}
    largest |= {name: curve.tpr_at(fpr) for name, fpr in FPRS.items()}
    said = {LARGEST_BY: curve.by} | ({LARGEST_NOTE: SHARED_NOISE} if informed else {})
    found = {
        name: replace(metric, detail=metric.detail | {LARGEST_UNDER_CLAIM: largest[name]} | said)
        for name, metric in metrics.items()
        if name in largest
    }
    # With the AUC, the whole curve: a page draws it beside the measured one, and can compute none.
    roc = {roc_key(fpr): curve.tpr_at(fpr) for fpr in ROC_RATES}
    found["auc"] = replace(found["auc"], detail=found["auc"].detail | roc)
    return metrics | found
