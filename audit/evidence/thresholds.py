"""Choice of a test's threshold; there is no default, because the choice decides whether the bound is valid.

Taking the best threshold on the same trials that judge it refutes a true claim of epsilon 0 in 8 to 44 % of audits at a
nominal 5 %. Here a threshold is fixed in advance, chosen on other trials, or among candidates that share the error
rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy import ndarray

from .claim_bounds import epsilon_implied
from .counts import Errors


@dataclass(frozen=True)
class FixedThreshold:
    """A threshold that was fixed before any trial was seen.

    Attributes:
        threshold: scores at or above it are classified as trials with the record.
    """

    words: ClassVar[str] = "fixed"

    def __post_init__(self) -> None:
        _refuse_nan(self.threshold)

    threshold: float


@dataclass(frozen=True)
class DeclaredThresholds:
    """The best threshold of a grid fixed in advance, at an error rate divided by the grid's size (Bonferroni).

    Attributes:
        thresholds: the grid, distinct.
    """

    words: ClassVar[str] = "declared"
    thresholds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.thresholds or len(set(self.thresholds)) != len(self.thresholds):
            raise ValueError(f"thresholds must be distinct and at least one, got {list(self.thresholds)}")
        _refuse_nan(*self.thresholds)


@dataclass(frozen=True)
class SplitThreshold:
    """The best threshold on some of the trials, judged by the others; several such splits share the error rate.

    Attributes:
        share: fraction of the trials of each kind that choose the threshold.
        splits: number of random splits; the best is taken, at an error rate divided by their number.
        seed: of the splits, which must not depend on the scores.
    """

    words: ClassVar[str] = "split"
    share: float = 0.5
    splits: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise ValueError(f"share must be in (0, 1), got {self.share}")
        if self.splits < 1:
            raise ValueError(f"splits must be at least 1, got {self.splits}")


Choice = FixedThreshold | DeclaredThresholds | SplitThreshold


@dataclass(frozen=True)
class Judged:
    """A bound at a chosen threshold.

    Attributes:
        value: the bound.
        errors: error counts of the test at the threshold, on the trials that judged it.
        threshold: the chosen threshold.
        looks: number of candidates, by which the error rate was divided.
        level: remaining confidence level of each candidate.
    """

    value: float
    errors: Errors
    threshold: float
    looks: int
    level: float


def judged(
    positives: ndarray, negatives: ndarray, choice: Choice, bound: Callable[[Errors, float], float], *, level: float
) -> Judged:
    """Returns the bound at the threshold selected by a choice.

    Args:
        positives: scores of trials with the record [p], larger for "with".
        negatives: scores of trials without it [q].
        choice: rule that chooses the threshold.
        bound: (errors, level) -> lower bound on epsilon.
        level: confidence of the result.

    Raises:
        ValueError: if a group is empty, too small to be split, or holds a score that is not finite.
    """
    positives, negatives = _checked("positives", positives), _checked("negatives", negatives)
    if isinstance(choice, SplitThreshold):
        looks, candidates = choice.splits, _of_splits(positives, negatives, choice)
    else:
        thresholds = (choice.threshold,) if isinstance(choice, FixedThreshold) else choice.thresholds
        looks, candidates = len(thresholds), [(t, errors_at(positives, negatives, t)) for t in thresholds]
    each = 1 - (1 - level) / looks
    bounds = [Judged(bound(errors, each), errors, threshold, looks, each) for threshold, errors in candidates]
    return max(bounds, key=lambda candidate: candidate.value)


def errors_at(positives: ndarray, negatives: ndarray, threshold: float) -> Errors:
    """Returns errors of the test "with the record if the score is at least the threshold"."""
    return Errors(
        int((positives < threshold).sum()), len(positives), int((negatives >= threshold).sum()), len(negatives)
    )


def best_threshold(positives: ndarray, negatives: ndarray) -> float:
    """Returns the threshold that proves most on these trials, by Clopper-Pearson; other trials must judge it."""
    thresholds = np.unique(np.concatenate([positives, negatives]))
    misses = np.searchsorted(np.sort(positives), thresholds, side="left")
    alarms = len(negatives) - np.searchsorted(np.sort(negatives), thresholds, side="left")
    value = epsilon_implied(misses, len(positives), alarms, len(negatives), 0.0)
    # The middle of several best thresholds: few trials leave many of them, and the extreme ones carry over worst.
    best = np.flatnonzero(value == value.max())
    return float(thresholds[best[len(best) // 2]])


def _of_splits(positives: ndarray, negatives: ndarray, choice: SplitThreshold) -> list[tuple[float, Errors]]:
    generator, candidates = np.random.default_rng(choice.seed), []
    for _ in range(choice.splits):
        (chosen_p, judging_p), (chosen_n, judging_n) = (
            _two(values, choice.share, generator, name)
            for name, values in (("positives", positives), ("negatives", negatives))
        )
        threshold = best_threshold(chosen_p, chosen_n)
        candidates.append((threshold, errors_at(judging_p, judging_n, threshold)))
    return candidates


def _two(values: ndarray, share: float, generator: np.random.Generator, name: str) -> tuple[ndarray, ndarray]:
    count = math.floor(share * len(values))
    if not 0 < count < len(values):
        raise ValueError(
            f"{name} must be enough to choose on a share of {share:g} and judge by the rest, got {len(values)}"
        )
    order = generator.permutation(len(values))
    return values[order[:count]], values[order[count:]]


def _checked(name: str, values: ndarray) -> ndarray:
    values = np.asarray(values, dtype=np.float64)
    if values.ndim != 1 or len(values) == 0:
        raise ValueError(f"{name} must be scores of at least one trial, [n], got shape {list(values.shape)}")
    if not np.isfinite(values).all():
        raise ValueError(
            f"{name} must be finite scores, got NaN or infinity at trial {int(np.argmin(np.isfinite(values)))}"
        )
    return values


def _refuse_nan(*thresholds: float) -> None:
    # No score is below or above NaN: a test by it would seem to make no errors.
    if any(math.isnan(threshold) for threshold in thresholds):
        raise ValueError("a threshold must be a number, got NaN")
