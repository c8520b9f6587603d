"""The z-score of a sum of squares; that wrong noise is found in runs is shown in test_trained_model.py."""

import pytest
from scipy import stats

from audit.subjects.noise_check import deviations


@pytest.mark.parametrize("degrees", [1, 2, 5, 30, 1000, 10**6])
@pytest.mark.parametrize("score", [2.0, 4.0, 6.0])
def test_honest_noise_is_called_too_much_about_as_often_as_a_normal_number_is_large(degrees, score):
    # Where the sum is so large as the score says, at the chance of a normal number of it: never more than 1.2 times.
    low, high = 0.0, 1e3 * degrees + 1e3
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if deviations(middle, degrees) < score else (low, middle)
    assert stats.chi2.sf(high, degrees) < 1.2 * stats.norm.sf(score)


def test_half_and_two_thirds_of_the_noise_lie_below_and_three_halves_above():
    assert deviations(0.25 * 300, 300) < -6 and deviations(1000 * 4 / 9, 1000) < -6 < 6 < deviations(2.25 * 300, 300)
    assert abs(deviations(300.0, 300)) < 0.1
