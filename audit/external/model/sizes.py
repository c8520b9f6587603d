"""Smallest leak that groups of given sizes could show, by the intervals of metrics, without a model."""

from __future__ import annotations

import numpy as np
from scipy import stats

from leakbench.leaderboard.records.audit_findings import SmallestLeak
from leakbench.leaderboard.records.details import AucDetail

from ...evidence.one_run import Guesses, one_run
from ...scoring.membership import FPRS, auc, tpr_at_fpr
from ...scoring.random_split import PAIRS_PER_GUESS

POWER = 0.8
"""Power at which the smallest detectable leak would show."""


def smallest_leak(
    members: int, non_members: int, delta: float = 1e-5, level: float = 0.95, attacks: int = 1
) -> SmallestLeak:
    """Returns the smallest leak that groups of these sizes would show in four audits of five; uses no model.

    Args:
        members: number of examples.
        non_members: number of examples.
        delta: of the bound on epsilon.
        level: its confidence.
        attacks: number of attacks, which share the error rate of the bound, because the best of them is taken.
    """
    halves = max(1, members // 2), max(1, non_members // 2)
    detail = AucDetail.of(auc(np.zeros(halves[0]), np.zeros(halves[1])).detail)
    pairs = min(members, non_members)
    ceiling = None
    if pairs >= PAIRS_PER_GUESS:
        answered = pairs // PAIRS_PER_GUESS
        ceiling = one_run(Guesses(pairs, answered, answered), delta, 1 - (1 - level) / max(1, attacks))
    one_percent, tenth_of_it = (_least_tpr(members, non_members, fpr) for fpr in FPRS.values())
    return SmallestLeak(
        members=members,
        non_members=non_members,
        auc=detail.detectable or 1.0,
        tpr_at_1pct_fpr=one_percent,
        tpr_at_01pct_fpr=tenth_of_it,
        pairs=pairs,
        epsilon_ceiling=ceiling,
        attacks=attacks,
    )


def _least_tpr(members: int, non_members: int, fpr: float) -> float | None:
    """Returns the smallest TPR whose interval exceeds the FPR in four audits of five; None if no number of hits has it.

    Hits are members above all non-members, the clearest case: if hits lie among non-members, the TPR has to be larger.
    """
    if not members or non_members * fpr < 1 - 1e-9:
        return None
    ranks = np.arange(non_members, dtype=float)

    def shows(hits: int) -> bool:
        scores = np.concatenate([np.full(members - hits, -1.0), np.full(hits, float(non_members))])
        low = tpr_at_fpr(scores, ranks, fpr).low
        return low is not None and low > fpr

    if not shows(members):
        return None
    low, high = 0, members  # if some number of hits shows, more hits show as well
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if shows(middle) else (middle, high)
    return float(stats.beta.ppf(POWER, high, members - high + 1))
