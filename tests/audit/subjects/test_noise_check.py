"""The z-score of a sum of squares; that wrong noise is found in runs is shown in test_trained_model.py."""

import math

import pytest
import torch
from scipy import stats

from leakbench.audit.subjects.noise_check import dependence, deviations, noise_statistics

from ...parameters import subtests


@subtests("degrees", [1, 2, 5, 30, 1000, 10**6])
@subtests("score", [2.0, 4.0, 6.0])
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


@subtests("size", [2, 3, 30])
def test_scores_of_dependence_are_standard_normal_however_few_coordinates_there_are(size):
    coins = torch.Generator().manual_seed(size)
    drawn = torch.randn(2000, 2, size, generator=coins, dtype=torch.float64)
    found = [dependence(noise, before) for noise, before in drawn]
    for name in ("mean", "neighbors", "releases"):
        assert stats.kstest([one[name] for one in found], "norm").pvalue > 1e-3


def test_noise_that_is_a_constant_or_repeated_shows_though_its_size_is_right():
    noise = torch.randn(500, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert dependence(torch.ones_like(noise), None)["mean"] > 6
    assert dependence(noise, noise)["releases"] > 6 > abs(dependence(noise, None)["mean"])
    assert dependence(noise.repeat_interleave(2), None)["neighbors"] > 6


@subtests("period", [1, 2, 3, 5, 10])
@subtests("sign", [1, -1])
def test_noise_that_repeats_after_any_number_of_releases_shows(period, sign):
    """Negated, it cancels from the sum each second time, and shows in those between."""
    noise = torch.randn(period, 2000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    repeated = ((sign ** (t // period) * noise[t % period], False) for t in range(30))
    assert noise_statistics(repeated)[2] > 6


@pytest.mark.long
def test_repetition_of_fresh_noise_is_standard_normal_over_a_run_and_the_largest_score_is_bounded_by_all_tests():
    """Given the earlier releases the score is normal, so those of a run are independent."""
    drawn = torch.randn(3000, 12, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    scores, largest = [], []
    for run in drawn:
        sums = run.cumsum(0)
        scores.append(sum(dependence(run[t], None, sums[t - 1])["repetition"] for t in range(1, 12)) / math.sqrt(11))
        largest.append(noise_statistics((noise, False) for noise in run)[2])
    assert stats.kstest(scores, "norm").pvalue > 1e-3
    # Four tests, each two-sided, at 3 deviations: at most the sum of their chances.
    alarms, most = sum(score > 3 for score in largest), 4 * 2 * float(stats.norm.sf(3))
    assert stats.binomtest(alarms, len(drawn), most, alternative="greater").pvalue > 1e-3


def test_a_mask_that_keeps_nothing_is_no_noise_and_no_error(monkeypatch):
    """Beside other steps it is passed over, and alone there is nothing to find."""
    coins = torch.Generator().manual_seed(0)
    drawn = [(torch.randn(n, generator=coins, dtype=torch.float64), False) for n in (0, 400, 0, 400)]
    ratio, score, pattern = noise_statistics(drawn)
    assert ratio == pytest.approx(1.0, abs=0.1) and abs(score) < 4 and pattern < 4
    ratio, score, pattern = noise_statistics(drawn[:1])
    assert math.isnan(ratio) and score == pattern == 0.0


def test_repetition_shows_beyond_a_step_without_noise_and_not_where_noise_is_claimed_to_follow():
    noise = torch.randn(200, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert noise_statistics([(noise, False), (noise[:0], False), (noise, False)])[2] > 6
    assert noise_statistics([(noise, True), (noise, True)])[2] < 6
    shifted = noise - noise.mean() + 4 / 200**0.5  # a mean of 4 deviations, the same in every step
    assert (
        noise_statistics([(shifted, True)] * 30)[2] == pytest.approx(4.0)
        and noise_statistics([(shifted, False)] * 30)[2] > 20
    )
