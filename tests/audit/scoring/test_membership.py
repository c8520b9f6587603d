"""Membership metrics against scikit-learn and scipy, hand-worked numbers, and coverage on Gaussian scores."""

import math
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, binomtest, mannwhitneyu, norm
from sklearn.metrics import roc_auc_score, roc_curve

from leakbench.attacks.core import MembershipScores
from leakbench.audit.evidence.claim_bounds import clopper_pearson, gaussian_auc, gaussian_epsilon, gaussian_tpr
from leakbench.audit.scoring.membership import (
    auc,
    calibration_half,
    implied_epsilon,
    score_membership,
    split_advantage,
    tpr_at_fpr,
)
from leakbench.leaderboard.records.record import Metric

from ...parameters import subtests

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


def test_the_variance_of_the_auc_is_the_one_worked_by_hand():
    # Members beat 1, 1, 1/2 and all of the non-members, who are beaten by 1, 3/4, 1 and 3/4. With 0 and 1 beside them
    # the squares about 7/8 are (1 + 1 + 9 + 1 + 49 + 1) / 64 and (1 + 1 + 1 + 1 + 49 + 1) / 64, over 5 x 4 each.
    low, value, high = interval(auc(np.array([5.0, 6.0, 2.0, 7.0]), np.array([1.0, 3.0, 0.0, 4.0])))
    assert value == 7 / 8
    assert (low, high) == (pytest.approx(7 / 8 - 1.959964 * math.sqrt((62 + 54) / 64 / 20), abs=1e-6), 1.0)


@pytest.mark.long
@subtests("mu", [0.0, 1.0, 2.5])
def test_delongs_interval_covers_as_often_as_it_says(mu):
    held = 0
    for seed in range(1000):
        low, _, high = interval(auc(*gaussian(60, 90, mu, seed)))
        held += low <= gaussian_auc(mu) <= high
    assert 915 <= held <= (985 if mu < 2 else 1000)  # 5 standard errors around 950; near 1 it is wider than it need be


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


class Values:
    """Scores of which every example has one of a few values: ties whatever the number of examples."""

    def __init__(self, non_members: list[float], members: list[float]) -> None:
        self.outside, self.inside = np.array(non_members), np.array(members)

    def draw(self, generator, p, q) -> tuple[np.ndarray, np.ndarray]:
        def some(weights, n):
            return generator.choice(np.arange(float(len(weights))), n, p=weights)

        return some(self.inside, p), some(self.outside, q)

    def tpr(self, level: float) -> float:
        """Of the largest set above a value whose false positive rate is at most the level."""
        above = [np.append(np.cumsum(weights[::-1])[::-1][1:], 0.0) for weights in (self.outside, self.inside)]
        return float(above[1][np.flatnonzero(above[0] <= level + 1e-12)[0]])

    def auc(self) -> float:
        below = np.cumsum(self.outside) - self.outside
        return float((self.inside * (below + self.outside / 2)).sum())


class Normal:
    """N(mu, 1) against N(0, 1): no ties."""

    def __init__(self, mu: float) -> None:
        self.mu = mu

    def draw(self, generator, p, q) -> tuple[np.ndarray, np.ndarray]:
        return generator.standard_normal(p) + self.mu, generator.standard_normal(q)

    def tpr(self, level: float) -> float:
        return gaussian_tpr(self.mu, level)

    def auc(self) -> float:
        return gaussian_auc(self.mu)


def on_a_grid(mu: float, step: float) -> Values:
    """The same, rounded to multiples of a step."""
    edges = np.concatenate([[-np.inf], np.arange(-6 - step / 2, 6 + mu + step, step), [np.inf]])
    outside, inside = (np.diff(norm.cdf(edges - shift)) for shift in (0.0, mu))
    return Values(list(outside), list(inside))


def atoms_about(level: float) -> list[Values]:
    """Scores whose highest values carry about as many non-members as the level allows."""
    found = []
    for share in (0.5, 0.9, 1.0, 1.1, 2.0):
        top = share * level
        found += [Values([1 - top, top], [0.95, 0.05]), Values([1 - top, top], [0.4, 0.6])]
        found += [Values([1 - top, top, 0], [0.5, 0.3, 0.2]), Values([1 - top, top, 0], [0.6, 0.397, 0.003])]
    return found


def tied(level: float) -> list[Values]:
    """Few ties, many, nothing else; the TPR near 0, in the middle, near 1."""
    grids = [on_a_grid(mu, step) for mu in (0.0, 2.5, 5.0) for step in (0.01, 0.5, 1.5)]
    extremes = [Values([1.0], [1.0]), Values([0.5, 0.5], [1.0, 0.0]), Values([1.0, 0.0], [0.0, 1.0])]
    return [*grids, *extremes, Values([0.7, 0.3], [0.1, 0.9]), *atoms_about(level)]


def coverage(scores, measure, truth: float, p: int, q: int, draws: int) -> float:
    """How often an interval of a measure holds the truth."""
    generator, held = np.random.default_rng(0), 0
    for _ in range(draws):
        low, _, high = interval(measure(*scores.draw(generator, p, q)))
        held += low - 1e-12 <= truth <= high + 1e-12
    return held / draws


def errors_at_95(draws: int) -> float:
    """Five standard errors of a coverage of 95 %."""
    return 5 * math.sqrt(0.05 * 0.95 / draws)


@pytest.mark.parametrize(
    ("scores", "p", "q", "level"),
    [
        pytest.param(Normal(1.0), 700, 700, 0.01, marks=pytest.mark.long),
        pytest.param(Normal(3.0), 1000, 1000, 0.01, marks=pytest.mark.long),
        pytest.param(Normal(3.0), 1000, 5000, 0.001, marks=pytest.mark.slow),
        (Values([0.99, 0.01], [0.95, 0.05]), 500, 500, 0.01),  # in most samples no true positive
        pytest.param(Values([0.99, 0.01], [0.4, 0.6]), 50, 2000, 0.01, marks=pytest.mark.long),
        pytest.param(Values([0.9991, 0.0009], [0.4, 0.6]), 1000, 5000, 0.001, marks=pytest.mark.long),
        pytest.param(on_a_grid(5.0, 0.5), 500, 500, 0.01, marks=pytest.mark.long),
        pytest.param(on_a_grid(2.5, 1.5), 1000, 1000, 0.01, marks=pytest.mark.slow),
    ],
)
def test_the_interval_of_the_tpr_covers_whatever_is_tied(scores, p, q, level):
    covered = coverage(scores, lambda a, b: tpr_at_fpr(a, b, level), scores.tpr(level), p, q, 400)
    assert covered > 0.95 - errors_at_95(400)


def at_the_threshold_found(positives, negatives) -> Metric:
    """Clopper-Pearson as if the threshold had been fixed beforehand."""
    found = tpr_at_fpr(positives, negatives, 0.01)
    low, high = clopper_pearson(int(found.detail["tp"] or 0), len(positives))
    return Metric(value=found.value, low=low, high=high, n=found.n, better="lower")


@pytest.mark.long
def test_an_interval_that_takes_the_threshold_for_known_is_told_from_one_that_covers():
    scores = Values([0.99, 0.01], [0.95, 0.05])
    assert coverage(scores, at_the_threshold_found, scores.tpr(0.01), 500, 500, 400) < 0.8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("p", "q", "level"),
    [
        *((p, q, 0.01) for p, q in ((100, 100), (200, 450), (500, 500), (50, 2000), (5000, 5000))),
        *((p, q, 0.001) for p, q in ((1000, 1000), (5000, 5000), (500, 20_000))),
    ],
)
def test_the_interval_of_the_tpr_covers_in_every_case(p, q, level):
    for scores in [Normal(0.0), Normal(2.5), Normal(5.0), *tied(level)]:
        covered = coverage(scores, lambda a, b: tpr_at_fpr(a, b, level), scores.tpr(level), p, q, 250)
        assert covered > 0.95 - errors_at_95(250)


def rare(share: float) -> list[Values]:
    """Scores that are tied, or apart, but for a few."""
    return [
        Values([1.0, 0.0], [1 - share, share]),
        Values([1 - share, share], [1 - share, share]),
        Values([1 - share, share], [0.0, 1.0]),
        Values([0.0, 1.0, 0.0], [share, 0.0, 1 - share]),
        Values([1 - share, share], [share, 1 - share]),
    ]


@pytest.mark.long
@subtests(
    ("scores", "p", "q"),
    [
        (Values([0.995, 0.005], [0.995, 0.005]), 50, 1000),  # in most samples no member is above the rest
        (Values([0.98, 0.02], [0.98, 0.02]), 1000, 50),
        (Values([0.98, 0.02], [0.02, 0.98]), 20, 200),
        (on_a_grid(1.0, 6.0), 20, 200),
        (Values([0.9995, 0.0005], [0.0005, 0.9995]), 100, 100),
    ],
)
def test_the_interval_of_the_auc_covers_where_few_scores_are_not_tied(scores, p, q):
    assert coverage(scores, auc, scores.auc(), p, q, 400) > 0.95 - errors_at_95(400)


@pytest.mark.slow
@pytest.mark.parametrize(("p", "q"), [(5, 5), (20, 20), (20, 200), (100, 100), (50, 1000), (1000, 50), (2000, 2000)])
def test_the_interval_of_the_auc_covers_in_every_case(p, q):
    cases = [Normal(0.0), Normal(1.0), Normal(3.0), *(on_a_grid(mu, g) for mu in (0, 1, 3) for g in (0.5, 2, 6))]
    for scores in [*cases, *(one for share in (0.0005, 0.002, 0.005, 0.02) for one in rare(share))]:
        assert coverage(scores, auc, scores.auc(), p, q, 500) > 0.95 - errors_at_95(500)


def test_scores_of_1400_examples_take_no_time():
    values, members = np.random.default_rng(0).standard_normal(1400), np.arange(1400) < 700
    scored(values, members)
    began = time.process_time()
    scored(values, members)
    assert time.process_time() - began < 0.3


def advantage_of(tp: int, p: int, fp: int, q: int) -> Metric:
    """Of so many members and non-members above a threshold that two others chose."""
    held_out = np.concatenate([np.arange(p) < tp, np.arange(q) < fp]).astype(float)
    scores = np.concatenate([[1.0, 0.0], held_out])  # the first two choose the threshold 0.5
    members = np.concatenate([[True, False], np.arange(p + q) < p])
    return split_advantage(scores, members, np.arange(2 + p + q) < 2)["advantage"]


def test_the_interval_of_the_advantage_is_newcombes_with_exact_limits():
    # 56 of 70 against 48 of 80, example (a) of Newcombe 1998; the limits of each are scipy's.
    found, rates = advantage_of(56, 70, 48, 80), (56 / 70, 48 / 80)
    (low_tp, high_tp), (low_fp, high_fp) = (binomtest(k, n).proportion_ci() for k, n in ((56, 70), (48, 80)))
    assert found.value == pytest.approx(rates[0] - rates[1])
    assert found.low == pytest.approx(0.2 - math.hypot(rates[0] - low_tp, high_fp - rates[1]))
    assert found.high == pytest.approx(0.2 + math.hypot(high_tp - rates[0], rates[1] - low_fp))


def test_the_interval_of_the_advantage_covers_whatever_the_rates():
    """By the probability of every outcome; with Wilson's limits it is 0.86 where rates are near 0 and 1."""
    n = 20
    ends = np.array([[interval(advantage_of(tp, n, fp, n))[::2] for fp in range(n + 1)] for tp in range(n + 1)])
    counts = np.arange(n + 1)
    for tpr in (0.0, 0.0025, 0.01, 0.05, 0.3, 0.5, 0.98, 0.995, 1.0):
        for fpr in (0.0, 0.0025, 0.01, 0.05, 0.5, 0.995, 1.0):
            held = (ends[..., 0] - 1e-12 <= tpr - fpr) & (tpr - fpr <= ends[..., 1] + 1e-12)
            assert binom.pmf(counts, n, tpr) @ held @ binom.pmf(counts, n, fpr) > 0.93


@pytest.mark.long
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


def test_the_same_scores_give_the_same_metrics_in_any_order():
    values, members = np.random.default_rng(3).standard_normal(600), np.arange(600) < 300
    again = score_membership(
        MembershipScores(ids=torch.arange(600).flip(0), scores=torch.tensor(values).flip(0), exact=False),
        torch.tensor(members).flip(0),
    )
    assert scored(values, members) == again


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


@pytest.mark.long
def test_scores_that_say_nothing_imply_a_positive_epsilon_as_seldom_as_stated():
    # Both rates at their 97.5 % ends: at most 5 % of null runs, whatever the threshold chosen on the other half.
    positive = [implied_value(*gaussian(150, 150, 0.0, seed), delta=0.0) > 0 for seed in range(1000)]
    assert sum(positive) < 50 + 6 * math.sqrt(50)


def test_a_gaussian_mechanism_implies_no_more_than_its_epsilon_and_not_far_less():
    mu, delta = 2.0, 1e-5
    values = [implied_value(*gaussian(2000, 2000, mu, seed), delta) for seed in range(20)]
    assert max(values) < gaussian_epsilon(mu, delta)
    assert min(values) > 2.0


@pytest.mark.long
@subtests(
    "share",  # of examples that answer at all
    [1.0, 0.3, 0.02],
)
def test_answers_of_one_bit_imply_more_than_their_epsilon_as_seldom_as_stated(share):
    """Randomised response at epsilon 0.5, or silence: two or three values, so nearly everything is tied."""
    epsilon = 0.5
    lie = 1 / (1 + math.exp(epsilon))
    scores = Values([share * (1 - lie), 1 - share, share * lie], [share * lie, 1 - share, share * (1 - lie)])
    generator, beyond = np.random.default_rng(0), 0
    for _ in range(500):
        beyond += implied_value(*scores.draw(generator, 300, 300), delta=0.0) > epsilon
    assert beyond < 500 * 0.05 + 5 * math.sqrt(500 * 0.05)


def test_implied_epsilon_needs_both_kinds_in_both_halves():
    assert implied(np.array([1.0]), np.array([0.0])).value is None


def test_it_is_among_the_metrics_only_where_there_is_a_claim():
    values, members = np.arange(40.0), np.arange(40) % 2 == 0
    assert "implied_epsilon" not in scored(values, members)
    assert "implied_epsilon" in scored(values, members, delta=1e-5)


def test_each_number_has_those_of_both_halves_beside_it():
    draw = torch.Generator().manual_seed(0)
    members = torch.arange(1200) % 2 == 0
    scores = torch.randn(1200, generator=draw, dtype=torch.float64) + members.double()
    ids = torch.randperm(5000, generator=draw)[:1200]
    found = score_membership(MembershipScores(ids=ids, scores=scores, exact=True), members, delta=1e-5)
    half = calibration_half(ids.numpy())
    for name, where in (("calibration", half), ("report", ~half)):
        part = MembershipScores(ids=ids[where], scores=scores[where], exact=True)
        alone = score_membership(part, members[torch.from_numpy(where)])
        for metric in ("auc", "tpr_at_1pct_fpr"):
            assert found[metric].detail[f"{name}_value"] == pytest.approx(alone[metric].value)
    assert found["auc"].detail["report_n"] == int((~half).sum())
    # 0.1 % takes 1,000 non-members, which no half has.
    assert "report_value" not in found["tpr_at_0.1pct_fpr"].detail
    # Thresholds of these were chosen on the calibration half already, and their numbers are of the other.
    for metric in ("advantage", "balanced_accuracy", "implied_epsilon"):
        assert found[metric].detail["report_value"] == found[metric].value
        assert found[metric].detail["calibration_value"] != found[metric].value


def test_the_detectable_auc_is_found_in_four_runs_of_five():
    detail = auc(*gaussian(60, 90, 0.0, 0)).detail
    deviation = math.sqrt((60 + 90 + 1) / (12 * 60 * 90))
    draws = np.random.default_rng(0).standard_normal((2000, 150))
    values = mannwhitneyu(draws[:, :60], draws[:, 60:], axis=1).statistic / (60 * 90)
    assert np.std(values) == pytest.approx(deviation, rel=0.08)
    assert detail["detectable"] == pytest.approx(0.5 + (norm.ppf(0.975) + norm.ppf(0.8)) * np.std(values), abs=0.011)
