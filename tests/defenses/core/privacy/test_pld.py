"""Privacy loss distributions against dp-accounting's own accountant, mechanism by mechanism and composed."""

import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import pld_pmf, privacy_loss_mechanism
from dp_accounting.pld.pld_privacy_accountant import PLDAccountant
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType
from hypothesis import given, settings
from hypothesis import strategies as st

from leakbench.defenses.core.privacy.accounting import DISCRETISATION
from leakbench.defenses.core.privacy.accounting import epsilon as accounted
from leakbench.defenses.core.privacy.events import Gaussian
from leakbench.defenses.core.privacy.pld import Losses, _dots, _SampledGaussian, connected
from leakbench.defenses.core.privacy.pld import epsilon as of_events

from ....parameters import subtests


def epsilon(events, delta, interval):
    return of_events([Gaussian(*event) for event in events], delta, interval)


def reference(events, interval, *deltas):
    accountant = PLDAccountant(value_discretization_interval=interval)
    for rate, sigma, count in events:
        event = dp_accounting.GaussianDpEvent(sigma)
        accountant.compose(dp_accounting.PoissonSampledDpEvent(rate, event) if rate < 1 else event, count)
    return [float(accountant.get_epsilon(delta)) for delta in deltas]


# Settings of papers, and the ends: tiny rates, hardly any noise, much of it, one step, several events, none sampled.
EVENTS = {
    "papers": [(0.02, 1.54, 2000)],
    "much noise": [(0.025, 14.0, 3200)],
    "little noise": [(0.01, 0.45, 50)],
    "rare": [(1e-4, 0.8, 5000)],
    "nearly everybody": [(0.97, 3.0, 40)],
    "one step": [(0.05, 1.1, 1)],
    "not sampled": [(1.0, 6.0, 1)],
    "after a release of its own": [(1.0, 8.0, 1), (0.02, 1.1, 300)],
    "two kinds of steps": [(0.02, 1.1, 300), (0.05, 2.0, 100)],
}


@subtests("name", EVENTS)
def test_epsilon_is_dp_accountings(name):
    slack = {1e-3: 1e-6, 1e-5: 2e-6, 1e-9: 2e-3}
    for (delta, within), expected in zip(slack.items(), reference(EVENTS[name], 1e-3, *slack), strict=True):
        assert epsilon(EVENTS[name], delta, 1e-3) == pytest.approx(expected, rel=within, abs=1e-9)


@pytest.mark.parametrize(
    ("event", "interval"),
    [
        ((0.5, 0.01, 1), 1e-1),
        pytest.param((0.01, 0.02, 1), 1e-2, marks=pytest.mark.slow),
        ((0.5, 0.3, 400), 0.05),
        ((0.5, 0.2, 300), 0.05),
    ],
)
def test_an_epsilon_at_which_e_to_the_minus_loss_vanishes_is_not_lost(event, interval):
    """A loss of 745 nats and more is e^-loss = 0 in float64; what is left of the grid has a small epsilon."""
    assert epsilon([event], 1e-5, interval) == pytest.approx(*reference([event], interval, 1e-5), rel=1e-3)


def test_hardly_any_noise_proves_a_huge_epsilon_and_nothing_breaks():
    for sigma, rate, steps in ((1e-6, 0.5, 1), (1e-4, 0.1, 10), (0.02, 0.01, 1), (0.2, 0.5, 300)):
        found = accounted([Gaussian(rate, sigma, steps)], 1e-5)
        assert 700 < found.value <= found.rdp


def without_transforms(one: Losses, count: int) -> Losses:
    """A power by sums of products, whose rounding is relative to each mass."""
    found, square = None, one
    while count:
        if count & 1:
            found = square if found is None else multiplied(found, square)
        count >>= 1
        if count:
            square = multiplied(square, square)
    assert found is not None
    return found


def multiplied(a: Losses, b: Losses) -> Losses:
    masses = np.convolve(a.masses, b.masses)
    there = np.nonzero(masses > 1e-25)[0]
    infinite = a.infinite + b.infinite - a.infinite * b.infinite
    return Losses(a.first + b.first + int(there[0]), masses[there[0] : there[-1] + 1], infinite, a.interval)


@pytest.mark.parametrize("event", [(1e-4, 0.8, 5000), (0.02, 1.54, 2000)])
def test_at_a_tiny_delta_it_is_never_below_what_exact_sums_give(event):
    """Where a transform's rounding is a part of delta; dp-accounting's is below it by 3e-5 in one of these cases."""
    rate, sigma, count = event
    for adjacency in (AdjacencyType.ADD, AdjacencyType.REMOVE):
        one = _dots(sigma, rate, adjacency, 1e-3)
        exact, ours = without_transforms(one, count), one.power(count)
        for delta in (1e-7, 1e-9):
            assert 0 <= ours.epsilon(delta) / exact.epsilon(delta) - 1 < 2e-3


@pytest.mark.parametrize("event", [(0.02, 1.54, 2000), pytest.param((0.004, 0.8, 4688), marks=pytest.mark.slow)])
def test_it_is_that_on_the_grid_that_claims_are_made_on(event):
    (expected,) = reference([event], DISCRETISATION, 1e-5)
    assert epsilon([event], 1e-5, DISCRETISATION) == pytest.approx(expected, rel=5e-7)


@settings(max_examples=15)
@given(
    rate=st.floats(1e-5, 0.999),
    sigma=st.floats(0.35, 30.0),
    adjacency=st.sampled_from([AdjacencyType.ADD, AdjacencyType.REMOVE]),
)
def test_divergences_of_a_grid_are_those_that_dp_accounting_computes_one_by_one(rate, sigma, adjacency):
    arguments = {"sampling_prob": rate, "adjacency_type": adjacency}
    ours = _SampledGaussian(sigma, **arguments)
    theirs = privacy_loss_mechanism.GaussianPrivacyLoss(sigma, **arguments)
    bounds = theirs.connect_dots_bounds()
    # Past both ends too, where divergences are 0 or 1 - e^epsilon.
    low, high = bounds.epsilon_lower, bounds.epsilon_upper
    assert low is not None and high is not None
    grid = np.linspace(low - 1, high + 1, 50)
    expected = [theirs.get_delta_for_epsilon(float(e)) for e in grid]
    np.testing.assert_allclose(ours.get_delta_for_epsilon(grid), expected, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("adjacency", [AdjacencyType.ADD, AdjacencyType.REMOVE])
def test_the_dots_are_connected_as_dp_accounting_connects_them(adjacency):
    grid = np.arange(-900, 3000)
    deltas = _SampledGaussian(0.9, sampling_prob=0.1, adjacency_type=adjacency).get_delta_for_epsilon(grid * 1e-3)
    theirs = pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(1e-3, -900, 2999, deltas)
    ours = connected(-900, deltas, 1e-3)
    assert theirs.get_delta_for_epsilon([-0.2, 0.0, 0.3, 1.5]) == pytest.approx(
        [
            ours.infinite + float(np.clip(ours.masses * -np.expm1(e - grid * 1e-3), 0, None).sum())
            for e in (-0.2, 0.0, 0.3, 1.5)
        ],
        abs=1e-13,
    )
    assert ours.masses.sum() + ours.infinite == pytest.approx(1.0) and ours.masses.min() >= 0
    alone = connected(3, np.array([0.25]), 0.5)
    assert (alone.first, alone.masses.tolist(), alone.infinite) == (3, [0.75], 0.25)


def test_epsilon_of_a_distribution_by_hand():
    """Losses -1, 0, 1 and 2 with masses 0.1, 0.5, 0.3 and 0.1: delta(e) is a sum over what lies above e."""
    losses = Losses(-1, np.array([0.1, 0.5, 0.3, 0.1]), 0.0, 1.0)
    for wanted in (0.2, 0.7, 1.3, 1.9):
        above = [(loss, mass) for loss, mass in ((0, 0.5), (1, 0.3), (2, 0.1)) if loss > wanted]
        delta = sum(mass * (1 - math.exp(wanted - loss)) for loss, mass in above)
        assert losses.epsilon(delta) == pytest.approx(wanted)
    assert losses.epsilon(0.99) == 0.0
    assert Losses(0, np.array([0.9]), 0.1, 1.0).epsilon(0.05) == math.inf


def test_a_power_is_as_many_compositions_and_what_is_cut_off_counts_as_infinite():
    one = Losses(-2, np.array([0.2, 0.1, 0.4, 0.2, 0.0999]), 1e-4, 0.5)
    several = one
    for _ in range(4):
        several = several.composed(one)
    power = one.power(5)
    assert power.infinite == pytest.approx(several.infinite, rel=1e-6)
    first, last = several.first, several.first + len(several.masses)
    assert first <= power.first and power.first + len(power.masses) <= last
    inside = several.masses[power.first - first :][: len(power.masses)]
    np.testing.assert_allclose(power.masses, inside, atol=1e-15)
    assert several.epsilon(0.01) == pytest.approx(power.epsilon(0.01))
