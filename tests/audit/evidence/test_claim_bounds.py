"""Bounds of a claim: hand-worked numbers, published goldens, and agreement with numerical integration."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, stats

from leakbench.audit.evidence.claim_bounds import (
    clopper_pearson,
    clopper_pearson_upper,
    epsilon_implied,
    gaussian_auc,
    gaussian_delta,
    gaussian_epsilon,
    gaussian_tpr,
    largest_auc,
    largest_tpr,
)

from ...parameters import subtests


@subtests(
    ("mu", "auc", "at_01pct", "at_1pct"),
    [
        (0.5, 0.638163, 0.0047956, 0.033899),
        (1.0, 0.760250, 0.0182985, 0.0923622),
        (2.0, 0.921350, 0.137805, 0.372081),
    ],
)
def test_a_gaussian_of_known_shift_has_its_known_auc_and_tpr(mu, auc, at_01pct, at_1pct):
    assert gaussian_auc(mu) == pytest.approx(auc, abs=5e-7)
    assert gaussian_tpr(mu, 0.001) == pytest.approx(at_01pct, abs=5e-7)
    assert gaussian_tpr(mu, 0.01) == pytest.approx(at_1pct, abs=5e-7)


@subtests(
    ("mu", "epsilon", "within"),
    [
        (0.5, 1.9931, 5e-5),
        (1.0, 4.3772, 5e-5),
        (2.0, 9.9973, 5e-5),
        (4.0, 24.3816, 5e-5),
        (5.3598, 36.4895, 1e-3),
        (0.2681, 1, 5e-4),
        (0.9249, 4, 5e-4),
        (1.6660, 8, 5e-4),
    ],
)
def test_a_gaussian_of_known_shift_has_its_known_epsilon(mu, epsilon, within):
    assert gaussian_epsilon(mu, 1e-5) == pytest.approx(epsilon, abs=within)


@given(mu=st.floats(0.05, 30), delta=st.floats(1e-9, 0.05))
def test_epsilon_and_delta_of_a_gaussian_invert_each_other(mu, delta):
    epsilon = gaussian_epsilon(mu, delta)
    assert gaussian_delta(epsilon, mu) <= delta * (1 + 1e-6)
    if epsilon > 1e-3:
        assert gaussian_delta(epsilon * (1 - 1e-3), mu) > delta


def test_a_gaussian_has_no_epsilon_without_delta_and_none_without_noise():
    with pytest.raises(ValueError, match=r"delta must be in \(0, 1\), got 0"):
        gaussian_epsilon(1.0, 0.0)
    assert gaussian_epsilon(math.inf, 1e-5) == math.inf
    assert gaussian_epsilon(0.0, 1e-5) == 0


@given(epsilon=st.floats(0, 12), delta=st.floats(0, 0.5))
def test_the_largest_auc_is_the_area_under_the_largest_roc(epsilon, delta):
    corner = (1 - delta) / (1 + math.exp(epsilon))
    area, _ = integrate.quad(lambda fpr: largest_tpr(epsilon, delta, fpr), 0, 1, points=[corner, 1 - delta])
    assert largest_auc(epsilon, delta) == pytest.approx(area, abs=1e-8)


@given(mu=st.floats(0.05, 5), delta=st.floats(1e-8, 0.3))
def test_no_gaussian_beats_the_bound_of_its_own_epsilon(mu, delta):
    epsilon = gaussian_epsilon(mu, delta)
    assert gaussian_auc(mu) <= largest_auc(epsilon, delta) + 1e-9
    for fpr in (0.0, 0.001, 0.1, 0.5, 1.0):
        assert gaussian_tpr(mu, fpr) <= largest_tpr(epsilon, delta, fpr) + 1e-9


def test_hand_worked_corners_of_the_largest_auc():
    assert largest_auc(0.0, 0.0) == 0.5
    assert largest_auc(math.log(3), 0.0) == pytest.approx(0.75)  # e^eps / (1 + e^eps)
    assert largest_auc(0.0, 0.2) == pytest.approx(0.68)  # 1 - 0.8^2 / 2
    assert largest_auc(0.0, 1.0) == largest_auc(None, 1e-5) == largest_auc(math.inf, 1e-5) == 1.0
    assert largest_auc(3.0, 1e-5) == pytest.approx(0.952575, abs=1e-6)
    assert largest_auc(5000.0, 1e-5) == 1.0
    assert largest_tpr(5000.0, 0.0, 0.0) == 0.0


@subtests(("k", "n", "bound"), [(0, 1000, 0.0037), (500, 1000, 0.5315), (5, 1000, 0.0116)])
def test_known_upper_bounds_of_a_proportion(k, n, bound):
    assert clopper_pearson_upper(k, n, 0.025) == pytest.approx(bound, abs=5e-5)


@given(n=st.integers(1, 400), data=st.data())
def test_clopper_pearson_is_scipys_exact_interval(n, data):
    k = data.draw(st.integers(0, n))
    theirs = stats.binomtest(k, n).proportion_ci(0.95, method="exact")
    np.testing.assert_allclose(clopper_pearson(k, n), (theirs.low, theirs.high), atol=1e-9)


@subtests(
    ("call", "sentence"),
    [
        (lambda: largest_auc(-1.0, 0.0), "epsilon must be >= 0"),
        (lambda: largest_auc(math.nan, 0.0), "epsilon must be >= 0"),
        (lambda: largest_auc(1.0, 1.5), r"delta must be in \[0, 1\], got 1.5"),
        (lambda: gaussian_tpr(1.0, 2.0), r"fpr must be in \[0, 1\], got 2.0"),
        (lambda: clopper_pearson(5, 4), "successes must be in"),
    ],
)
def test_arguments_outside_their_range_are_refused(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()


@subtests(
    ("misses", "members", "alarms", "non_members", "delta", "expected"),
    [
        (0, 1000, 0, 1000, 1e-5, 5.6006),
        (0, 100, 0, 100, 0.0, 3.2813),
        (500, 1000, 5, 1000, 1e-5, 3.6961),
        (100, 1000, 100, 1000, 0.0, 1.9897),
        (500, 1000, 500, 1000, 0.0, 0.0),
        (1000, 1000, 0, 1000, 1e-5, 0.0),
    ],
)
def test_errors_imply_the_epsilon_of_published_goldens(misses, members, alarms, non_members, delta, expected):
    found = epsilon_implied(np.array([misses]), members, np.array([alarms]), non_members, delta)
    assert found[0] == pytest.approx(expected, abs=1e-4)
    mirrored = epsilon_implied(np.array([alarms]), non_members, np.array([misses]), members, delta)
    assert mirrored[0] == pytest.approx(expected, abs=1e-4)  # either hypothesis may be called the first
