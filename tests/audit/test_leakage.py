"""Membership metrics against scikit-learn and scipy, hand-worked numbers, and coverage on Gaussian scores."""

import math
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score, roc_curve

from attacks.core import MembershipScores
from audit.evidence import gaussian_auc, gaussian_epsilon, gaussian_tpr
from audit.leakage import auc, calibration_half, implied_epsilon, score_membership, split_advantage, tpr_at_fpr
from leaderboard.record import Metric

SCORES = st.lists(st.integers(-5, 5).map(float) | st.floats(-1e6, 1e6), min_size=1, max_size=40).map(np.array)


def scored(values, members, **settings):
    scores = MembershipScores(
        ids=torch.arange(len(values)),
        scores=torch.as_tensor(values).double(),
        exact=False,
        dependence="per_model",
    )
    return score_membership(scores, torch.as_tensor(members), **settings)


def interval(metric: Metric) -> tuple[float, float, float]:
    assert metric.low is not None and metric.value is not None and metric.high is not None
    return metric.low, metric.value, metric.high


def gaussian(p, q, mu, seed=0):
    generator = np.random.default_rng(seed)
    return generator.standard_normal(p) + mu, generator.standard_normal(q)


@given(positives=SCORES, negatives=SCORES)
def test_the_auc_is_scikit_learns_ties_included(positives, negatives):
    truth = np.repeat([1, 0], [len(positives), len(negatives)])
    theirs = roc_auc_score(truth, np.concatenate([positives, negatives]))
    low, value, high = interval(auc(positives, negatives))
    assert value == pytest.approx(theirs, abs=1e-12)
    assert 0 <= low <= value <= high <= 1


def test_delongs_variance_is_the_one_worked_by_hand():
    # Placements: members 1, 1/3, 2/3 (variance 1/9); non-members beaten by 2/3, 1, 1/3 (variance 1/9).
    low, value, high = interval(auc(np.array([5.0, 2.0, 3.5]), np.array([3.0, 1.0, 4.0])))
    variance = 2 / 27
    half = 1.959964 * math.sqrt(variance) / (2 / 3 * 1 / 3)
    assert value == pytest.approx(2 / 3)
    assert math.log(low / (1 - low)) == pytest.approx(math.log(2) - half, abs=1e-5)
    assert math.log(high / (1 - high)) == pytest.approx(math.log(2) + half, abs=1e-5)


@pytest.mark.parametrize("mu", [0.0, 1.0, 2.5])
def test_delongs_interval_covers_as_often_as_it_says(mu):
    held = 0
    for seed in range(1000):
        low, _, high = interval(auc(*gaussian(60, 90, mu, seed)))
        held += low <= gaussian_auc(mu) <= high
    assert 915 <= held <= 985  # 5 standard errors around 950


def test_delongs_variance_shrinks_to_that_of_the_null_distribution():
    positives, negatives = gaussian(4000, 4000, 0.0)
    low, _, high = interval(auc(positives, negatives))
    null = math.sqrt(8001 / (12 * 4000**2))
    assert (high - low) / (2 * 1.96) == pytest.approx(null, rel=0.02)


def test_perfect_scores_keep_an_honest_interval():
    found = auc(np.arange(100.0, 150), np.arange(40.0))
    assert (found.value, found.high) == (1.0, 1.0)
    assert found.low == pytest.approx(0.025 ** (1 / 40))
    flipped = auc(np.arange(40.0), np.arange(100.0, 150))
    assert (flipped.value, flipped.low) == (0.0, 0.0)
    assert flipped.high == pytest.approx(1 - 0.025 ** (1 / 40))


def test_constant_scores_are_chance_with_a_wide_interval_and_nothing_at_a_low_fpr():
    metrics = scored(np.zeros(1200), np.arange(1200) < 200)
    low, value, high = interval(metrics["auc"])
    assert (low < 0.44, value, high > 0.56) == (True, 0.5, True)
    assert metrics["tpr_at_1pct_fpr"].value == 0
    assert metrics["tpr_at_1pct_fpr"].detail["fpr"] == 0
    assert metrics["advantage"].value == 0
    assert metrics["balanced_accuracy"].value == 0.5


@given(positives=SCORES, negatives=SCORES, level=st.sampled_from([0.05, 0.1, 0.3, 0.7]))
def test_the_tpr_is_that_of_the_best_point_of_the_roc_at_most_at_the_level(positives, negatives, level):
    found = tpr_at_fpr(positives, negatives, level)
    if found.value is None:
        assert len(negatives) < 1 / level
        return
    truth = np.repeat([1, 0], [len(positives), len(negatives)])
    fpr, tpr, _ = roc_curve(truth, np.concatenate([positives, negatives]), drop_intermediate=False)
    low, value, high = interval(found)
    assert value == pytest.approx(tpr[fpr <= level + 1e-9].max())
    assert found.detail["fpr"] <= level
    assert found.detail["tp"] == round(value * len(positives))
    assert 0 <= low <= value <= high <= 1


def test_tied_negatives_at_the_threshold_are_left_out_together():
    negatives = np.concatenate([np.zeros(95), [7.0, 7.0, 9.0, 9.0, 9.0]])
    found = tpr_at_fpr(np.array([8.0, 9.5, 7.0, 0.0]), negatives, 0.04)
    assert found.detail == found.detail | {"fpr": 0.03, "fp": 3, "tp": 2, "threshold": 7.0}
    assert found.value == 0.5


@pytest.mark.parametrize(
    ("n", "level", "mu"), [(700, 0.01, 1.0), (1000, 0.01, 3.0), (1000, 0.001, 1.0), (1000, 0.001, 3.0)]
)
def test_the_interval_of_the_tpr_covers_the_truth_even_with_few_negatives(n, level, mu):
    held = 0
    for seed in range(400):
        low, _, high = interval(tpr_at_fpr(*gaussian(n, n, mu, seed), level, seed=seed))
        held += low <= gaussian_tpr(mu, level) <= high
    assert held >= 355  # 95 % of 400 less 5 standard errors, and a little for the bootstrap


def test_the_quick_bootstrap_is_the_ordinary_one():
    positives, negatives = gaussian(300, 600, 1.5)
    low, _, high = interval(tpr_at_fpr(positives, negatives, 0.01))
    generator = np.random.default_rng(1)
    slow = []
    for _ in range(4000):
        again = np.sort(generator.choice(negatives, 600))
        slow.append((generator.choice(positives, 300) > again[-7]).mean())
    np.testing.assert_allclose((low, high), np.quantile(slow, [0.025, 0.975]), atol=0.02)


def test_a_thousand_resamples_of_1400_examples_take_no_time():
    values, members = np.random.default_rng(0).standard_normal(1400), np.arange(1400) < 700
    scored(values, members)
    began = time.perf_counter()
    scored(values, members)
    assert time.perf_counter() - began < 0.3


@pytest.mark.parametrize(("tp", "fp", "low", "high"), [(56, 48, 0.0524, 0.3339)])
def test_the_interval_of_the_advantage_is_newcombes(tp, fp, low, high):
    # 56 of 70 against 48 of 80: example (a) of Newcombe 1998, method 10
    held_out = np.concatenate([np.arange(70) < tp, np.arange(80) < fp]).astype(float)
    scores = np.concatenate([[1.0, 0.0], held_out])  # the first two choose the threshold 0.5
    members = np.concatenate([[True, False], np.arange(150) < 70])
    found = split_advantage(scores, members, np.arange(152) < 2)["advantage"]
    assert found.value == pytest.approx(56 / 70 - 48 / 80)
    assert (found.low, found.high) == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))


def test_scores_that_say_nothing_have_no_advantage_on_average():
    found = [scored(gaussian(2, 100, 0, seed)[1], np.arange(100) < 50) for seed in range(300)]
    values = [interval(metrics["advantage"])[1] for metrics in found]
    assert abs(np.mean(values)) < 5 * np.std(values) / math.sqrt(300)
    best_differences = [
        np.max(np.abs(np.cumsum(np.where(np.argsort(gaussian(2, 100, 0, seed)[1]) < 50, 0.02, -0.02))))
        for seed in range(300)
    ]
    chosen_and_reported_on_the_same = np.mean(best_differences)
    assert chosen_and_reported_on_the_same > 0.1  # what the split avoids


def test_the_halves_depend_on_ids_alone_and_are_about_equal():
    ids = np.arange(100_000)
    half = calibration_half(ids)
    assert abs(half.mean() - 0.5) < 0.008  # 5 standard errors
    assert (calibration_half(ids[::-1][:50]) == half[::-1][:50]).all()
    assert abs(np.corrcoef(half[:-1], half[1:])[0, 1]) < 0.016


def test_a_memorising_score_is_found_out_by_every_metric():
    members = np.arange(2400) % 2 == 0
    metrics = scored(np.where(members, 5.0, -5.0), members)
    assert {name: metric.value for name, metric in metrics.items()} == dict.fromkeys(metrics, 1.0)
    assert all(interval(metric)[0] > 0.98 for name, metric in metrics.items() if name != "tpr_at_0.1pct_fpr")


def test_infinite_scores_are_ranked_like_any_other():
    members = np.arange(400) < 200
    values = np.where(members, math.inf, -math.inf)
    assert auc(values[members], values[~members]).value == 1
    assert "threshold" not in tpr_at_fpr(values[members], values[~members], 0.01).detail
    assert split_advantage(values, members, np.arange(400) % 2 == 0)["advantage"].value == 1


def test_too_few_examples_are_a_reason_not_a_zero():
    metrics = scored(np.arange(300.0), np.arange(300) < 120)
    assert metrics["tpr_at_0.1pct_fpr"].value is None
    assert "at least 1000 non-members, got 120 members and 180" in str(metrics["tpr_at_0.1pct_fpr"].reason)
    reason = scored(np.arange(3.0), np.ones(3, bool))["auc"].reason
    assert reason == "the AUC needs members and non-members, got 3 members and 0 non-members"


def test_the_same_scores_and_seed_give_the_same_metrics():
    values, members = np.random.default_rng(3).standard_normal(600), np.arange(600) < 300
    assert scored(values, members, seed=4) == scored(values, members, seed=4)


def test_a_truth_of_another_length_is_refused():
    with pytest.raises(ValueError, match="members must have one entry per score, got 3 for 2"):
        scored([0.0, 1.0], [True, False, True])


def implied(positives, negatives, delta=1e-5):
    values = np.concatenate([positives, negatives])
    members = np.arange(len(values)) < len(positives)
    return implied_epsilon(values, members, calibration_half(np.arange(len(values))), delta)


def test_implied_epsilon_is_the_clopper_pearson_bound_of_the_reported_half():
    metric = implied(np.arange(500.0) + 1000, np.arange(500.0))
    detail = metric.detail
    p, q = detail["members"], detail["non_members"]
    assert isinstance(p, int) and isinstance(q, int)
    assert (detail["misses"], detail["false_alarms"]) == (0, 0)
    ends = {n: 1 - 0.025 ** (1 / n) for n in (p, q)}  # no error in n trials
    sides = [math.log((1 - 1e-5 - ends[a]) / ends[b]) for a, b in ((p, q), (q, p))]
    assert metric.value == pytest.approx(max(sides), rel=1e-9)
    assert metric.low is None and metric.reason and metric.n == p + q


def implied_value(positives, negatives, delta):
    value = implied(positives, negatives, delta).value
    assert value is not None
    return value


def test_scores_that_say_nothing_imply_a_positive_epsilon_as_seldom_as_stated():
    # Both rates at their 97.5 % ends: at most 5 % of null runs, whatever the threshold chosen on the other half.
    positive = [implied_value(*gaussian(150, 150, 0.0, seed), delta=0.0) > 0 for seed in range(1000)]
    assert sum(positive) < 50 + 6 * math.sqrt(50)


def test_a_gaussian_mechanism_implies_no_more_than_its_epsilon_and_not_far_less():
    mu, delta = 2.0, 1e-5
    values = [implied_value(*gaussian(2000, 2000, mu, seed), delta) for seed in range(20)]
    assert max(values) < gaussian_epsilon(mu, delta)
    assert min(values) > 2.0


def test_implied_epsilon_needs_both_kinds_in_both_halves():
    assert implied(np.array([1.0]), np.array([0.0])).value is None


def test_it_is_among_the_metrics_only_where_there_is_a_claim():
    values, members = np.arange(40.0), np.arange(40) % 2 == 0
    assert "implied_epsilon" not in scored(values, members)
    assert "implied_epsilon" in scored(values, members, delta=1e-5)
