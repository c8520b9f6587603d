"""Banded matrix factorisation: coefficients, epsilon in groups, and one band as DP-SGD."""

import numpy as np
import pytest
import torch

from leakbench.defenses.band_mf import band_mf, coefficients
from leakbench.defenses.core import Banded, Context, calibrate, cyclic, partition, poisson, predict, secure
from leakbench.defenses.core.plan.noise_correlation import prefix_errors
from leakbench.defenses.core.privacy.accounting import epsilon
from leakbench.defenses.core.privacy.events import Gaussian
from leakbench.defenses.dp_sgd import dp_sgd

from . import duties

DELTA = 1e-5


@pytest.mark.parametrize(("steps", "bands", "error"), [(20, 4, 4.348826), (100, 8, 9.767663), (500, 16, 22.106315)])
def test_the_error_is_jax_privacys(steps, bands, error):
    """Mean squared error at sensitivity 1 of jax_privacy 2.0.0's `toeplitz.optimize_banded_toeplitz`."""
    column = np.array([1.0, *coefficients(steps, bands)])
    assert (prefix_errors(column, steps) ** 2).mean() * (column @ column) == pytest.approx(error, rel=1e-6)
    assert column[1:4] == pytest.approx(
        {20: (0.57066, 0.43853, 0.35284), 100: (0.61655, 0.51530, 0.45905), 500: (0.62730, 0.53711, 0.49153)}[steps],
        abs=2e-5,
    )


def test_more_bands_leave_less_noise_on_the_sums():
    def error(bands):
        column = np.array([1.0, *coefficients(64, bands)])
        return (prefix_errors(column, 64) ** 2).mean() * (column @ column)

    found = [error(bands) for bands in (1, 2, 4, 8, 16)]
    assert found == sorted(found, reverse=True)
    assert found[0] == pytest.approx(65 / 2)  # independent noise


def test_a_long_run_has_a_column_that_is_at_least_locally_the_best():
    """At 100,000 steps a search from the usual first step ends at once, in a column whose noise overflows beside it."""
    steps, coins = 100_000, np.random.default_rng(0)
    behind = np.array(coefficients(steps, 8))

    def error(column: np.ndarray) -> float:
        return float((prefix_errors(column, steps) ** 2).mean() * (column @ column))

    found = error(np.array([1.0, *behind]))
    root = error(np.array([1.0, *np.cumprod(1 - 0.5 / np.arange(1, 8))]))
    assert np.log(found / root) < -0.3255  # one search from the usual first step stops at -0.3244
    for _ in range(6):
        moved = behind + 0.01 * coins.standard_normal(7)
        with np.errstate(over="ignore", invalid="ignore"):
            assert not error(np.array([1.0, *moved])) < found


def test_one_band_is_dp_sgd_with_the_same_draws():
    ours, theirs = duties.trained(band_mf(bands=1, noise_multiplier=1.0)), duties.trained(dp_sgd(noise_multiplier=1.0))
    assert torch.equal(duties.parameters(ours), duties.parameters(theirs))
    sampling = cyclic(0.02, groups=4)
    claims = [predict(d, sampling=sampling, steps=9).claim(DELTA).epsilon for d in
              (band_mf(bands=1, noise_multiplier=1.0), dp_sgd(noise_multiplier=1.0))]  # fmt: skip
    assert claims[0] == claims[1]


def test_in_groups_it_costs_a_poisson_sample_of_a_group_a_cycle():
    claim = predict(band_mf(bands=8, noise_multiplier=1.7), sampling=cyclic(0.01, groups=8), steps=403).claim(DELTA)
    assert claim.epsilon == epsilon([Gaussian(0.08, 1.7, 51)], DELTA).value
    assert "correlated over steps (Banded)" in claim.events[0] and "without amplification" not in claim.events[0]
    # With a group less, steps of one record share noise, and nothing is amplified.
    fewer = predict(band_mf(bands=8, noise_multiplier=1.7), sampling=cyclic(0.01, groups=7), steps=403).claim(DELTA)
    assert fewer.epsilon > 3 * claim.epsilon
    assert fewer.events[0].endswith("charged without amplification")


def test_a_pass_costs_one_gaussian():
    claim = predict(band_mf(bands=5, noise_multiplier=2.3), sampling=partition(0.1), steps=30).claim(DELTA)
    assert claim.epsilon == pytest.approx(epsilon([Gaussian(1.0, 2.3, 3)], DELTA).value, rel=1e-9)
    assert claim.as_if_poisson is None


def test_plain_poisson_sampling_amplifies_none_of_it():
    claim = predict(band_mf(bands=5, noise_multiplier=2.3), sampling=poisson(0.01), steps=30).claim(DELTA)
    assert claim.epsilon > epsilon([Gaussian(1.0, 2.3, 30)], DELTA).value


def test_calibration_hits_its_target():
    for sampling in (cyclic(0.02, groups=4), partition(0.1)):
        defense = calibrate(band_mf(bands=4), epsilon=2.0, delta=DELTA, sampling=sampling, steps=40)
        assert 1.98 < predict(defense, sampling=sampling, steps=40).claim(DELTA).epsilon <= 2.0


def test_the_place_in_the_stream_is_that_of_the_step():
    method, context = band_mf(bands=3).method, Context(step=0, steps=7, dim=4)
    rows = [method.plan(None, context.at(step))[1].correlated for step in range(7)]
    assert [row and row.position for row in rows] == list(range(7))
    assert {row and row.strategy for row in rows} == {Banded(7, coefficients(7, 3))}


def test_a_run_in_groups_is_what_was_predicted_and_goes_on_after_an_interruption(tmp_path):
    sampling, defense = cyclic(0.1, groups=2), band_mf(bands=2, noise_multiplier=1.0)
    run = duties.trained(defense, sampling=sampling)
    expected = predict(defense, sampling=sampling, steps=duties.STEPS)
    assert run.ledger.entries == expected.entries and run.claim(DELTA).relation == "zero_out"
    again = duties.interrupted(defense, tmp_path / "run", after=3, sampling=sampling)
    duties.check_same_run(again, run)


def test_exact_noise_is_refused_before_anything_is_released():
    with pytest.raises(ValueError, match="must be drawn in float64, got exact noise"):
        duties.trained(band_mf(noise_multiplier=1.0), noise=secure())


def test_bands_are_a_count():
    with pytest.raises(ValueError, match="bands must be"):
        band_mf(bands=0)
