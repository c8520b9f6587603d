"""Membership scores and the truth -> how well they tell members from non-members, with 95 % intervals.

AUC: Mann-Whitney with half ties, interval by DeLong, DeLong & Clarke-Pearson, Biometrics 1988, on the logit
scale. TPR at a low FPR: Carlini et al., "Membership Inference Attacks From First Principles", S&P 2022; the
number is that of the largest threshold set whose empirical FPR is at most the level, never interpolated, and
says the FPR it realised. Advantage and balanced accuracy: at a threshold chosen on one half of the examples
and reported on the other; a threshold chosen on the examples it is reported on would find an advantage in
noise.

All intervals are over examples. Scores of many examples against one model share that model's randomness, so
they are conditional on it; the board averages over seeds.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy import ndarray
from scipy import stats
from scipy.special import expit, logit
from torch import Tensor

from attacks.core import MembershipScores
from leaderboard.record import Metric

from .evidence import clopper_pearson, clopper_pearson_lower, clopper_pearson_upper, epsilon_implied

FPRS = {"tpr_at_1pct_fpr": 0.01, "tpr_at_0.1pct_fpr": 0.001}
"""Metric name -> false positive rate."""

RESAMPLES = 1000
_Z = float(stats.norm.ppf(0.975))


def score_membership(
    scores: MembershipScores, members: Bool[Tensor, " n"], *, seed: int = 0, delta: float | None = None
) -> dict[str, Metric]:
    """Every membership metric of one attack on one target.

    Args:
        scores: one score per example; larger = more likely a member.
        members: the truth, aligned with `scores.ids`.
        seed: of the bootstrap; the same scores and seed give the same interval.
        delta: of the claim that the scores are held against, for `implied_epsilon`.

    Returns:
        `auc`, `tpr_at_1pct_fpr`, `tpr_at_0.1pct_fpr`, `advantage`, `balanced_accuracy`, and with a delta
        `implied_epsilon`; what cannot be measured has no value and says why.

    Raises:
        ValueError: lengths differ.
    """
    ids = scores.ids.cpu().numpy()
    values = scores.scores.double().cpu().numpy()
    truth = members.cpu().numpy()
    if not len(ids) == len(values) == len(truth):
        raise ValueError(f"members must have one entry per score, got {len(truth)} for {len(values)} scores")
    negatives, positives = values[~truth], values[truth]
    metrics = {"auc": auc(positives, negatives)}
    for name, level in FPRS.items():
        metrics[name] = tpr_at_fpr(positives, negatives, level, seed=seed)
    half = calibration_half(ids)
    metrics |= split_advantage(values, truth, half)
    return metrics if delta is None else metrics | {"implied_epsilon": implied_epsilon(values, truth, half, delta)}


def auc(positives: Float[ndarray, " p"], negatives: Float[ndarray, " q"]) -> Metric:
    """Probability that a member scores above a non-member, ties counted half.

    The interval is DeLong's on the logit scale. Where that variance is zero (every pair ordered alike, or all
    scores tied) or a group has a single example, it is Clopper-Pearson on min(p, q) disjoint pairs: at an AUC
    of 1 all of them are ordered correctly, which has probability AUC^min(p, q), so that interval covers as
    stated.

    Args:
        positives: scores of members.
        negatives: scores of non-members.

    Returns:
        The metric; `detail` has the method, the counts, and `detectable`: the AUC that so many examples would
        tell from 0.5 in four runs of five.
    """
    p, q = len(positives), len(negatives)
    if not p or not q:
        return _unmeasured(p, q, "the AUC needs members and non-members")
    value, variance = _delong(positives, negatives)
    chance_deviation = math.sqrt((p + q + 1) / (12 * p * q))
    detectable = min(1.0, 0.5 + (_Z + float(stats.norm.ppf(0.8))) * chance_deviation)
    detail: dict[str, float | int | str | None] = {"members": p, "non_members": q, "detectable": detectable}
    if min(p, q) > 1 and variance > 0 and 0 < value < 1:
        half = _Z * math.sqrt(variance) / (value * (1 - value))
        low, high = float(expit(logit(value) - half)), float(expit(logit(value) + half))
        method = "DeLong, logit scale"
    else:
        low, high = clopper_pearson(value * min(p, q), min(p, q))
        method = "Clopper-Pearson on disjoint pairs"
    return Metric(value=value, low=low, high=high, n=p + q, better="lower", detail=detail | {"method": method})


def tpr_at_fpr(
    positives: Float[ndarray, " p"], negatives: Float[ndarray, " q"], fpr: float, *, seed: int = 0
) -> Metric:
    """True positive rate of the largest set {score > threshold} whose empirical FPR is at most `fpr`.

    The interval is a stratified bootstrap (1000 resamples) that chooses the threshold anew each time. At a
    TPR of 0 or 1 it degenerates, and Clopper-Pearson at the threshold found takes its place. Below 5 / fpr
    non-members the threshold hangs on a few scores and the bootstrap covers as little as 75 %; the interval
    is then the exact one from order statistics, which is wide.

    Args:
        positives: scores of members.
        negatives: scores of non-members.
        fpr: level, in (0, 1).
        seed: of the bootstrap.

    Returns:
        The metric; `detail` has the realised FPR, the counts of true and false positives and the threshold
        (absent when it is infinite). No value with fewer than 1 / fpr non-members.
    """
    p, q = len(positives), len(negatives)
    needed = math.ceil(1 / fpr - 1e-9)
    if not p or q < needed:
        return _unmeasured(p, q, f"the TPR at an FPR of {fpr:g} needs members and at least {needed} non-members")
    allowed = int(fpr * q + 1e-9)  # so many false positives, at most
    falling = np.sort(negatives)[::-1]
    rising = np.sort(positives)
    # Ties fall together: nothing at the score of the first negative that is one too many is called a member.
    threshold = falling[allowed]
    fp = q - int(np.searchsorted(falling[::-1], threshold, side="right"))
    tp = p - int(np.searchsorted(rising, threshold, side="right"))
    if q < 5 * needed:
        low, high = _order_statistic_interval(rising, falling, fpr)
        method = "order statistics, exact"
    elif tp in (0, p):
        low, high = clopper_pearson(tp, p)
        method = "Clopper-Pearson"
    else:
        low, high = _bootstrap_interval(rising, falling, allowed, seed)
        method = f"stratified bootstrap, {RESAMPLES} resamples, threshold chosen anew"
    detail: dict[str, float | int | str | None] = {
        "fpr": fp / q,
        "fp": fp,
        "tp": tp,
        "members": p,
        "non_members": q,
    }
    if math.isfinite(threshold):
        detail["threshold"] = float(threshold)
    # A percentile interval need not hold the estimate; one that does not would read as an error.
    low, high = min(low, tp / p), max(high, tp / p)
    return Metric(value=tp / p, low=low, high=high, n=p + q, better="lower", detail=detail | {"method": method})


def split_advantage(
    scores: Float[ndarray, " n"], members: Bool[ndarray, " n"], calibration: Bool[ndarray, " n"]
) -> dict[str, Metric]:
    """`advantage` (TPR - FPR) and `balanced_accuracy` at the threshold that is best on the calibration half.

    The interval is Newcombe's for a difference of two proportions (method 10, Statistics in Medicine 1998),
    on the examples outside the calibration half. An advantage below 0 is chance, or a threshold that does not
    carry over.

    Args:
        scores: larger = more likely a member.
        members: the truth.
        calibration: which examples choose the threshold; the others are reported on.
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
    detail: dict[str, float | int | str | None] = {
        "tp": tp,
        "fp": fp,
        "members": p,
        "non_members": q,
        "calibrated_on": int(calibration.sum()),
        "method": "Newcombe, on the half that did not choose the threshold",
    }
    if math.isfinite(threshold):
        detail["threshold"] = float(threshold)
    advantage = Metric(value=value, low=low, high=high, n=p + q, better="lower", detail=detail)
    balanced = Metric(
        value=(1 + value) / 2, low=(1 + low) / 2, high=(1 + high) / 2, n=p + q, better="lower", detail=detail
    )
    return {"advantage": advantage, "balanced_accuracy": balanced}


def implied_epsilon(
    scores: Float[ndarray, " n"], members: Bool[ndarray, " n"], calibration: Bool[ndarray, " n"], delta: float
) -> Metric:
    """The least epsilon at which a test could err as seldom as this one, at a threshold that other examples chose.

    The threshold is the one that implies most on the calibration half; what is reported are the errors on the other
    half, at the upper ends of their intervals. It is what the scores imply if they were independent trials. Scores
    against one model share its noise, so it refutes no claim by itself.

    Args:
        scores: larger = more likely a member.
        members: the truth.
        calibration: which examples choose the threshold; the others are reported on.
        delta: of the claim.

    Returns:
        The metric, in nats. It is the low end of an interval whose upper end few trials cannot give.
    """
    chosen_on = _Groups(scores[calibration & members], scores[calibration & ~members])
    reported_on = _Groups(scores[~calibration & members], scores[~calibration & ~members])
    if not all(len(group) for group in (*chosen_on, *reported_on)):
        return _unmeasured(
            int(members.sum()), int((~members).sum()), "the split-half threshold needs both kinds in both halves"
        )
    # Above the threshold is called a member; below the lowest score, everybody is.
    thresholds = np.concatenate([[-math.inf], np.unique(np.concatenate(chosen_on))])
    threshold = thresholds[np.argmax(epsilon_implied(*_errors(chosen_on, thresholds), delta))]
    misses, p, alarms, q = _errors(reported_on, np.array([threshold]))
    value = float(epsilon_implied(misses, p, alarms, q, delta)[0])
    detail: dict[str, float | int | str | None] = {
        "misses": int(misses[0]),
        "false_alarms": int(alarms[0]),
        "members": p,
        "non_members": q,
        "delta": delta,
        "method": "Clopper-Pearson upper ends of both error rates, on the half that did not choose the threshold",
    }
    reason = "it is a low end by itself: few trials give no upper end"
    return Metric(value=value, n=p + q, better="lower", reason=reason, detail=detail)


def _errors(groups: _Groups, thresholds: Float[ndarray, " t"]) -> tuple[ndarray, int, ndarray, int]:
    """Misses and false alarms at each threshold, each with its number of trials."""
    positives, negatives = groups
    misses = np.searchsorted(np.sort(positives), thresholds, side="right")
    alarms = len(negatives) - np.searchsorted(np.sort(negatives), thresholds, side="right")
    return misses, len(positives), alarms, len(negatives)


def calibration_half(ids: Int[ndarray, " n"]) -> Bool[ndarray, " n"]:
    """About half of the ids, by a fixed hash (splitmix64): an example's half depends on its id alone."""
    word = ids.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (word ^ (word >> np.uint64(31))) % np.uint64(2) == 0


class _Groups(NamedTuple):
    positives: ndarray
    negatives: ndarray


def _delong(positives: ndarray, negatives: ndarray) -> tuple[float, float]:
    """AUC and its DeLong variance, in O(n log n)."""
    above = _placements(positives, np.sort(negatives))
    below = 1 - _placements(negatives, np.sort(positives))
    value = float(above.mean())
    if min(len(positives), len(negatives)) < 2:
        return value, 0.0
    return value, float(above.var(ddof=1) / len(above) + below.var(ddof=1) / len(below))


def _placements(scores: ndarray, rising: ndarray) -> ndarray:
    """Share of `rising` that each score beats, ties counted half."""
    left = np.searchsorted(rising, scores, side="left")
    right = np.searchsorted(rising, scores, side="right")
    return (left + right) / (2 * len(rising))


def _bootstrap_interval(rising: ndarray, falling: ndarray, allowed: int, seed: int) -> tuple[float, float]:
    # Resampling is done on what matters of a resample, exactly: the rank of its threshold among the negatives
    # is the floor of a uniform order statistic, and given the threshold the number of positives above it is
    # binomial.
    p, q = len(rising), len(falling)
    generator = np.random.default_rng(seed)
    ranks = (generator.beta(allowed + 1, q - allowed, RESAMPLES) * q).astype(np.int64)
    thresholds = falling[np.minimum(ranks, q - 1)]
    shares = 1 - np.searchsorted(rising, thresholds, side="right") / p
    low, high = np.quantile(generator.binomial(p, shares) / p, [0.025, 0.975])
    return float(low), float(high)


def _order_statistic_interval(rising: ndarray, falling: ndarray, fpr: float) -> tuple[float, float]:
    # The share of the population above the j-th largest of q negatives is Beta(j, q + 1 - j), whatever the
    # scores. Four events may go wrong (each threshold, each count), so each gets a quarter of the 5 %.
    p, q = len(rising), len(falling)
    error = 0.05 / 4
    j = np.arange(1, q + 1)
    surely_below = np.flatnonzero(stats.beta.sf(fpr, j, q + 1 - j) <= error)
    surely_above = np.flatnonzero(stats.beta.cdf(fpr, j, q + 1 - j) <= error)
    low, high = 0.0, 1.0
    if len(surely_below):
        above = p - int(np.searchsorted(rising, falling[surely_below[-1]], side="right"))
        low = clopper_pearson_lower(above, p, error)
    if len(surely_above):
        above = p - int(np.searchsorted(rising, falling[surely_above[0]], side="left"))
        high = clopper_pearson_upper(above, p, error)
    return low, high


def _best_threshold(positives: ndarray, negatives: ndarray) -> float:
    """Half way down from the lowest score that should be called a member; -inf if all should."""
    rising = np.unique(np.concatenate([positives, negatives]))
    above = len(positives) - np.searchsorted(np.sort(positives), rising, side="left")
    false = len(negatives) - np.searchsorted(np.sort(negatives), rising, side="left")
    best = int(np.argmax(above / len(positives) - false / len(negatives)))
    if best == 0:
        return -math.inf
    return _between(float(rising[best - 1]), float(rising[best]))


def _between(below: float, above: float) -> float:
    middle = below / 2 + above / 2  # the sum could overflow
    return middle if below <= middle < above else below


def _newcombe_interval(tp: int, p: int, fp: int, q: int) -> tuple[float, float]:
    rates = tp / p, fp / q
    (low_tp, high_tp), (low_fp, high_fp) = _wilson(tp, p), _wilson(fp, q)
    down = math.hypot(rates[0] - low_tp, high_fp - rates[1])
    up = math.hypot(high_tp - rates[0], rates[1] - low_fp)
    value = rates[0] - rates[1]
    return max(-1.0, value - down), min(1.0, value + up)


def _wilson(successes: int, n: int) -> tuple[float, float]:
    rate, weight = successes / n, _Z**2 / n
    center = (rate + weight / 2) / (1 + weight)
    half = math.sqrt(rate * (1 - rate) * weight + weight**2 / 4) / (1 + weight)
    return center - half, center + half


def _unmeasured(p: int, q: int, rule: str) -> Metric:
    return Metric(value=None, n=p + q, better="lower", reason=f"{rule}, got {p} members and {q} non-members")
