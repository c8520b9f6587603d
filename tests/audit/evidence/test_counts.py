"""Lower bounds from the errors of one test: golden values, validity with power, and refusals."""

import math

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from scipy import stats

from leakbench.audit.evidence.claim_bounds import gaussian_epsilon, gaussian_tpr
from leakbench.audit.evidence.counts import (
    Errors,
    bayesian,
    clopper_pearson,
    gaussian,
    gaussian_shift,
    least_misses,
    sampled_gaussian,
)

from ...parameters import subtests


@subtests(
    ("errors", "delta", "epsilon", "shift"),
    [
        ((0, 1000, 0, 1000), 1e-5, 5.6006, 5.3598),
        ((0, 100, 0, 100), 0.0, 3.2813, None),
        ((500, 1000, 5, 1000), 1e-5, 3.6961, 2.1902),
        ((100, 1000, 100, 1000), 0.0, 1.9897, 2.3471),
    ],
)
def test_golden_values_of_the_literature(errors, delta, epsilon, shift):
    counted = Errors(*errors)
    assert clopper_pearson(counted, delta) == pytest.approx(epsilon, abs=5e-5)
    if shift is not None:
        assert gaussian_shift(counted) == pytest.approx(shift, abs=5e-5)


def test_golden_values_of_the_gaussian_family():
    assert gaussian(Errors(0, 1000, 0, 1000), 1e-5) == pytest.approx(36.4895, abs=5e-5)
    assert gaussian(Errors(500, 1000, 5, 1000), 1e-5) == pytest.approx(11.1876, abs=5e-5)
    with pytest.raises(ValueError, match="delta must be in"):
        gaussian(Errors(0, 10, 0, 10), 0.0)


def test_a_test_that_is_worse_than_coins_proves_nothing():
    """A peer took the absolute value of the shift, and found an epsilon of 3.5 to 5.9 where there is none."""
    for bound in (clopper_pearson, gaussian):
        assert bound(Errors(90, 100, 90, 100), 1e-5) == 0 or bound is clopper_pearson
        assert bound(Errors(50, 100, 50, 100), 1e-5) == 0
    assert gaussian_shift(Errors(90, 100, 90, 100)) == 0


def drawn(shift: float, n: int, trials: int, seed: int) -> list[Errors]:
    """Errors of the test at half the shift, in simulated audits."""
    rate = float(stats.norm.sf(shift / 2))
    coins = np.random.default_rng(seed)
    misses, alarms = coins.binomial(n, rate, trials), coins.binomial(n, rate, trials)
    return [Errors(int(a), n, int(b), n) for a, b in zip(misses, alarms, strict=True)]


@subtests("shift", [0.0, 1.0])
@subtests("bound", [clopper_pearson, gaussian])
def test_a_bound_exceeds_the_truth_seldom_and_is_not_idle(shift, bound):
    truth = gaussian_epsilon(shift, 1e-5)
    values = np.array([bound(errors, 1e-5, 0.95) for errors in drawn(shift, 1000, 500, seed=1)])
    # Nominal 5 %; a share above 8.9 % of 500 has a chance below 1e-4 at that rate.
    assert (values > truth).mean() <= 0.089
    if shift:
        assert np.median(values) > (0.6 if bound is gaussian else 0.1) * truth
    if shift and bound is gaussian:
        # With point estimates in the place of upper ends half of the bounds would be too large.
        plugged = [stats.norm.isf(e.alarms / 1000) - stats.norm.ppf(e.misses / 1000) for e in drawn(1.0, 1000, 500, 1)]
        assert (np.array(plugged) > 1.0).mean() > 0.3


@pytest.mark.long
def test_the_curve_of_sampled_gaussians_is_that_of_one_gaussian_where_nothing_is_sampled():
    for alarms in (1e-3, 0.05, 0.4):
        exact = 1 - gaussian_tpr(1.0, alarms)
        assert exact - 2e-3 < least_misses(alarms, 1.0, 1.0, 1) <= exact + 1e-9
    errors = Errors(300, 1000, 300, 1000)
    value = sampled_gaussian(1.0, 1)(errors, 1e-5, 0.95)
    assert 0.99 * gaussian(errors, 1e-5) < value <= gaussian(errors, 1e-5)


@pytest.mark.long
def test_the_bound_for_a_sampled_mechanism_lies_below_its_epsilon_and_above_that_of_no_assumption():
    """Errors at exactly the trade-off curve: of the mechanism itself, the bound has to stay below its epsilon."""
    q, steps, sigma, n = 0.1, 20, 1.0, 100_000
    losses = privacy_loss_distribution.from_gaussian_mechanism(sigma, sampling_prob=q).self_compose(steps)
    truth = losses.get_epsilon_for_delta(1e-5)
    alarms = 0.02
    misses = least_misses(alarms, sigma, q, steps) + 0.01
    errors = Errors(math.ceil(misses * n), n, math.ceil(alarms * n), n)
    value = sampled_gaussian(q, steps)(errors, 1e-5, 0.95)
    assert 0.7 * truth < value <= truth
    assert value > clopper_pearson(errors, 1e-5)


def test_errors_that_no_sampling_of_this_kind_allows_refute_the_assumption_and_prove_no_epsilon():
    with pytest.raises(ValueError, match=r"takes no part with chance 0\.366.*samples otherwise"):
        sampled_gaussian(0.01, 100)(Errors(0, 1000, 0, 1000), 1e-5, 0.95)


def test_the_posterior_quantile_is_that_of_draws():
    errors, delta = Errors(30, 100, 20, 100), 1e-3
    coins = np.random.default_rng(0)
    misses, alarms = coins.beta(30.5, 70.5, 400_000), coins.beta(20.5, 80.5, 400_000)
    sides = [np.log((1 - delta - a) / b) for a, b in ((misses, alarms), (alarms, misses))]
    sides += [np.log((a - delta) / (1 - b)) for a, b in ((misses, alarms), (alarms, misses))]
    drawn_epsilon = np.maximum(0, np.nanmax(sides, axis=0))
    assert bayesian(errors, delta) == pytest.approx(float(np.quantile(drawn_epsilon, 0.05)), abs=5e-3)


@subtests("counts", [(1, 0, 0, 5), (-1, 5, 0, 5), (6, 5, 0, 5), (0, 5, 6, 5)])
def test_counts_that_cannot_be_are_refused(counts):
    with pytest.raises(ValueError, match="must be between 0 and a number of trials"):
        Errors(*counts)


@subtests("level", [0.0, 1.0, math.nan])
def test_a_level_that_is_none_is_refused(level):
    with pytest.raises(ValueError, match="level must be in"):
        clopper_pearson(Errors(0, 5, 0, 5), 0.0, level)
