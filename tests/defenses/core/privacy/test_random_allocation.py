"""Random allocation: divergences against integration, and epsilon between bounds of others."""

import math

import numpy as np
import pytest
from scipy import integrate, stats

from leakbench.defenses.core.privacy.accounting import epsilon, gaussian_epsilon
from leakbench.defenses.core.privacy.events import Gaussian
from leakbench.defenses.core.privacy.random_allocation import divergences, epoch, ratios

from ....parameters import subtests


def of_two_steps(sigma, threshold, removed):
    """The hockey stick divergence of an epoch of two steps: a double integral over both outputs."""
    # For every first output, the second from where the integrand changes sign, in closed form.
    density = stats.norm(scale=sigma)

    def inner(first):
        y = math.exp(first / sigma**2 - 0.5 / sigma**2)
        wanted = 2 * math.exp(threshold if removed else -threshold) - y  # of the second step's ratio, at the edge
        edge = sigma**2 * math.log(wanted) + 0.5 if wanted > 0 else -math.inf
        above = 0.5 * (y * density.sf(edge) + density.sf(edge - 1)), density.sf(edge)
        below = 0.5 * (y * density.cdf(edge) + density.cdf(edge - 1)), density.cdf(edge)
        return above[0] - math.exp(threshold) * above[1] if removed else below[1] - math.exp(threshold) * below[0]

    def gaussian(x):
        return math.exp(-0.5 * (x / sigma) ** 2) / (sigma * math.sqrt(2 * math.pi))

    found, _ = integrate.quad(lambda x: gaussian(x) * inner(x), -12 * sigma, 12 * sigma + 1, limit=400, epsabs=1e-13)
    return found


@pytest.mark.long
@subtests("removed", [True, False])
@subtests("sigma", [0.8, 5.0])
def test_of_two_steps_it_is_the_integral(sigma, removed):
    interval = 1e-3
    low, found = divergences(sigma, 2, interval, removed=removed)
    for threshold in (-0.3, 0.0, 0.2, 1.0):
        at = round(threshold / interval) - low
        if not 0 <= at < len(found):
            continue
        exact = of_two_steps(sigma, threshold, removed)
        # Above it, as a spread is, and hardly; the less noise there is, the wider is the grid.
        assert -1e-12 <= found[at] - exact <= (5e-2 if sigma < 1 else 1e-4) * exact + 1e-9


def test_of_one_step_it_is_a_gaussian_mechanism():
    sigma, delta = 2.0, 1e-5
    interval = 1e-4
    low, found = divergences(sigma, 1, interval, removed=True)
    exact = gaussian_epsilon(sigma, delta)
    above = low + np.flatnonzero(found <= delta)[0]
    assert exact - interval <= above * interval <= exact * 1.001


@pytest.mark.parametrize("steps", [2, 7, 100])
def test_both_hypotheses_are_distributions_and_the_ratio_is_their_ratio(steps):
    absent, present = (epoch(1.2, steps, present=p) for p in (False, True))
    for _, masses, lost in (absent, present):
        assert masses.sum() == pytest.approx(1.0, abs=1e-9)
        assert 0 <= lost < 1e-10
    values, masses, _ = absent
    assert (values * masses).sum() == pytest.approx(1.0, abs=1e-9)
    # The mean of the ratio where the record is present is 1 + the ratio's variance where it is not.
    variance = math.expm1(1.2**-2) / steps
    values, masses, _ = present
    assert (values * masses).sum() == pytest.approx(1 + variance, rel=1e-4)


def test_a_step_is_spread_with_its_mean():
    masses, width, lacking = ratios(0.9, 50)
    grid = np.arange(len(masses)) * width
    assert masses.sum() == pytest.approx(1.0, abs=1e-12)
    assert (masses * grid).sum() + lacking == pytest.approx(1.0, abs=1e-9)
    assert (masses * grid**2).sum() >= math.exp(0.9**-2) * (1 - 1e-9)


# Epsilon's lower and upper bound by PLD_accounting 2.0, the program of Feldman & Shenfeld (2026).
THEIRS = {(1.0, 100, 1): (0.60851, 0.63565), (1.0, 100, 10): (1.66441, 1.73982), (0.8, 100, 10): (2.86722, 2.95045)}


@pytest.mark.parametrize("setting", THEIRS)
def test_it_lies_between_the_bounds_of_its_authors(setting):
    sigma, steps, epochs = setting
    found = epsilon([Gaussian(1 / steps, sigma, epochs, allocated=True)], 1e-5)
    low, high = THEIRS[setting]
    assert low < found.value < high
    assert "random allocation by leakbench; RDP beside it without amplification" in found.accountant
    # RDP knows no amplification here, and says what one Gaussian an epoch costs.
    assert found.rdp >= gaussian_epsilon(sigma / math.sqrt(epochs), 1e-5) * 0.99


@pytest.mark.parametrize(("sigma", "steps", "epochs"), [(1.54, 100, 40), (10.0, 40, 80), (5.0, 2, 10)])
def test_it_costs_no_more_than_poisson_sampling_and_no_less_than_the_limit(sigma, steps, epochs):
    found = epsilon([Gaussian(1 / steps, sigma, epochs, allocated=True)], 1e-5).value
    assert found < epsilon([Gaussian(1 / steps, sigma, epochs * steps)], 1e-5).value
    # With ever more steps an epoch tends to a Gaussian of the same variance of its ratio, or, to first order, more.
    assert found > gaussian_epsilon(sigma * math.sqrt(steps / epochs), 1e-5)


@pytest.mark.long
def test_hardly_any_noise_is_never_worse_than_no_amplification():
    for sigma in (0.05, 0.3):
        found = epsilon([Gaussian(0.1, sigma, 3, allocated=True)], 1e-5).value
        assert found <= gaussian_epsilon(sigma / math.sqrt(3), 1e-5) * (1 + 1e-9)
