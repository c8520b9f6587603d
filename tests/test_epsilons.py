"""Epsilon of every defense at settings of no other test, against dp-accounting's composition of events written by hand.

What a method is charged follows from its plans. Here nobody asks them: one table says what each should cost.
"""

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant

from leakbench.defenses.core import cyclic, partition, poisson, predict

from .parameters import subtests
from .test_every_defense import PROVED, factory

RATE, SIGMA, STEPS, DELTA = 0.031, 1.37, 43, 3e-6
# Beside one Poisson-subsampled Gaussian a step.
SNIP, TRIAL, TRIAL_RATE = 6.5, 4.5, 0.017
OTHERS = {
    "dp_snip": ({"mask_noise_multiplier": SNIP}, [(1.0, SNIP, 1), (RATE, SIGMA, STEPS)]),
    "dpsur": (
        {"validation_rate": TRIAL_RATE, "validation_noise_multiplier": TRIAL},
        [(RATE, SIGMA, STEPS), (TRIAL_RATE, TRIAL, STEPS)],
    ),
}
CORRELATED = ("band_mf", "bisr", "blt", "dp_ftrl")
STEADY = [name for name in PROVED if name not in (*OTHERS, *CORRELATED)]


def composed(events):
    accountant = PLDAccountant()
    for rate, sigma, count in events:
        event = dp_accounting.GaussianDpEvent(sigma)
        accountant.compose(dp_accounting.PoissonSampledDpEvent(rate, event) if rate < 1 else event, count)
    return accountant.get_epsilon(DELTA)


@pytest.fixture(scope="module")
def of_dp_sgd():
    return composed([(RATE, SIGMA, STEPS)])


@pytest.mark.parametrize("name", STEADY)
def test_a_step_is_a_subsampled_gaussian_and_nothing_else_is_released(name, of_dp_sgd):
    found = predict(factory(name)(SIGMA), sampling=poisson(RATE), steps=STEPS).claim(DELTA)
    assert found.epsilon == pytest.approx(of_dp_sgd, rel=1e-5)


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_released_beside_the_steps_is_composed_with_them(name):
    settings, events = OTHERS[name]
    found = predict(factory(name, **settings)(SIGMA), sampling=poisson(RATE), steps=STEPS).claim(DELTA)
    assert found.epsilon == pytest.approx(composed(events), rel=1e-5)


@pytest.mark.long
@subtests("name", CORRELATED)
def test_correlated_noise_costs_one_gaussian_for_a_pass(name):
    found = predict(factory(name)(SIGMA), sampling=partition(1 / STEPS), steps=STEPS).claim(DELTA)
    assert found.epsilon == pytest.approx(composed([(1.0, SIGMA, 1)]), rel=1e-4)


def test_banded_noise_in_groups_costs_a_subsampled_gaussian_a_cycle():
    sampling = cyclic(0.01, groups=5)
    found = predict(factory("band_mf", bands=5)(SIGMA), sampling=sampling, steps=STEPS).claim(DELTA)
    assert found.epsilon == pytest.approx(composed([(0.05, SIGMA, 9)]), rel=1e-5)


def test_the_table_is_about_every_method_that_proves_something():
    assert {*STEADY, *OTHERS, *CORRELATED} == set(PROVED)
    assert len(PROVED) >= 36
