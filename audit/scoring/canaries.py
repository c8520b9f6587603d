"""A lower bound on epsilon from the canaries of one training, each put in by a fair coin of its own.

By what is assumed: nothing of the mechanism, Steinke, Nasr & Jagielski, "Privacy Auditing with One (1) Training Run",
NeurIPS 2023; that it is a composition of Gaussians, where the claim is of Gaussian steps in which everybody takes part,
Mahloujifar, Melis & Chaudhuri, "Auditing f-Differential Privacy in One Run", 2024; and where canaries are besides in
directions orthogonal to one another, so that each is a trial by itself, the order statistics of such trials, after
Xiang et al., arXiv:2509.08704. A fifth of the canaries is guessed to be in and a fifth to be out, as is fixed here for
all trainings: whoever takes the best number of guesses refutes true claims.

Guarantee:
    With confidence 0.95 the training is not (epsilon, delta)-private, where one record is added or removed, for any
    epsilon below the value. Assumes fair coins, of which the scores know what the training releases and no more; and
    what the method assumes, which is in the detail by its name.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from jaxtyping import Bool
from torch import Tensor

from leakbench.attacks.core import InclusionScores
from leakbench.leaderboard.records.record import Metric

from ..evidence.audit import audit_canaries
from ..evidence.estimate import EpsilonEstimate, judge
from .random_split import LEVEL, SURE

NAME = "canary_epsilon"
"""Of the metric."""

SHARE = 5
"""One in so many canaries is guessed to be in, and one in so many to be out."""

_SPENT = 20
"""One in so many parts of a verdict's chance to err may go to delta, about."""

ASSUMES_GAUSSIANS, ASSUMES_NOTHING, ASSUMES_APART = "one_run_f_dp", "one_run", "order_statistics"
"""Methods of the bound."""

APART = ("dirac", "orthonormal")
"""Kinds of canaries whose contributions may be orthogonal in every step."""


def score_canaries(
    scores: InclusionScores, included: Bool[Tensor, " n"], *, delta: float, gaussian: bool, apart: bool = False
) -> dict[str, Metric]:
    """The least epsilon that scores of canaries prove, add/remove.

    Args:
        scores: one a canary; larger = more likely put in.
        included: the coins, aligned with `scores.ids`.
        delta: of the claim.
        gaussian: whether the claim is of Gaussian steps in which everybody takes part.
        apart: whether contributions of canaries are orthogonal in every step.

    Returns:
        `canary_epsilon`, in nats; `detail` has canaries, guesses, those that are right, the largest bound that so many
        guesses could prove (`ceiling`), and both at the confidence of a verdict (`value_at_verdict`), at a delta of
        its own.

    Raises:
        ValueError: lengths differ, or there are too few canaries to guess about.
    """
    method = ASSUMES_NOTHING if not gaussian else ASSUMES_APART if apart else ASSUMES_GAUSSIANS
    found = _bound(scores, included, delta, method, LEVEL)
    # What assumes nothing loses 2 n delta of its certainty, which at the claim's delta may be all that is asked for.
    at_verdict = delta if gaussian else min(delta, (1 - SURE) / (_SPENT * len(included)))
    sure = _bound(scores, included, at_verdict, method, SURE)
    metric = Metric(
        value=found.value,
        n=len(included),
        better="lower",
        reason="it is a low end by itself: nothing but a proof gives an upper one",
        detail={
            "canaries": found.detail["coins"],
            "guessed": found.detail["guessed"],
            "correct": found.detail["correct"],
            "ceiling": found.ceiling,
            "value_at_verdict": sure.value,
            "ceiling_at_verdict": sure.ceiling,
            "delta_at_verdict": at_verdict,
            "delta": delta,
            "relation": found.relation,
            "method": found.method,
        },
    )
    return {NAME: metric}


def held_against(metric: Metric, claim: Any) -> tuple[Metric, bool]:
    """The bound beside a claim, and whether it refutes that, with the confidence of a verdict.

    Args:
        metric: of `score_canaries`.
        claim: of the very training.

    Returns:
        The metric with `claimed`, at the verdict's delta, and `verdict` in its detail; a claim of another relation is
        not judged.
    """
    relation = str(metric.detail["relation"])
    if claim.relation != relation:
        return replace(metric, detail=metric.detail | {"verdict": f"the claim is of {claim.relation}"}), False
    delta = float(metric.detail["delta_at_verdict"] or 0.0)
    sure = EpsilonEstimate(
        value=float(metric.detail["value_at_verdict"] or 0.0),
        delta=delta,
        level=SURE,
        method=str(metric.detail["method"]),
        assumption="",
        relation="add_remove",
        positives=0,
        negatives=0,
        looks=1,
        ceiling=float(metric.detail["ceiling_at_verdict"] or 0.0),
    )
    epsilon = claim.epsilon if delta == claim.delta else claim.epsilon_at(delta)
    verdict = judge(sure, epsilon=epsilon, delta=delta, relation="add_remove")
    claimed = epsilon if math.isfinite(epsilon) else None
    return replace(metric, detail=metric.detail | {"claimed": claimed, "verdict": verdict}), verdict == "violation"


def _bound(
    scores: InclusionScores, included: Bool[Tensor, " n"], delta: float, method: str, level: float
) -> EpsilonEstimate:
    # In the order of their ids: of equal scores none is picked by its place, but sums are rounded alike.
    order = scores.ids.cpu().argsort()
    asked = max(1, len(included) // SHARE)
    return audit_canaries(
        scores.scores.cpu()[order].numpy(),
        included.cpu()[order].numpy(),
        method=method,
        guesses=[(asked, asked)],
        delta=delta,
        level=level,
    )
