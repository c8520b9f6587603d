"""What samplers besides Poisson's cost: events of the ledger, epsilon against dp-accounting, and calibration."""

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant

from leakbench.defenses.core import calibrate, cyclic, partition, poisson, predict, random_allocation, truncated_poisson
from leakbench.defenses.core.privacy.events import Gaussian, merged
from leakbench.defenses.core.privacy.ledger import Entry, Ledger, events_of
from leakbench.defenses.dp_sgd import dp_sgd

DELTA = 1e-5


def events(sampling, *entries):
    return merged(list(events_of([Entry(first, steps, sigma, sampling) for first, steps, sigma in entries])))


def test_every_sampler_has_the_events_of_its_randomness():
    # 25 steps of ten an epoch, or of four groups.
    assert events(random_allocation(0.1), (0, 25, 1.5)) == (Gaussian(0.1, 1.5, 3, allocated=True),)
    assert events(cyclic(0.05, groups=4), (0, 25, 1.5)) == (Gaussian(0.2, 1.5, 7),)
    assert events(truncated_poisson(0.1, most=9, examples=60), (0, 25, 1.5)) == (
        Gaussian(0.1, 1.5, 25, most=9, examples=60),
    )
    # Where nothing is left to chance, nothing is amplified.
    for sampling, steps in ((random_allocation(1.0), 3), (cyclic(0.25, groups=4), 12)):
        (event,) = events(sampling, (0, steps, 2.0))
        assert (event.sample_rate, event.count) == (1.0, 1)
        assert event.noise_multiplier == pytest.approx(2.0 / 3**0.5, rel=1e-12)


def test_an_epoch_or_a_cycle_costs_what_its_least_noisy_step_costs():
    assert events(random_allocation(0.5), (0, 1, 3.0), (1, 1, 1.5), (2, 2, 3.0)) == (
        Gaussian(0.5, 1.5, 1, allocated=True),
        Gaussian(0.5, 3.0, 1, allocated=True),
    )
    assert events(cyclic(0.1, groups=2), (0, 3, 3.0), (3, 1, 1.5)) == (Gaussian(0.2, 1.5, 1), Gaussian(0.2, 3.0, 1))


def test_a_cycle_is_a_poisson_sample_of_a_group():
    claim = predict(dp_sgd(noise_multiplier=1.3), sampling=cyclic(0.01, groups=8), steps=400).claim(DELTA)
    assert claim.epsilon == predict(dp_sgd(noise_multiplier=1.3), sampling=poisson(0.08), steps=50).claim(DELTA).epsilon
    assert claim.relation == "zero_out"


@pytest.mark.long
def test_truncation_costs_what_dp_accounting_says():
    sampling = truncated_poisson(0.05, most=70, examples=1000)
    # Much noise, for few losses, over which the library walks in Python.
    claim = predict(dp_sgd(noise_multiplier=3.0), sampling=sampling, steps=60).claim(DELTA)
    # Ten times as coarse as a claim.
    accountant = PLDAccountant(dp_accounting.NeighboringRelation.REPLACE_SPECIAL, 1e-3)
    accountant.compose(dp_accounting.TruncatedSubsampledGaussianDpEvent(1000, 0.05, 70, 3.0), 60)
    assert claim.epsilon == pytest.approx(accountant.get_epsilon(DELTA), rel=2e-3)
    assert claim.epsilon > predict(dp_sgd(noise_multiplier=3.0), sampling=poisson(0.05), steps=60).claim(DELTA).epsilon
    assert "at most 70 of 1000 records" in claim.events[0]


def test_random_allocation_is_a_way_out_of_the_price_of_a_partition():
    found = {
        sampling.kind: Ledger(sampling, [Entry(0, 2000, 1.54, sampling)]).claim(DELTA).epsilon
        for sampling in (random_allocation(0.02), partition(0.02), poisson(0.02))
    }
    assert found["random_allocation"] < found["poisson"] < found["partition"] / 9


@pytest.mark.parametrize(
    "sampling",
    [
        random_allocation(0.05),
        cyclic(0.05, groups=4),
        # dp-accounting walks over its losses in Python here, at every multiplier that is tried.
        pytest.param(truncated_poisson(0.05, most=90, examples=1000), marks=pytest.mark.slow),
    ],
)
def test_calibration_hits_its_target_from_the_private_side(sampling):
    defense = calibrate(dp_sgd(), epsilon=2.0, delta=DELTA, sampling=sampling, steps=20)
    assert 1.98 < predict(defense, sampling=sampling, steps=20).claim(DELTA).epsilon <= 2.0
