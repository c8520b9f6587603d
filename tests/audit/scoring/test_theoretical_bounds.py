"""The most that a claim allows, beside the numbers of a membership attack."""

import numpy as np
import pytest
import torch
from scipy.stats import norm

from leakbench.attacks.core import MembershipScores
from leakbench.audit.scoring.membership import score_membership
from leakbench.audit.scoring.theoretical_bounds import with_theoretical_bounds
from leakbench.defenses.core import full, poisson, predict
from leakbench.defenses.dp_sgd import dp_sgd
from leakbench.leaderboard.records.details import LARGEST_BY, LARGEST_NOTE, LARGEST_UNDER_CLAIM, ROC_RATES, roc_key


def claimed(sigma, sampling, steps):
    return predict(dp_sgd(clip_norm=1.0, noise_multiplier=sigma), sampling=sampling, steps=steps).claim(1e-5)


def scored(mu, n=4000, seed=1):
    draw = np.random.default_rng(seed)
    values = np.concatenate([draw.normal(mu, size=n), draw.normal(size=n)])
    found = MembershipScores(ids=torch.arange(2 * n), scores=torch.tensor(values), exact=True)
    return score_membership(found, torch.arange(2 * n) < n, delta=1e-5)


def test_the_best_test_of_a_gaussian_reaches_each_bound_and_none_is_below_it():
    claim = claimed(1.0, full(), 1)
    metrics = with_theoretical_bounds(scored(1.0), claim.trade_off)
    exact = {
        "auc": norm.cdf(1 / np.sqrt(2)),
        "advantage": 2 * norm.cdf(0.5) - 1,
        "balanced_accuracy": norm.cdf(0.5),
        "tpr_at_1pct_fpr": norm.sf(norm.isf(0.01) - 1),
        "tpr_at_0.1pct_fpr": norm.sf(norm.isf(0.001) - 1),
    }
    for name, value in exact.items():
        found = metrics[name]
        assert found.detail[LARGEST_UNDER_CLAIM] == pytest.approx(value, rel=1e-6)
        assert found.low <= value <= found.high  # the attack is the best there is
        assert found.detail[LARGEST_BY] == "closed form of the Gaussian"
    assert LARGEST_UNDER_CLAIM not in metrics["implied_epsilon"].detail
    assert metrics["auc"].detail[roc_key(ROC_RATES[-1])] == 1.0


def test_bounds_by_losses_are_far_below_those_of_one_pair_of_epsilon_and_delta():
    claim = claimed(1.54, poisson(0.02), 2000)
    detail = with_theoretical_bounds(scored(0.1), claim.trade_off)["auc"].detail
    assert detail[LARGEST_UNDER_CLAIM] == pytest.approx(0.6759, abs=1e-4)  # by epsilon 2.75 alone it is 0.940
    tprs = [detail[roc_key(fpr)] for fpr in ROC_RATES]
    assert (np.diff(np.array(tprs, dtype=float)) > 0).all() and (np.array(tprs, dtype=float) >= ROC_RATES).all()


def test_without_a_guarantee_everything_is_allowed():
    claim = predict(dp_sgd(clip_norm=1.0, noise_multiplier=0.0), sampling=full(), steps=1).claim(1e-5)
    detail = with_theoretical_bounds(scored(1.0), claim.trade_off)["auc"].detail
    assert detail[LARGEST_UNDER_CLAIM] == detail[roc_key(ROC_RATES[0])] == 1.0
    assert detail[LARGEST_BY] == "nothing is proved"


def test_an_informed_attack_is_above_the_bound_in_one_run_and_not_over_runs_and_says_so():
    claim, mu, n = claimed(1.0, full(), 1), 1.0, 100
    draw = np.random.default_rng(0)
    # All gradients alike: what is left of the release is the noise, and the candidate's own part where it is a member.
    noise = draw.normal(size=(400, 1))
    members = np.broadcast_to(np.arange(2 * n) < n, (400, 2 * n))
    scores = noise + mu * members

    def score(values, truth):
        found = MembershipScores(ids=torch.arange(len(values)), scores=torch.from_numpy(values.copy()), exact=True)
        return with_theoretical_bounds(
            score_membership(found, torch.from_numpy(truth.copy())), claim.trade_off, informed=True
        )

    one, all_runs = score(scores[0], members[0])["auc"], score(scores.ravel(), members.ravel())["auc"]
    largest = one.detail[LARGEST_UNDER_CLAIM]
    assert isinstance(largest, float) and one.value == 1.0 and largest < 0.77
    assert all_runs.value == pytest.approx(largest, abs=0.05)
    assert "refute nothing" in str(one.detail[LARGEST_NOTE])
    assert LARGEST_NOTE not in with_theoretical_bounds(scored(1.0), claim.trade_off)["auc"].detail


def test_a_rank_among_the_non_members_of_one_run_keeps_the_bound_where_the_attack_is_not_informed():
    # One release of a sum, noise shared by all: each candidate is scored by its own direction of the release.
    claim, draw, n, runs = claimed(1.0, full(), 1), np.random.default_rng(1), 40, 1500
    areas = []
    directions = draw.normal(size=(2 * n, 30))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    for _ in range(runs):
        coins = draw.random(2 * n) < 0.5
        scores = directions @ (coins @ directions + draw.normal(size=30))
        above = scores[coins][:, None] > scores[~coins][None]
        areas.append(above.mean())
    assert 0.55 < np.mean(areas) < claim.trade_off.auc
