"""Epsilons against published figures, other accountants, the exact Gaussian, and a privacy loss computed by hand."""

import math
import warnings
from typing import cast

import mpmath
import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import privacy_loss_distribution
from dp_accounting.rdp import RdpAccountant
from dp_accounting.rdp.rdp_privacy_accountant import DEFAULT_RDP_ORDERS, compute_epsilon
from scipy import stats
from scipy.optimize import brentq

from leakbench.defenses.core import Block, Everything, StepPlan, Subspace, clip
from leakbench.defenses.core.privacy.accounting import (
    DISCRETISATION,
    epsilon,
    gaussian_epsilon,
    pld_epsilon,
    rdp_epsilon,
)
from leakbench.defenses.core.privacy.events import Gaussian, merged

from ....parameters import subtests

DELTA = 1e-5
# rate, noise multiplier, steps, RDP, PLD: minima over all real orders and converged grids.
PUBLISHED = [
    (0.02, 1.54, 2000, 3.003, 2.75),
    (0.025, 10.0, 3200, 0.549, 0.500),
    (256 / 60000, 0.803, 20 * 235, 3.00, 2.57),
]
PUBLISHED_RDP = [
    (0.02, 1.54, 2000, 3.003),
    (0.02, 1.10, 4000, 7.503),
    (0.02, 1.81, 3000, 2.996),
    (0.02, 1.18, 5000, 7.528),
    (4096 / 50000, 10.0, 875, 0.99),
]
PARTITIONS = [(1.54, 40, 25.3), (10.0, 80, 3.85), (0.803, 20, 38.5)]


def exact(sigma, delta=DELTA):
    """Epsilon of one Gaussian in closed form (Balle & Wang, ICML 2018)."""

    def excess(e):
        left = stats.norm.cdf(1 / (2 * sigma) - e * sigma)
        return left - math.exp(e) * stats.norm.cdf(-1 / (2 * sigma) - e * sigma) - delta

    return cast(float, brentq(excess, 0, 500))


@pytest.mark.parametrize(("rate", "sigma", "steps", "by_rdp", "by_pld"), PUBLISHED)
def test_poisson_figures_are_reproduced(rate, sigma, steps, by_rdp, by_pld):
    found = epsilon([Gaussian(rate, sigma, steps)], DELTA)
    assert by_rdp - 0.005 <= found.rdp <= by_rdp * 1.005 + 0.005
    assert by_pld - 0.005 <= found.value <= by_pld + 0.006  # pessimistic, so on the upper side only
    assert found.accountant.startswith("PLD (dp-accounting")
    assert found.accountant.endswith("pessimistic, discretisation 0.0001)")


@subtests(("rate", "sigma", "steps", "expected"), PUBLISHED_RDP)
def test_rdp_is_the_minimum_over_real_orders_or_a_little_above(rate, sigma, steps, expected):
    # A fixed list of orders prints up to half a percent more, never less.
    found = rdp_epsilon([Gaussian(rate, sigma, steps)], DELTA)
    assert expected - 0.005 <= found <= expected * 1.005 + 0.005


@pytest.mark.long
def test_rdp_is_the_least_of_all_orders_though_few_are_looked_at():
    coins = np.random.default_rng(0)
    for _ in range(12):
        drawn = 10 ** coins.uniform([-4, -1.2, 0], [0, 2, 5], size=(coins.integers(1, 4), 3))
        events = [Gaussian(rate, sigma, int(n)) for rate, sigma, n in drawn.tolist()]
        delta = 10 ** coins.uniform(-12, 0)
        accountant = RdpAccountant()
        for event in events:
            sampled = PoissonSampledDpEvent(event.sample_rate, GaussianDpEvent(event.noise_multiplier))
            accountant.compose(sampled, event.count)
        # What is added is for the digits that floats lose.
        lost = 1e-12 * sum(event.count for event in events)
        least, _ = compute_epsilon(DEFAULT_RDP_ORDERS, (accountant.rdp + lost).tolist(), delta)
        assert rdp_epsilon(events, delta) == pytest.approx(least, rel=1e-12)


@pytest.mark.parametrize(("sigma", "epochs", "expected"), PARTITIONS)
def test_an_epoch_of_fixed_batches_is_one_gaussian(sigma, epochs, expected):
    found = epsilon([Gaussian(1.0, sigma, epochs)], DELTA).value
    assert found == pytest.approx(expected, rel=3e-3)
    assert found == pytest.approx(exact(sigma / math.sqrt(epochs)), rel=1e-3)


@pytest.mark.parametrize("sigma", [0.5, 1.0, 4.0, 50.0])
def test_without_sampling_it_is_the_closed_form_from_above(sigma):
    found = epsilon([Gaussian(1.0, sigma, 1)], DELTA).value
    assert exact(sigma) <= found <= exact(sigma) + 2 * DISCRETISATION


@pytest.mark.peers
def test_opacus_agrees():
    accountants = pytest.importorskip("opacus.accountants", reason="the second opinion needs leakbench[engines]")
    for rate, sigma, steps, _, _ in PUBLISHED:
        ours = epsilon([Gaussian(rate, sigma, steps)], DELTA)
        by_rdp, by_prv = accountants.RDPAccountant(), accountants.PRVAccountant()
        by_rdp.history = by_prv.history = [(sigma, rate, steps)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Opacus says when its best order is at the end of its list
            assert ours.rdp == pytest.approx(by_rdp.get_epsilon(delta=DELTA), rel=0.01)
            # Its PRV prints estimate + 0.01, an upper bound.
            assert by_prv.get_epsilon(delta=DELTA) - 0.02 <= ours.value <= by_prv.get_epsilon(delta=DELTA) + 0.005


def test_events_without_sampling_merge_exactly_and_equal_ones_are_counted():
    events = [Gaussian(1.0, 2.0, 3), Gaussian(0.1, 1.0, 5), Gaussian(1.0, 1.0, 1), Gaussian(0.1, 1.0, 7)]
    assert merged(events) == (Gaussian(1.0, (3 / 4 + 1) ** -0.5, 1), Gaussian(0.1, 1.0, 12))
    assert epsilon(events, DELTA) == epsilon(events[::-1], DELTA)


def test_more_steps_cost_more_and_more_noise_costs_less():
    one, twice = (epsilon([Gaussian(0.1, 1.0, n)], DELTA).value for n in (50, 100))
    quieter = epsilon([Gaussian(0.1, 1.5, 50)], DELTA).value
    assert quieter < one < twice < 2 * one


def test_nothing_released_costs_nothing():
    assert epsilon([], DELTA).value == 0.0
    assert epsilon([Gaussian(0.1, 1.0, 0)], DELTA).accountant == "nothing was released"


@subtests("delta", [0.0, 1.0, -1e-5, float("nan")])
def test_a_delta_that_is_no_probability_is_refused(delta):
    with pytest.raises(ValueError, match=r"delta must be in \(0, 1\), got"):
        epsilon([Gaussian(0.1, 1.0, 1)], delta)


def test_the_claim_is_never_above_either_accountant():
    for event in (Gaussian(0.001, 0.6, 3), Gaussian(1e-5, 20.0, 10), Gaussian(0.02, 1.54, 200)):
        found = epsilon([event], DELTA)
        assert found.value <= found.rdp
        assert found.value == min(found.rdp, pld_epsilon([event], DELTA))


def test_where_the_grid_of_pld_is_too_coarse_rdp_is_claimed_by_name():
    event, delta = [Gaussian(1e-4, 10.0, 10_000)], 1e-8
    found = epsilon(event, delta)
    assert found.value == found.rdp == rdp_epsilon(event, delta) < pld_epsilon(event, delta)
    assert found.accountant.startswith("RDP (dp-accounting")
    assert found.accountant.endswith("below PLD's pessimistic estimate)")


def test_beyond_the_time_limit_rdp_stands_in_by_name():
    slow = [Gaussian(0.1, 1.0 + 0.1 * i, 1) for i in range(30)]
    found = epsilon(slow, DELTA, time_limit=0.01)
    assert found.value == found.rdp == rdp_epsilon(slow, DELTA)
    assert found.accountant.startswith("RDP (dp-accounting")
    assert found.accountant.endswith("PLD took longer than 0.01 s)")


@pytest.mark.slow
def test_within_the_time_limit_the_other_process_computes_the_same():
    many = [Gaussian(0.1, 1.0 + 0.1 * i, 1) for i in range(30)]  # or it would not have been another process
    found = epsilon(many, DELTA)
    # Up to the order of a sum: events are composed as they are kept, and not as they are given.
    assert found.value == pytest.approx(pld_epsilon(many, DELTA), rel=1e-8) and found.value < found.rdp


@subtests("sigma", [1e-4, 0.01, 0.3, 1.0, 22.0, 1e4, 1e8])
@subtests("delta", [1e-12, 1e-5, 0.1])
def test_one_gaussian_without_sampling_has_its_closed_form_rounded_up_and_at_once(sigma, delta):
    found = epsilon([Gaussian(1.0, sigma, 1)], delta)
    assert "closed form" in found.accountant or found.value == 0

    def spent(at):
        """delta(epsilon), to 60 digits."""
        with mpmath.workdps(60):
            s, e = mpmath.mpf(sigma), mpmath.mpf(at)
            half = 1 / (2 * s)
            return mpmath.ncdf(half - e * s) - mpmath.exp(e) * mpmath.ncdf(-half - e * s)

    assert spent(found.value) <= delta
    if found.value > 1e-8:
        assert spent(found.value * (1 - 3e-6) - 3e-9) > delta  # no more than it has to be


@pytest.mark.long
@pytest.mark.parametrize(
    ("rate", "sigma", "steps"),
    [
        (0.5, 0.3, 100),
        pytest.param(0.1, 0.5, 1000, marks=pytest.mark.slow),
        pytest.param(0.05, 0.05, 10, marks=pytest.mark.slow),
    ],
)
def test_a_large_epsilon_is_found_on_a_coarser_grid_that_costs_nothing_of_it(rate, sigma, steps):
    event = [Gaussian(rate, sigma, steps)]
    found = epsilon(event, DELTA)
    assert found.accountant.startswith("PLD") and 100 < found.value < found.rdp
    # Both are upper bounds; the finer one need not be the smaller, because more of it is cut off.
    assert found.value == pytest.approx(pld_epsilon(event, DELTA, found.value / 1e6), rel=1e-4)


def test_a_sampled_event_never_costs_more_than_one_that_is_not():
    # The grid of the accountant is coarser than this epsilon.
    found = epsilon([Gaussian(0.999, 2e4, 1)], 1e-10)
    assert found.value <= epsilon([Gaussian(1.0, 2e4, 1)], 1e-10).value
    assert "sampling not counted" in found.accountant


@subtests("event", [(0.1, 0.0, 1), (0.1, math.nan, 1), (0.1, math.inf, 1), (0.0, 1.0, 1), (0.1, 1.0, -1)])
def test_an_event_that_is_none_is_refused(event):
    with pytest.raises(ValueError, match="a Gaussian event must have a positive finite noise multiplier"):
        Gaussian(*event)


# --- the block rule ---------------------------------------------------------------------------------------------


def deltas_of_two_blocks(stds, shifts, rate, epsilons):
    """delta(epsilon) of a subsampled pair of Gaussian blocks, by summing the joint density on a grid."""
    axes = [np.linspace(-9 * s, 9 * s + c, 2401) for s, c in zip(stds, shifts, strict=True)]
    out = [stats.norm.pdf(x, 0, s) for x, s in zip(axes, stds, strict=True)]
    shifted = [stats.norm.pdf(x, c, s) for x, c, s in zip(axes, shifts, stds, strict=True)]
    cell = math.prod(float(x[1] - x[0]) for x in axes)
    without = np.outer(*out)
    with_row = (1 - rate) * without + rate * np.outer(*shifted)
    removed = [float(np.maximum(with_row - math.exp(e) * without, 0).sum() * cell) for e in epsilons]
    added = [float(np.maximum(without - math.exp(e) * with_row, 0).sum() * cell) for e in epsilons]
    return np.maximum(removed, added)


@pytest.mark.long
@pytest.mark.parametrize(("share", "rate"), [(0.3, 1.0), (0.02, 0.1)])
def test_two_blocks_whose_shares_sum_to_one_have_the_privacy_loss_of_one(share, rate):
    sigma, epsilons = 0.9, [0.0, 0.1, 0.5, 1.0, 2.0]
    first = Block(codec=Everything(1), bound=clip(0.5), share=1 - share)
    second = Block(codec=Everything(1), bound=clip(3.0), share=share)
    stds = [block.noise_std(sigma) for block in (first, second)]
    numeric = deltas_of_two_blocks(stds, [0.5, 3.0], rate, epsilons)
    one = privacy_loss_distribution.from_gaussian_mechanism(
        sigma, sampling_prob=rate, value_discretization_interval=1e-4
    )
    stated = np.array([one.get_delta_for_epsilon(e) for e in epsilons])
    np.testing.assert_allclose(numeric, stated, rtol=2e-3, atol=1e-7)


@pytest.mark.long
def test_two_blocks_at_full_noise_each_would_cost_more_than_one():
    # The other way round: the same grid notices blocks whose noise was not raised.
    worse = deltas_of_two_blocks([0.45, 2.7], [0.5, 3.0], 0.1, [0.5])
    one = privacy_loss_distribution.from_gaussian_mechanism(0.9, sampling_prob=0.1)
    assert worse[0] > 1.5 * one.get_delta_for_epsilon(0.5)
    joint = privacy_loss_distribution.from_gaussian_mechanism(0.9 / math.sqrt(2), sampling_prob=0.1)
    assert worse[0] == pytest.approx(joint.get_delta_for_epsilon(0.5), rel=2e-3)


@pytest.mark.parametrize(("per_layer", "trap"), [(False, 1.0), (True, 2.0)])
def test_clipping_every_layer_to_the_full_norm_multiplies_the_sensitivity(per_layer, trap):
    # Four layers, each a block clipped to C. Shares make the trap impossible to fall into: noise that is enough for
    # one layer is not what the plan adds.
    layers = [Block(codec=Everything(3), bound=clip(1.0), share=0.25) for _ in range(4)]
    plan = StepPlan(*layers) if per_layer else StepPlan(Block(codec=Everything(12), bound=clip(1.0)))
    assert [block.noise_std(1.0) for block in plan.blocks] == [trap] * len(plan.blocks)
    assert plan.sensitivity == 1.0


def test_a_global_clip_over_layers_is_one_block():
    # Coefficients of every layer bounded together: sensitivity C, not sqrt(L) C.
    basis = torch.ones(1, 1)
    layered = Subspace((basis, basis, basis, basis), ((0, 1), (1, 2), (2, 3), (3, 4)), 4)
    out = clip(1.0)(layered.encode(torch.full((1, 4), 1e3)))
    assert float(out.norm()) == pytest.approx(1.0, rel=1e-6)


@subtests(
    ("rate", "sigma", "delta"),
    [(1e-12, 1e3, 1e-20), (1e-12, 1e3, 1e-30), (0.01, 1e6, 1e-10), (0.05, 1e6, 1e-10), (0.01, 1e7, 1e-11)],
)
def test_a_step_whose_divergence_float64_does_not_see_is_charged_all_the_same(rate, sigma, delta):
    claimed = epsilon([Gaussian(rate, sigma, 1)], delta).value
    with mpmath.workdps(60):
        # Who is there shows where the likelihood ratio 1 - q + q exp((2 x - 1) / 2 s^2) is above exp(epsilon).
        q, s = mpmath.mpf(rate), mpmath.mpf(sigma)
        edge = s**2 * mpmath.log((mpmath.exp(mpmath.mpf(claimed)) - 1 + q) / q) + mpmath.mpf(1) / 2
        without = mpmath.ncdf(-edge / s)
        spent = (1 - q) * without + q * mpmath.ncdf((1 - edge) / s) - mpmath.exp(mpmath.mpf(claimed)) * without
    assert spent <= delta


@pytest.mark.parametrize("sigma", [3.0, 1e4, 6e8, 1e13])
def test_epsilon_is_zero_where_delta_is_the_total_variation_and_no_sooner(sigma):
    # The library finds 0 on the other side, too, where a root is closer to it than its tolerance.
    with mpmath.workdps(60):
        variation = float(mpmath.erf(1 / (mpmath.sqrt(8) * mpmath.mpf(sigma))))
    for share in (1e-4, 1e-7, 1e-11):
        assert gaussian_epsilon(sigma, variation * (1 - share)) > 0
    assert gaussian_epsilon(sigma, variation * (1 + 1e-9)) == 0
