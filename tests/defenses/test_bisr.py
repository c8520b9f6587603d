"""The banded inverse square root: its series, and one band as DP-SGD."""

import numpy as np
import pytest
import torch

from leakbench.defenses.bisr import bisr, coefficients
from leakbench.defenses.core import BandedInverse, partition, predict
from leakbench.defenses.core.plan.noise_correlation import prefix_errors
from leakbench.defenses.core.privacy.accounting import epsilon
from leakbench.defenses.core.privacy.events import Gaussian
from leakbench.defenses.dp_sgd import dp_sgd

from . import duties


def test_the_series_is_that_of_the_square_root():
    assert coefficients(5) == pytest.approx((-1 / 2, -1 / 8, -1 / 16, -5 / 128))
    assert coefficients(1) == ()
    # With all of them, C times C is the matrix of prefix sums.
    root = BandedInverse(9, coefficients(9)).matrix()
    np.testing.assert_allclose(root @ root, np.tril(np.ones((9, 9))), atol=1e-12)


def test_one_band_is_dp_sgd_with_the_same_draws():
    ours, theirs = duties.trained(bisr(bands=1, noise_multiplier=1.0)), duties.trained(dp_sgd(noise_multiplier=1.0))
    assert torch.equal(duties.parameters(ours), duties.parameters(theirs))


def test_prefix_sums_carry_less_noise_than_with_independent_draws():
    column = BandedInverse(200, coefficients(8)).matrix()[:, 0]
    assert (prefix_errors(column, 200) ** 2).mean() * (column @ column) < 0.2 * 201 / 2


def test_one_pass_costs_one_gaussian():
    claim = predict(bisr(noise_multiplier=2.3), sampling=partition(1 / 24), steps=24).claim(1e-5)
    assert claim.epsilon == pytest.approx(epsilon([Gaussian(1.0, 2.3, 1)], 1e-5).value, rel=1e-9)


def test_bands_are_a_count():
    with pytest.raises(ValueError, match="bands must be"):
        bisr(bands=0)
