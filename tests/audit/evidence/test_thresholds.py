"""Choices of a threshold: valid ones stay valid on null data, the trap does not, and mistakes are refused."""

import math

import numpy as np
import pytest

from leakbench.audit.evidence.counts import Errors, clopper_pearson
from leakbench.audit.evidence.thresholds import (
    DeclaredThresholds,
    FixedThreshold,
    SplitThreshold,
    best_threshold,
    errors_at,
    judged,
)

from ...parameters import subtests

GRID = tuple(np.linspace(-2.5, 2.5, 21))


def bound(errors: Errors, level: float) -> float:
    return clopper_pearson(errors, 0.0, level)


def test_errors_count_a_score_at_the_threshold_as_with_the_record():
    errors = errors_at(np.array([1.0, 2.0, 3.0]), np.array([0.0, 2.0]), 2.0)
    assert errors == Errors(misses=1, positives=3, alarms=1, negatives=2)


@pytest.mark.long
@subtests(
    "choice",
    [FixedThreshold(0.5), DeclaredThresholds(GRID), SplitThreshold(), SplitThreshold(splits=5)],
)
def test_on_null_data_a_valid_choice_proves_nothing_in_its_share_of_audits(choice):
    coins, wrong = np.random.default_rng(1), 0
    for _ in range(200):
        wrong += judged(coins.normal(size=150), coins.normal(size=150), choice, bound, level=0.95).value > 0
    assert wrong <= 22  # of 200 at a nominal 5 %: more have a chance of 2e-4


def test_the_best_threshold_on_the_trials_that_it_is_judged_by_is_a_trap():
    coins, wrong = np.random.default_rng(1), 0
    for _ in range(150):
        x, y = coins.normal(size=500), coins.normal(size=500)
        best = best_threshold(x, y)
        # Both directions, as rules do that take the best; at the 90 % that one direction's interval leaves.
        wrong += max(bound(errors_at(x, y, t), 0.5) for t in (best, *np.quantile(x, [0.05, 0.5, 0.95]))) > 0
    assert wrong > 40


def test_a_choice_has_power():
    coins = np.random.default_rng(2)
    x, y = coins.normal(3, 1, 1000), coins.normal(0, 1, 1000)
    for choice in (FixedThreshold(1.5), DeclaredThresholds(GRID), SplitThreshold(), SplitThreshold(splits=5)):
        assert judged(x, y, choice, bound, level=0.95).value > 1.5


def test_a_level_is_shared_by_all_looks():
    coins = np.random.default_rng(3)
    x, y = coins.normal(2, 1, 200), coins.normal(0, 1, 200)
    found = judged(x, y, DeclaredThresholds((0.5, 1.0, 1.5, 2.0)), bound, level=0.95)
    assert found.looks == 4 and found.level == pytest.approx(1 - 0.05 / 4)
    assert found.value == max(bound(errors_at(x, y, t), 1 - 0.05 / 4) for t in (0.5, 1.0, 1.5, 2.0))
    halves = judged(x, y, SplitThreshold(splits=3), bound, level=0.95)
    assert halves.looks == 3 and halves.errors.positives == halves.errors.negatives == 100


@subtests(
    ("scores", "choice", "sentence"),
    [
        (([], [1.0]), FixedThreshold(0.0), "positives must be scores of at least one trial"),
        (([1.0], [math.nan]), FixedThreshold(0.0), "negatives must be finite scores, got NaN or infinity at trial 0"),
        (([1.0], [1.0, 2.0]), SplitThreshold(), "positives must be enough to choose on a share of 0.5"),
    ],
)
def test_trials_that_prove_nothing_are_refused(scores, choice, sentence):
    with pytest.raises(ValueError, match=sentence):
        judged(np.array(scores[0]), np.array(scores[1]), choice, bound, level=0.95)


@subtests(
    ("make", "sentence"),
    [
        (lambda: DeclaredThresholds(()), "thresholds must be distinct and at least one"),
        (lambda: DeclaredThresholds((1.0, 1.0)), "thresholds must be distinct"),
        (lambda: FixedThreshold(math.nan), "a threshold must be a number, got NaN"),
        (lambda: DeclaredThresholds((1.0, math.nan)), "a threshold must be a number, got NaN"),
        (lambda: SplitThreshold(share=1.0), r"share must be in \(0, 1\), got 1.0"),
        (lambda: SplitThreshold(splits=0), "splits must be at least 1, got 0"),
    ],
)
def test_choices_that_are_none_are_refused(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()
