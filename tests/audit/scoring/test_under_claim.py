"""The most that a claim allows, beside the numbers of a membership attack."""

import numpy as np
import pytest
import torch
from scipy.stats import norm

from attacks.core import MembershipScores
from audit.scoring.membership import score_membership
from audit.scoring.under_claim import beside_claim
from defenses.core import full, poisson, predict
from defenses.dp_sgd import dp_sgd
from leaderboard.metrics import LARGEST_BY, LARGEST_UNDER_CLAIM, ROC_RATES, roc_key


def claimed(sigma, sampling, steps):
    return predict(dp_sgd(clip_norm=1.0, noise_multiplier=sigma), sampling=sampling, steps=steps).claim(1e-5)


def scored(mu, n=4000, seed=1):
    draw = np.random.default_rng(seed)
    values = np.concatenate([draw.normal(mu, size=n), draw.normal(size=n)])
    found = MembershipScores(ids=torch.arange(2 * n), scores=torch.tensor(values), exact=True)
    return score_membership(found, torch.arange(2 * n) < n, delta=1e-5)


def test_the_best_test_of_a_gaussian_reaches_each_bound_and_none_is_below_it():
    claim = claimed(1.0, full(), 1)
    metrics = beside_claim(scored(1.0), claim.trade_off)
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
    detail = beside_claim(scored(0.1), claim.trade_off)["auc"].detail
    assert detail[LARGEST_UNDER_CLAIM] == pytest.approx(0.6759, abs=1e-4)  # by epsilon 2.75 alone it is 0.940
    tprs = [detail[roc_key(fpr)] for fpr in ROC_RATES]
    assert (np.diff(np.array(tprs, dtype=float)) > 0).all() and (np.array(tprs, dtype=float) >= ROC_RATES).all()


def test_without_a_guarantee_everything_is_allowed():
    claim = predict(dp_sgd(clip_norm=1.0, noise_multiplier=0.0), sampling=full(), steps=1).claim(1e-5)
    detail = beside_claim(scored(1.0), claim.trade_off)["auc"].detail
    assert detail[LARGEST_UNDER_CLAIM] == detail[roc_key(ROC_RATES[0])] == 1.0
    assert detail[LARGEST_BY] == "nothing is proved"
