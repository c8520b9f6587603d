"""Batches of fixed size drawn without replacement: the bound by the library, by hand, and against distinguishers."""

import math
from itertools import pairwise

import dp_accounting
import numpy as np
import pytest
from dp_accounting import rdp
from scipy.special import comb

from leakbench.audit.catalog import methods as catalog
from leakbench.defenses.core import calibrate, fixed, predict
from leakbench.defenses.core.privacy.accounting import _by_rdp, epsilon, gaussian_epsilon, rdp_divergences, rdp_epsilon
from leakbench.defenses.core.privacy.events import Gaussian
from leakbench.defenses.core.privacy.tradeoff import of_events
from leakbench.defenses.dp_sgd import dp_sgd

from ....parameters import subtests

DELTA = 1e-5
CASES = [(0.01, 1.1, 500), (0.1, 3.0, 60), (0.3, 8.0, 20), (0.001, 0.8, 2000), (0.05, 1.5, 1)]


def claimed(rate, sigma, steps):
    return predict(dp_sgd(noise_multiplier=sigma), sampling=fixed(rate), steps=steps).claim(DELTA)


def test_fifty_of_five_thousand_cost_what_dp_accounting_says():
    claim = claimed(0.01, 1.1, 500)
    accountant = rdp.RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE)
    half = dp_accounting.GaussianDpEvent(0.55)  # the distance of two contributions is twice the bound
    accountant.compose(dp_accounting.SampledWithoutReplacementDpEvent(5000, 50, half), 500)
    assert claim.epsilon == pytest.approx(accountant.get_epsilon(DELTA), rel=1e-9)
    assert claim.epsilon == pytest.approx(12.85, abs=0.005)
    assert (claim.relation, claim.sampling) == ("replace_one", "fixed")
    assert "sampled without replacement" in claim.accountant


@subtests(("rate", "sigma", "steps"), CASES)
def test_the_divergence_is_that_of_the_theorem(rate, sigma, steps):
    # Wang, Balle & Kasiviswanathan, AISTATS 2019, Theorem 27, term by term.
    def moment(order):
        return math.exp(order * (order - 1) / (2 * (sigma / 2) ** 2))

    def central(order):
        return math.fsum(comb(order, i, exact=True) * (-1) ** (order - i) * moment(i) for i in range(order + 1))

    for order in (2, 3, 4, 6):
        total = 1.0
        for j in range(2, order + 1):
            mixed = 4 * math.sqrt(central(2 * (j // 2)) * central(2 * ((j + 1) // 2)))
            total += rate**j * comb(order, j, exact=True) * min(mixed, 2 * moment(j))
        found = _by_rdp([Gaussian(rate, sigma / 2, steps, replaced=True)], [order]).rdp[0]
        assert found == pytest.approx(steps * math.log(total) / (order - 1), rel=1e-6)


def renyi(order, present, other, points):
    """Divergence of two densities on a line, from their logarithms."""
    width = math.log(points[1] - points[0])
    return (float(np.logaddexp.reduce(order * present - (order - 1) * other)) + width) / (order - 1)


@pytest.mark.parametrize(("rate", "sigma", "steps"), CASES)
def test_no_pair_of_neighbours_that_is_known_diverges_more(rate, sigma, steps):
    # In units of the bound: what the other records contribute to the batch, and the record and the one in its place.
    points = np.linspace(-60 * sigma - 60, 60 * sigma + 60, 20_001)  # a hundredth of sigma apart

    def log_density(mean):
        return -((points - mean) ** 2) / (2 * sigma**2) - math.log(sigma * math.sqrt(2 * math.pi))

    def drawn(record, rest):
        return np.logaddexp(math.log1p(-rate) + log_density(rest), math.log(rate) + log_density(record))

    for order in (2, 3, 8, 16):
        proved = _by_rdp([Gaussian(rate, sigma / 2, steps, replaced=True)], [order]).rdp[0] / steps
        for rest in (0.0, -1.0, 1.0, 0.3):
            for record, other in ((1.0, -1.0), (-1.0, 1.0), (1.0, 0.0), (0.0, 1.0)):
                assert renyi(order, drawn(record, rest), drawn(other, rest), points) <= proved * (1 + 1e-9)


@pytest.mark.long
@subtests(("rate", "sigma", "steps"), CASES)
def test_epsilon_is_at_least_that_of_the_best_distinguisher_that_is_known(rate, sigma, steps):
    # All other records contribute the opposite of one: whether that is in a batch moves the sum by twice the bound.
    least = epsilon([Gaussian(rate, sigma / 2, steps)], DELTA).value
    claim = claimed(rate, sigma, steps)
    assert least <= claim.epsilon <= gaussian_epsilon(sigma / 2 / math.sqrt(steps), DELTA) * (1 + 1e-9)
    curve, known = claim.trade_off, of_events([Gaussian(rate, sigma / 2, steps)], DELTA)
    for fpr in (1e-4, 1e-2, 0.1, 0.5):
        assert curve.tpr_at(fpr) >= known.tpr_at(fpr) * (1 - 1e-3)
    assert known.delta_at(claim.epsilon) <= claim.delta_at(claim.epsilon) <= 1.1 * DELTA  # of fewer orders


@pytest.mark.long
def test_epsilon_falls_with_noise_and_rises_with_steps_and_rate():
    def found(rate=0.02, sigma=2.0, steps=100):
        return claimed(rate, sigma, steps).epsilon

    for rising in (
        [found(sigma=sigma) for sigma in (60.0, 8.0, 2.0, 0.5, 0.1)],
        [found(steps=steps) for steps in (1, 10, 1000, 5000)],
        [found(rate=rate) for rate in (1e-6, 0.02, 0.5, 1.0)],
    ):
        assert all(one <= other for one, other in pairwise(rising)), rising


def test_a_share_of_one_is_the_gaussian_of_twice_the_bound():
    assert claimed(1.0, 4.0, 1).epsilon == gaussian_epsilon(2.0, DELTA)
    almost = [Gaussian(1 - 1e-9, 2.0, 1, replaced=True)]
    assert epsilon(almost, DELTA).value <= gaussian_epsilon(2.0, DELTA) <= rdp_epsilon(almost, DELTA)


def test_deltas_by_rdp_are_no_less_than_where_the_record_is_there_or_not():
    replaced, poisson = (Gaussian(0.05, 0.9, 40, replaced=flag) for flag in (True, False))
    assert (rdp_divergences([replaced]) >= rdp_divergences([poisson])).all()


@pytest.mark.long
@subtests("name", catalog.central_names())
def test_no_method_costs_less_than_its_noise_under_the_event(name):
    defense = catalog.defense(name, {}, noise_multiplier=None)
    defense = defense if defense.noise_multiplier is not None else defense.with_noise(1.5)
    claim = predict(defense, sampling=fixed(0.1), steps=12).claim(DELTA)
    if claim.reason:
        return
    assert claim.relation == "replace_one"
    assert claim.epsilon >= epsilon([Gaussian(0.1, 0.75, 12, replaced=True)], DELTA).value
    if any("correlated" in words for words in claim.events):
        assert all(event.sample_rate == 1 for event in claim.gaussians or ())


@pytest.mark.long
@pytest.mark.parametrize(
    "wanted",
    [
        {"epsilon": 2.0, "delta": DELTA},
        {"advantage": 0.2},
        pytest.param({"tpr": 0.1, "fpr": 0.01}, marks=pytest.mark.slow),
    ],
)
def test_calibration_finds_less_noise_than_without_amplification(wanted):
    defense, everybody = (calibrate(dp_sgd(), sampling=fixed(rate), steps=50, **wanted) for rate in (0.02, 1.0))
    assert defense.calibrated_multiplier < everybody.calibrated_multiplier / 5
    claim = predict(defense, sampling=fixed(0.02), steps=50).claim(DELTA)
    assert claim.epsilon <= wanted.get("epsilon", math.inf)
    assert claim.advantage <= wanted.get("advantage", 1.0) * (1 + 1e-9)
    assert claim.tpr_at(0.01) <= wanted.get("tpr", 1.0) * (1 + 1e-9)
