"""Metrics of membership inference: AUC, TPR at low FPR, advantage and implied epsilon, with 95 % intervals.

AUC: Mann-Whitney with half ties, interval by the variance of DeLong, DeLong & Clarke-Pearson, Biometrics 1988, adjusted
for ties as Agresti & Caffo, The American Statistician 2000, do for proportions. TPR at a low FPR: Carlini et al.,
"Membership Inference Attacks From First Principles", S&P 2022; the value belongs to the largest threshold set whose
empirical FPR is at most the level, never interpolated, and is reported with its realised FPR. Advantage and balanced
accuracy: the threshold is chosen on half of the examples and evaluated on the other half; evaluated on the same
examples, it would find an advantage in noise.

All intervals are over examples. Scores of many examples against the same model share that model's randomness, so the
intervals are conditional on it; the board averages over seeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from numpy import ndarray
from scipy import stats
from torch import Tensor

from leakbench.attacks.core import MembershipScores
from leakbench.leaderboard.records.details import CALIBRATION, REPORT, AucDetail, Detail, half_key
from leakbench.leaderboard.records.record import Metric, Record

from ..evidence.claim_bounds import clopper_pearson, clopper_pearson_lower, clopper_pearson_upper, epsilon_implied
from . import random_split

FPRS = {"tpr_at_1pct_fpr": 0.01, "tpr_at_0.1pct_fpr": 0.001}
"""Metric name -> false positive rate."""

_SIDE = 0.025
"""Error probability of an interval on each side."""
_Z = float(stats.norm.ppf(0.975))


def score_membership(
    scores: MembershipScores, members: Bool[Tensor, " n"], *, delta: float | None = None
) -> dict[str, Metric]:
    """Returns every membership metric of an attack on a target.

    Args:
        scores: one score per example; larger = more likely a member.
        members: the ground truth, aligned with `scores.ids`.
        delta: delta of the compared claim, for `implied_epsilon`.

    Returns:
        `auc`, `tpr_at_1pct_fpr`, `tpr_at_0.1pct_fpr`, `advantage`, `balanced_accuracy`, and with a delta
        `implied_epsilon` and, as if members were drawn at random, `epsilon_lower`; an unmeasurable metric has no value
        but a reason.

    Raises:
        ValueError: lengths differ.
    """
    ids = scores.ids.cpu().numpy()
    values = scores.scores.double().cpu().numpy()
    truth = members.cpu().numpy()
    if not len(ids) == len(values) == len(truth):
        raise ValueError(f"members must have one entry per score, got {len(truth)} for {len(values)} scores")
    # Sorted, so that sums are rounded alike for any order of the scores.
    negatives, positives = np.sort(values[~truth]), np.sort(values[truth])
    metrics = {"auc": auc(positives, negatives)}
    for name, level in FPRS.items():
        metrics[name] = tpr_at_fpr(positives, negatives, level)
    half = calibration_half(ids)
    halves = {part: _Groups(*(np.sort(values[where & kind]) for kind in (truth, ~truth)))
              for part, where in ((CALIBRATION, half), (REPORT, ~half))}  # fmt: skip
    metrics["auc"] = _with_halves(metrics["auc"], {part: auc(*groups) for part, groups in halves.items()})
    for name, level in FPRS.items():
        by_half = {part: tpr_at_fpr(*groups, level) for part, groups in halves.items()}
        metrics[name] = _with_halves(metrics[name], by_half)
    metrics |= split_advantage(values, truth, half)
    if delta is None:
        return metrics
    return metrics | {
        "implied_epsilon": implied_epsilon(values, truth, half, delta),
        random_split.NAME: random_split.epsilon_lower(ids, values, truth, delta),
    }


def _with_halves(whole: Metric, halves: dict[str, Metric]) -> Metric:
    """Returns the metric of all candidates with those of both halves in its detail; unchanged if a half has no value.

    Picking the strongest of several attacks by the displayed numbers overstates it: a board compares attacks on the
    calibration half, and shows the winner's value on the other half.
    """
    if any(part.value is None for part in halves.values()):
        return whole
    detail = {half_key(CALIBRATION, "value"): halves[CALIBRATION].value}
    report = halves[REPORT]
    detail |= {half_key(REPORT, field): getattr(report, field) for field in ("value", "low", "high", "n")}
    return replace(whole, detail=whole.detail | detail)


def auc(positives: Float[ndarray, " p"], negatives: Float[ndarray, " q"]) -> Metric:
    """Returns the probability that a member scores above a non-member, ties counted half.

    A group's variance is that of its placements (the fraction of the other group that each score exceeds) plus two
    pseudo-placements, 0 and 1. With tied scores, the values that decide the AUC may be so rare that a group has none;
    without the pseudo-placements its variance would be 0, and the interval would cover as little as 45 %. If every pair
    is ordered alike, or all scores are tied, or a group has a single example, the interval is Clopper-Pearson on min(p,
    q) disjoint pairs: at an AUC of 1 all pairs are ordered correctly, which has probability AUC^min(p, q), so that
    interval covers as stated.

    Args:
        positives: scores of members.
        negatives: scores of non-members.

    Returns:
        The metric; `detail` has the method, the counts, and `detectable`: the AUC distinguishable from 0.5 with this
        number of examples in four runs of five.
    """
    p, q = len(positives), len(negatives)
    if not p or not q:
        return _unmeasured(p, q, "the AUC needs members and non-members")
    value, varies, variance = _delong(positives, negatives)
    # Standard deviation of the AUC under exchangeable scores without ties (Mann-Whitney); 0.8 is four runs of five.
    chance_deviation = math.sqrt((p + q + 1) / (12 * p * q))
    detectable = min(1.0, 0.5 + (_Z + float(stats.norm.ppf(0.8))) * chance_deviation)
    detail = {"members": p, "non_members": q, "detectable": detectable}
    if min(p, q) > 1 and varies and 0 < value < 1:
        half = _Z * math.sqrt(variance)
        low, high = max(0.0, value - half), min(1.0, value + half)
        method = "DeLong, with two more placements in each group"
    else:
        low, high = clopper_pearson(value * min(p, q), min(p, q))
        method = "Clopper-Pearson on disjoint pairs"
    return Metric(
        value=value, low=low, high=high, n=p + q, better="lower", detail=AucDetail(detail | {"method": method})
    )


def tpr_at_fpr(positives: Float[ndarray, " p"], negatives: Float[ndarray, " q"], fpr: float) -> Metric:
    """Returns the true positive rate of the largest set {score > threshold} whose empirical FPR is at most `fpr`.

    The estimand is the TPR of the largest such set in the population: P(member > t*) at t* = min {t: P(non-member > t)
    <= fpr}. Tied scores fall on the same side of a threshold, in the sample as in the population; no intermediate set
    is interpolated.

    The interval is exact for any scores with any number of ties; see `_order_statistic_interval`. It is wide if few
    non-members lie above the threshold. A bootstrap is narrower but undercovers: 0.89 without ties, and 0.5 with the
    level at a tie.

    Args:
        positives: scores of members.
        negatives: scores of non-members.
        fpr: level, in (0, 1).

    Returns:
        The metric; `detail` has the realised FPR, the counts of true and false positives and the threshold (absent if
        infinite). No value with fewer than 1 / fpr non-members.
    """
    p, q = len(positives), len(negatives)
    needed = math.ceil(1 / fpr - 1e-9)  # with fewer, the level allows not a single false positive
    if not p or q < needed:
        return _unmeasured(p, q, f"the TPR at an FPR of {fpr:g} needs members and at least {needed} non-members")
    allowed = int(fpr * q + 1e-9)  # most false positives; the summand is for products that round to below an integer
    falling = np.sort(negatives)[::-1]
    rising = np.sort(positives)
    # The first negative score above the allowed number: scores equal to it count as non-members, so ties stay together.
    threshold = falling[allowed]
    fp = q - int(np.searchsorted(falling[::-1], threshold, side="right"))
    tp = p - int(np.searchsorted(rising, threshold, side="right"))
    low, high = _order_statistic_interval(rising, falling, fpr)
    detail = {
        "fpr": fp / q,
        "fp": fp,
        "tp": tp,
        "members": p,
        "non_members": q,
        "method": "order statistics, exact",
    }
    # Absent if infinite, as with tied scores of -inf: records are JSON.
    if math.isfinite(threshold):
        detail["threshold"] = float(threshold)
    return Metric(value=tp / p, low=low, high=high, n=p + q, better="lower", detail=Detail(detail))


def split_advantage(
    scores: Float[ndarray, " n"], members: Bool[ndarray, " n"], calibration: Bool[ndarray, " n"]
) -> dict[str, Metric]:
    """Returns `advantage` (TPR - FPR) and `balanced_accuracy` at the best threshold of the calibration half.

    The interval is Newcombe's for a difference of two proportions (Statistics in Medicine 1998) on the examples outside
    the calibration half, with the limits of Clopper and Pearson in place of Wilson's, whose interval covers 86 % with
    one rate near 0 and the other near 1. An advantage below 0 is chance, or a threshold that does not carry over.

    Args:
        scores: larger = more likely a member.
        members: the ground truth.
        calibration: examples that choose the threshold; the others are reported on.
    """
    chosen_on = _Groups(scores[calibration & members], scores[calibration & ~members])
    reported_on = _Groups(scores[~calibration & members], scores[~calibration & ~members])
    if not all(len(group) for group in (*chosen_on, *reported_on)):
        missing = _unmeasured(
            int(members.sum()),
            int((~members).sum()),
            "the split-half threshold needs both kinds in both halves",
        )
        return {"advantage": missing, "balanced_accuracy": missing}
    threshold = _best_threshold(*chosen_on)
    p, q = len(reported_on.positives), len(reported_on.negatives)
    tp, fp = int((reported_on.positives > threshold).sum()), int((reported_on.negatives > threshold).sum())
    value = tp / p - fp / q
    low, high = _newcombe_interval(tp, p, fp, q)
    detail = {
        "tp": tp,
        "fp": fp,
        "members": p,
        "non_members": q,
        "calibrated_on": int(calibration.sum()),
        "method": "Newcombe with exact limits, on the half that did not choose the threshold",
    }
    if math.isfinite(threshold):
        detail["threshold"] = float(threshold)
    advantage = Metric(value=value, low=low, high=high, n=p + q, better="lower", detail=Detail(detail))
    # (TPR + 1 - FPR) / 2 is an affine map of the advantage, and so are the ends of its interval.
    balanced = Metric(
        value=(1 + value) / 2, low=(1 + low) / 2, high=(1 + high) / 2, n=p + q, better="lower", detail=advantage.detail
    )
    # Value on the half that chose the threshold; the metric itself is of the other half.
    reached = float((chosen_on.positives > threshold).mean() - (chosen_on.negatives > threshold).mean())
    return {
        name: _with_halves(
            metric, {CALIBRATION: replace(metric, value=on_calibration, low=None, high=None), REPORT: metric}
        )
        for name, metric, on_calibration in (
            ("advantage", advantage, reached),
            ("balanced_accuracy", balanced, (1 + reached) / 2),
        )
    }


def implied_epsilon(
    scores: Float[ndarray, " n"], members: Bool[ndarray, " n"], calibration: Bool[ndarray, " n"], delta: float
) -> Metric:
    """Returns the least epsilon that permits error rates this low, at a threshold chosen on other examples.

    The threshold implies the largest epsilon on the calibration half; the reported errors are those on the other half,
    at the upper ends of their intervals. The scores would imply this epsilon if they were independent trials. Scores
    against the same model share its noise, so the value refutes no claim by itself.

    Args:
        scores: larger = more likely a member.
        members: the ground truth.
        calibration: examples that choose the threshold; the others are reported on.
        delta: of the claim.

    Returns:
        The metric, in nats: the low end of an interval; few trials cannot give an upper end.
    """
    chosen_on = _Groups(scores[calibration & members], scores[calibration & ~members])
    reported_on = _Groups(scores[~calibration & members], scores[~calibration & ~members])
    if not all(len(group) for group in (*chosen_on, *reported_on)):
        return _unmeasured(
            int(members.sum()), int((~members).sum()), "the split-half threshold needs both kinds in both halves"
        )
    # Scores above the threshold are predicted members; at -inf all are.
    thresholds = np.concatenate([[-math.inf], np.unique(np.concatenate(chosen_on))])
    implied = epsilon_implied(*_errors(chosen_on, thresholds), delta)
    threshold = thresholds[np.argmax(implied)]
    misses, p, alarms, q = _errors(reported_on, np.array([threshold]))
    value = float(epsilon_implied(misses, p, alarms, q, delta)[0])
    detail = {
        "misses": int(misses[0]),
        "false_alarms": int(alarms[0]),
        "members": p,
        "non_members": q,
        "delta": delta,
        "method": "Clopper-Pearson upper ends of both error rates, on the half that did not choose the threshold",
    }
    reason = "it is a low end by itself: few trials give no upper end"
    metric = Metric(value=value, n=p + q, better="lower", reason=reason, detail=Detail(detail))
    return _with_halves(metric, {CALIBRATION: replace(metric, value=float(implied.max())), REPORT: metric})


def _errors(groups: _Groups, thresholds: Float[ndarray, " t"]) -> tuple[ndarray, int, ndarray, int]:
    """Returns misses and false alarms at each threshold, each with its number of trials."""
    positives, negatives = groups
    misses = np.searchsorted(np.sort(positives), thresholds, side="right")
    alarms = len(negatives) - np.searchsorted(np.sort(negatives), thresholds, side="right")
    return misses, len(positives), alarms, len(negatives)


def calibration_half(ids: Int[ndarray, " n"]) -> Bool[ndarray, " n"]:
    """Returns about half of the ids, by a fixed hash (splitmix64): an example's half depends on its id alone.

    The half is therefore the same in every cell on a data set, for any choice of candidates.
    """
    # Sums and products wrap at 2^64 on purpose, as NumPy arrays do without a warning.
    word = ids.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (word ^ (word >> np.uint64(31))) % np.uint64(2) == 0


class _Groups(NamedTuple):
    positives: ndarray
    negatives: ndarray


def _delong(positives: ndarray, negatives: ndarray) -> tuple[float, bool, float]:
    """Returns AUC, whether placements vary within a group, and a variance, in O(n log n)."""
    # Placements: the components V_10 and V_01 of DeLong et al. The AUC is the mean of either.
    above = _placements(positives, np.sort(negatives))
    below = 1 - _placements(negatives, np.sort(positives))
    value = float(above.mean())
    varies = any(bool((group != group[0]).any()) for group in (above, below))
    # Squared distances of the pseudo-placements 0 and 1 from the AUC (Agresti & Caffo): n + 2 placements with n + 1
    # degrees of freedom, for the variance of a mean of n.
    squares = value**2 + (1 - value) ** 2
    variance = sum((((g - value) ** 2).sum() + squares) / (len(g) + 1) / len(g) for g in (above, below))
    return value, varies, float(variance)


def _placements(scores: ndarray, rising: ndarray) -> ndarray:
    """Returns the fraction of `rising` that each score exceeds, ties counted half."""
    below = np.searchsorted(rising, scores, side="left")
    not_above = np.searchsorted(rising, scores, side="right")
    return (below + not_above) / (2 * len(rising))


def _order_statistic_interval(rising: ndarray, falling: ndarray, fpr: float) -> tuple[float, float]:
    """Returns an interval of P(member > t*) that errs with probability at most `_SIDE` on each side, for any scores.

    Let X_j be the j-th largest of q non-members, and U_j the j-th smallest of q uniform numbers, Beta(j, q + 1 - j).
    They can be coupled so that P(non-member > X_j) <= U_j <= P(non-member >= X_j), the two sides differing by the tie
    at X_j. If U_j <= fpr, then X_j is a threshold within the level, so X_j >= t* and at least as many members are above
    t* as above X_j. If U_j > fpr, then every t < X_j exceeds the level, so X_j <= t*, and at most as many are. A
    Clopper-Pearson bound on the members above X_j therefore bounds those above t*, unless U_j is on the wrong side of
    the level. The choice of j depends on q and the level alone, and the bound gets the remaining error probability.

    Args:
        rising: scores of members, sorted.
        falling: scores of non-members, sorted downwards.
        fpr: level.
    """
    p, q = len(rising), len(falling)

    def bound(place: int, wrong: float, limit: Callable[[int, int, float], float]) -> float:
        above = p - int(np.searchsorted(rising, falling[place - 1], side="right"))
        return limit(above, p, (_SIDE - wrong) / (1 - wrong))

    # U_j > fpr if fewer than j of q uniform numbers are at most fpr, a binomial count. Half of the error is for the
    # threshold, or all that it needs if half is not enough for the highest score.
    inside = stats.binom(q, fpr)
    low, high = 0.0, 1.0
    lower = max(1, int(inside.ppf(_SIDE / 2)))
    if (wrong := float(inside.cdf(lower - 1))) < _SIDE:
        low = bound(lower, wrong, clopper_pearson_lower)
    upper = int(inside.isf(_SIDE / 2)) + 1
    if upper <= q:
        high = bound(upper, float(inside.sf(upper - 1)), clopper_pearson_upper)
    return low, high


def _best_threshold(positives: ndarray, negatives: ndarray) -> float:
    """Returns the midpoint below the lowest score that should be called a member; -inf if all should."""
    rising = np.unique(np.concatenate([positives, negatives]))
    above = len(positives) - np.searchsorted(np.sort(positives), rising, side="left")
    false = len(negatives) - np.searchsorted(np.sort(negatives), rising, side="left")
    best = int(np.argmax(above / len(positives) - false / len(negatives)))
    if best == 0:
        return -math.inf
    return _between(float(rising[best - 1]), float(rising[best]))


def _between(below: float, above: float) -> float:
    middle = below / 2 + above / 2  # halved first: the sum could overflow
    # Between neighbouring floats, or up to an infinite end, there is no midpoint.
    return middle if below <= middle < above else below


def _newcombe_interval(tp: int, p: int, fp: int, q: int) -> tuple[float, float]:
    # Newcombe's method 10: distances of each rate to its own limits, combined as square roots of sums of squares.
    rates = tp / p, fp / q
    (low_tp, high_tp), (low_fp, high_fp) = clopper_pearson(tp, p), clopper_pearson(fp, q)
    down = math.hypot(rates[0] - low_tp, high_fp - rates[1])
    up = math.hypot(high_tp - rates[0], rates[1] - low_fp)
    value = rates[0] - rates[1]
    return max(-1.0, value - down), min(1.0, value + up)


def _unmeasured(p: int, q: int, rule: str) -> Metric:
    return Metric(value=None, n=p + q, better="lower", reason=f"{rule}, got {p} members and {q} non-members")


def again(record: Record, table: pd.DataFrame) -> dict[str, Metric]:
    """Recomputes, for `--verify`, the metrics of a record from its arrays."""
    # Copies, because columns of a table may be read-only, about which torch warns.
    ids, scores = (torch.from_numpy(table[name].to_numpy().copy()) for name in ("id", "score"))
    members = torch.from_numpy(table["member"].to_numpy().astype(bool))
    # The other fields of an attack's result enter no metric.
    membership_scores = MembershipScores(ids=ids, scores=scores, exact=False)
    # An external model has no budget, so its delta is None and no epsilon is recomputed.
    metrics = score_membership(membership_scores, members, delta=record.budget.delta)
    knows = () if record.requires is None else record.requires.knows
    recorded = record.metrics.get(random_split.NAME)
    # It is a number if the split was random; otherwise a record whose bound was removed would pass.
    if (recorded is None or recorded.value is None) and random_split.not_a_random_split(knows, record.flags):
        metrics.pop(random_split.NAME, None)
    return metrics
