"""A lower bound on epsilon from the canaries of a single training, each included by an independent fair coin.

Three methods, by their assumptions. `one_run` assumes nothing of the mechanism: Steinke, Nasr & Jagielski, "Privacy
Auditing with One (1) Training Run", NeurIPS 2023. `one_run_f_dp` assumes a composition of Gaussians, and is used if the
claim is of Gaussian steps with full participation: Mahloujifar, Melis & Chaudhuri, "Auditing f-Differential Privacy in
One Run", 2024. `order_statistics` assumes in addition that canaries contribute in mutually orthogonal directions, so
that each is an independent trial: after Xiang et al., arXiv:2509.08704. A fifth of the canaries is guessed to be in and
a fifth to be out, fixed for all trainings: choosing the best number of guesses afterwards would refute true claims.

Guarantee:
    With confidence 0.95 the training is not (epsilon, delta)-private under add/remove of a record, for any epsilon
    below the value. Assumes fair coins, on which the scores depend through the training's releases only; and
    the assumptions of the method, which the detail names.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pandas as pd
import torch
from jaxtyping import Bool
from torch import Tensor

from leakbench.attacks.core import InclusionScores
from leakbench.leaderboard.records.details import ProvedDetail
from leakbench.leaderboard.records.record import Metric, Record
from leakbench.leaderboard.records.task import TrainingTask

from ..evidence.audit import audit_canaries
from ..evidence.estimate import EpsilonEstimate, judge
from .random_split import LEVEL, SURE

NAME = "canary_epsilon"
"""Name of the metric."""

CANARIES_PER_GUESS = 5
"""Canaries for each guess that one is in, and for each guess that one is out."""

_DELTA_MARGIN = 20
"""Limits the delta of a verdict to its error probability / (_DELTA_MARGIN n) for n canaries, so that the method's loss
of 2 n delta is at most a tenth of that probability."""

ASSUMES_GAUSSIANS, ASSUMES_NOTHING, ASSUMES_APART = "one_run_f_dp", "one_run", "order_statistics"
"""Methods of the bound, by their assumptions: Gaussian steps; none; Gaussian steps and orthogonal canaries."""

APART = ("dirac", "orthonormal")
"""Kinds of canaries whose contributions may be orthogonal in every step."""


def score_canaries(
    scores: InclusionScores, included: Bool[Tensor, " n"], *, delta: float, gaussian: bool, apart: bool = False
) -> dict[str, Metric]:
    """Returns a lower bound on epsilon from the scores of canaries, under add/remove.

    Args:
        scores: one per canary; larger = more likely included.
        included: the inclusion bits, aligned with `scores.ids`.
        delta: of the claim.
        gaussian: whether the claim is of Gaussian steps with full participation.
        apart: whether contributions of canaries are orthogonal in every step.

    Returns:
        `canary_epsilon`, in nats; `detail` has the numbers of canaries, guesses and right guesses, the largest bound
        provable with that many guesses (`ceiling`), and both at the confidence of a verdict (`value_at_verdict`), at a
        delta of its own.

    Raises:
        ValueError: lengths differ, or there are too few canaries to guess.
    """
    method = ASSUMES_NOTHING if not gaussian else ASSUMES_APART if apart else ASSUMES_GAUSSIANS
    estimate = _bound(scores, included, delta, method, LEVEL)
    # The assumption-free method loses up to 2 n delta of its confidence, which at the claim's delta may be all of it.
    at_verdict = delta if gaussian else min(delta, (1 - SURE) / (_DELTA_MARGIN * len(included)))
    sure = _bound(scores, included, at_verdict, method, SURE)
    metric = Metric(
        value=estimate.value,
        n=len(included),
        better="lower",
        reason="it is a low end by itself: nothing but a proof gives an upper one",
        detail=ProvedDetail(
            {
                "canaries": estimate.detail["coins"],
                "guessed": estimate.detail["guessed"],
                "correct": estimate.detail["correct"],
                "ceiling": estimate.ceiling,
                "value_at_verdict": sure.value,
                "ceiling_at_verdict": sure.ceiling,
                "delta_at_verdict": at_verdict,
                "delta": delta,
                "relation": estimate.relation,
                "method": estimate.method,
            }
        ),
    )
    return {NAME: metric}


def compared_with_claim(metric: Metric, claim: Any) -> tuple[Metric, bool]:
    """Returns the bound with its comparison to a claim, and whether it refutes the claim at the verdict's confidence.

    Args:
        metric: result of `score_canaries`.
        claim: privacy claim of the same training.

    Returns:
        The metric with `claimed`, at the verdict's delta, and `verdict` in its detail; a claim of another relation is
        not judged.
    """
    detail = ProvedDetail.of(metric.detail)
    if claim.relation != detail.relation:
        return replace(metric, detail=detail | {"verdict": f"the claim is of {claim.relation}"}), False
    delta = detail.delta_at_verdict or 0.0
    sure = EpsilonEstimate(
        value=detail.value_at_verdict or 0.0,
        delta=delta,
        level=SURE,
        method=detail.method,
        assumption="",
        relation="add_remove",
        positives=0,
        negatives=0,
        looks=1,
        ceiling=detail.ceiling_at_verdict or 0.0,
    )
    epsilon = claim.epsilon if delta == claim.delta else claim.epsilon_at(delta)
    verdict = judge(sure, epsilon=epsilon, delta=delta, relation="add_remove")
    claimed = epsilon if math.isfinite(epsilon) else None
    return replace(metric, detail=detail | {"claimed": claimed, "verdict": verdict}), verdict == "violation"


def _bound(
    scores: InclusionScores, included: Bool[Tensor, " n"], delta: float, method: str, level: float
) -> EpsilonEstimate:
    # Sorted by id, so that the random order of equal scores does not depend on the order in which they were returned.
    order = scores.ids.cpu().argsort()
    guesses_per_side = max(1, len(included) // CANARIES_PER_GUESS)
    return audit_canaries(
        scores.scores.cpu()[order].numpy(),
        included.cpu()[order].numpy(),
        method=method,
        guesses=[(guesses_per_side, guesses_per_side)],
        delta=delta,
        level=level,
    )


def again(record: Record, table: pd.DataFrame) -> dict[str, Metric]:
    """Recomputes, for `--verify`, the metrics of a record from its arrays."""
    ids, scores = (torch.from_numpy(table[name].to_numpy().copy()) for name in ("id", "score"))
    included = torch.from_numpy(table["member"].to_numpy().astype(bool))
    # Assumptions on the mechanism and on canaries have to agree with the rest of the record.
    task, method = record.task, ProvedDetail.of(record.metrics[NAME].detail).method
    gaussian, apart = method != ASSUMES_NOTHING, method == ASSUMES_APART
    if not isinstance(task, TrainingTask) or record.budget.delta is None:
        raise ValueError("it has no training with a delta")
    if gaussian and task.sampling != "full" and task.sample_rate != 1:
        raise ValueError("its bound assumes that everybody takes part in every step, and its sampling is another")
    if apart and (task.canaries is None or task.canaries.kind not in APART):
        raise ValueError("its bound assumes canaries in directions of their own, and its canaries are others")
    inclusion_scores = InclusionScores(ids=ids, scores=scores, exact=False)
    return score_canaries(inclusion_scores, included, delta=record.budget.delta, gaussian=gaussian, apart=apart)
