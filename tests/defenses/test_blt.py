"""Buffered linear Toeplitz noise: errors against jax_privacy, and what a pass costs."""

import numpy as np
import pytest

from leakbench.defenses.blt import _Blt, blt
from leakbench.defenses.core import clip, partition, predict
from leakbench.defenses.core.plan.noise_correlation import prefix_errors
from leakbench.defenses.core.privacy.accounting import epsilon
from leakbench.defenses.core.privacy.events import Gaussian

DELTA = 1e-5


def strategy(steps, buffers):
    return _Blt(bound=clip(1.0), buffers=buffers).strategy(steps)


@pytest.mark.parametrize(
    ("steps", "buffers", "error"),
    [
        (100, 1, 5.677095),
        (100, 2, 5.386034),
        (100, 3, 5.382563),
        (500, 2, 8.076272),
        pytest.param(500, 3, 8.008381, marks=pytest.mark.slow),
    ],
)
def test_the_error_is_jax_privacys(steps, buffers, error):
    """Mean squared error at sensitivity 1 of jax_privacy 2.0.0's `buffered_toeplitz.optimize(error="mean")`."""
    column = strategy(steps, buffers).matrix()[:, 0]
    found = (prefix_errors(column, steps) ** 2).mean() * (column @ column)
    assert found == pytest.approx(error, rel=1e-4)
    assert found < (steps + 1) / 16  # an eighth of what independent noise leaves


def test_one_pass_costs_one_gaussian_and_several_more_than_as_many():
    once = predict(blt(noise_multiplier=2.3), sampling=partition(1 / 24), steps=24).claim(DELTA)
    assert once.epsilon == pytest.approx(epsilon([Gaussian(1.0, 2.3, 1)], DELTA).value, rel=1e-9)
    thrice = predict(blt(noise_multiplier=2.3), sampling=partition(1 / 8), steps=24).claim(DELTA)
    assert thrice.epsilon > epsilon([Gaussian(1.0, 2.3, 3)], DELTA).value  # columns without an end overlap


@pytest.mark.long
def test_the_inverse_does_not_grow():
    """Noise of a step is bounded: no scale is so large that what is taken back runs away."""
    for steps in (30, 100):
        inverse = np.linalg.inv(strategy(steps, 3).matrix())
        assert np.linalg.norm(inverse, axis=1).max() < 2


def test_buffers_are_a_count():
    with pytest.raises(ValueError, match="buffers must be"):
        blt(buffers=0)


def test_a_run_of_one_step_has_noise_of_its_own():
    assert strategy(1, 3).matrix().tolist() == [[1.0]]
