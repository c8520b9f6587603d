"""Bounds from guesses at coins in one training: golden values, validity with power."""

import math

import numpy as np
import pytest
from scipy import stats
from scipy.optimize import brentq
from scipy.special import ndtr

from leakbench.audit.evidence import one_run as module
from leakbench.audit.evidence.claim_bounds import gaussian_epsilon
from leakbench.audit.evidence.one_run import (
    Guesses,
    one_run,
    one_run_f_dp,
    one_run_p_value,
    one_run_shift,
    order_statistics_shift,
    surest_errors,
)

from ...parameters import subtests


@subtests(
    ("guesses", "delta", "epsilon"),
    [
        ((100, 100, 75), 0.0, 0.7022),
        ((1000, 1000, 700), 1e-5, 0.7317),
        ((1000, 200, 190), 1e-5, 2.3936),
        ((1000, 100, 100), 1e-5, 3.4654),
        ((1000, 100, 100), 0.0, 3.4930),
        ((1000, 100, 50), 1e-5, 0.0),
    ],
)
def test_golden_values_without_an_assumption(guesses, delta, epsilon):
    assert one_run(Guesses(*guesses), delta) == pytest.approx(epsilon, abs=5e-5)


@subtests(
    ("guesses", "shift", "epsilon"),
    [
        ((1000, 1000, 700), 0.3572, 1.3720),
        ((1000, 200, 190), 0.9081, 3.9161),
        ((1000, 100, 100), 1.2255, 5.5490),
        ((1000, 100, 50), 0.0, 0.0),
    ],
)
def test_golden_values_of_the_gaussian_curve(guesses, shift, epsilon):
    assert one_run_shift(Guesses(*guesses)) == pytest.approx(shift, abs=5e-5)
    assert one_run_f_dp(Guesses(*guesses), 1e-5) == pytest.approx(epsilon, abs=2e-4)


@subtests(
    ("guesses", "epsilon", "delta", "p"),
    [
        ((100, 100, 75), 0.5, 0.0, 0.0048047),
        ((1000, 200, 190), 2.0, 1e-5, 0.0016273),
        ((1000, 100, 100), 2.0, 1e-5, 0.0011554),
    ],
)
def test_golden_p_values(guesses, epsilon, delta, p):
    assert one_run_p_value(Guesses(*guesses), epsilon, delta) == pytest.approx(p, abs=5e-8)


def hull(shift: float, count: int = 10_000) -> list[Guesses]:
    """Guesses at the vertices of the concave hull of a ROC, among which jax_privacy's auditor chooses."""
    others = stats.norm.ppf((np.arange(count) + 0.5) / count)
    thresholds = np.unique(np.concatenate([others, others + shift]))
    alarms = count - np.searchsorted(others, thresholds)
    hits = count - np.searchsorted(others + shift, thresholds)
    points = sorted({(0, 0), *zip(alarms.tolist(), hits.tolist(), strict=True), (count, count)})
    found: list[tuple[int, int]] = []
    for x, y in points:
        while len(found) > 1 and (found[-1][1] - found[-2][1]) * (x - found[-2][0]) <= (y - found[-2][1]) * (
            found[-1][0] - found[-2][0]
        ):
            found.pop()
        found.append((x, y))
    return [Guesses(2 * count, x + y, y) for x, y in found]


@pytest.mark.parametrize(
    ("shift", "vertices", "epsilon"),
    [
        pytest.param(1, 386, 1.13346, marks=pytest.mark.slow),
        pytest.param(2, 374, 2.311945, marks=pytest.mark.slow),
        (4, 140, 4.395568),
    ],
)
def test_regression_values_of_a_public_auditor(shift, vertices, epsilon):
    guesses = hull(shift)
    assert len(guesses) == vertices
    for refuted, value in ((True, epsilon - 1e-4), (False, epsilon + 1e-4)):
        assert (min(one_run_p_value(one, value, 1e-6) for one in guesses) <= 0.05 / vertices) == refuted


@pytest.mark.slow
@pytest.mark.parametrize(("shift", "epsilon"), [(1, 2.164749), (2, 4.7218075), (4, 9.133752)])
def test_regression_values_of_a_public_auditor_with_the_gaussian_curve(shift, epsilon):
    guesses = hull(shift)
    ends = [brentq(lambda mu, e=e: gaussian_epsilon(mu, 1e-6) - e, 0.1, 8) for e in (epsilon - 1e-4, epsilon + 1e-4)]
    said = [module._f_dp_refuted(one, np.array(ends), 0.05 / len(guesses)) for one in guesses if one.correct]
    assert np.any(said, axis=0).tolist() == [True, False]


def test_one_draw_errs_as_the_best_test_of_one_gaussian():
    for shift in (0.5, 1.0, 3.0):
        (chance,) = surest_errors(module._ranks(1, 1), shift)
        assert chance == pytest.approx(float(ndtr(-shift / 2)), abs=1e-5)


def drawn(shift: float, m: int, r: int, trials: int, seed: int) -> np.ndarray:
    """Correct ones of the r surest guesses at coins behind Gaussians [trials]."""
    coins = np.random.default_rng(seed)
    flags = coins.random((trials, m)) < 0.5
    z = coins.normal(size=(trials, m)) + shift * (flags - 0.5)
    order = np.argsort(-np.abs(z), axis=1)[:, :r]
    return (np.take_along_axis(z > 0, order, 1) == np.take_along_axis(flags, order, 1)).sum(axis=1)


@subtests("shift", [0.0, 0.5, 1.0])
@subtests("method", ["one_run", "one_run_f_dp", "order_statistics"])
def test_a_true_shift_is_refuted_in_at_most_its_share_of_audits(shift, method):
    m, r, trials = 500, 50, 2000
    correct = drawn(shift, m, r, trials, seed=3)
    refuted = 0
    for count, times in zip(*np.unique(correct, return_counts=True), strict=True):
        guesses = Guesses(m, r, int(count))
        if method == "one_run":
            said = one_run_p_value(guesses, gaussian_epsilon(shift, 1e-5), 1e-5) <= 0.05
        elif method == "one_run_f_dp":
            said = bool(module._f_dp_refuted(guesses, np.array([max(shift, 1e-9)]), 0.05)[0])
        else:
            chances = surest_errors(module._ranks(m, r), shift)
            said = module._fewer_errors(chances, r - int(count)) <= 0.05
        refuted += int(times) * said
    # A share above 7.4 % of 2,000 has a chance below 1e-6 at a rate of 5 %.
    assert refuted / trials <= 0.074
    # The tests can refute: what they are given here would not pass for half the shift, or for coins.
    if shift == 1.0:
        shown = Guesses(m, r, int(np.median(correct)))
        assert one_run_shift(shown) > 0.3 and order_statistics_shift(shown) > 0.5 and one_run(shown, 1e-5) > 1


def test_taking_the_best_number_of_guesses_refutes_that_nothing_leaks():
    """Why numbers of guesses have to be declared: the trap, and that the library's way does not fall into it."""
    coins = np.random.default_rng(5)
    swept = declared = 0
    for _ in range(150):
        scores, flags = coins.normal(size=400), coins.random(400) < 0.5
        right = np.cumsum(flags[np.argsort(-scores)])
        tries = [Guesses(400, r, int(right[r - 1])) for r in range(10, 400, 10)]
        p = stats.binom.sf([one.correct - 1 for one in tries], [one.guessed for one in tries], 0.5)
        assert p[3] == pytest.approx(one_run_p_value(tries[3], 0.0, 0.0))
        swept += p.min() <= 0.05
        declared += p.min() <= 0.05 / len(tries)
    assert swept > 20 and declared <= 17  # of 150: a nominal 5 % gives more than 17 with a chance below 1e-3


def test_perfect_guesses_have_a_ceiling():
    assert one_run(Guesses(1000, 100, 100).perfect, 0.0) == pytest.approx(
        math.log(1 / (0.05 ** (-1 / 100) - 1)), abs=1e-6
    )


@subtests("counts", [(0, 0, 0), (10, 11, 5), (10, 5, 6), (10, 5, -1)])
def test_guesses_that_cannot_be_are_refused(counts):
    with pytest.raises(ValueError, match="guesses must be 0 <= correct"):
        Guesses(*counts)
