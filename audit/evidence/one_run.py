"""Epsilon from a single training: m canaries, each included by its own fair coin, and guesses at the coins.

`one_run`: Steinke, Nasr & Jagielski, "Privacy Auditing with One (1) Training Run", NeurIPS 2023, Theorem 5.2.
`one_run_f_dp`: Mahloujifar, Melis & Chaudhuri, "Auditing f-Differential Privacy in One Run", 2024, for Gaussian
trade-off curves. `order_statistics`: after Xiang et al., arXiv:2509.08704: the most confident of m guesses about a
Gaussian mechanism err with known probabilities.

The coins have to be independent, as for canaries that are each included by a coin, or the orientations of random pairs
(`pairs`); a split into exact halves is not. The number of guesses has to be fixed before the coins are seen, or the
error rate divided by the number of choices, as `audit` does: taking the best number of guesses refutes a true claim of
epsilon 0 in half of the audits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy import ndarray
from scipy import optimize, stats
from scipy.special import ndtr, ndtri

from .claim_bounds import gaussian_epsilon
from .estimate import check_delta, check_level

LARGEST_SHIFT = 64.0
"""Largest shift of a Gaussian mechanism that is searched, in standard deviations of its noise: an epsilon of 2,300."""

ROUNDS, SHIFTS = 8, 16
"""Rounds of a search over shifts, and the number of shifts evaluated together in each."""


@dataclass(frozen=True)
class Guesses:
    """Counts of guesses at the coins of canaries.

    Attributes:
        canaries: m, all of them, guessed or not.
        guessed: r, number of guesses.
        correct: v, number of correct guesses.
    """

    canaries: int
    guessed: int
    correct: int

    def __post_init__(self) -> None:
        if not 0 <= self.correct <= self.guessed <= self.canaries or self.canaries < 1:
            raise ValueError(
                "guesses must be 0 <= correct <= guessed <= canaries with a canary, got "
                f"{self.correct}, {self.guessed} and {self.canaries}"
            )

    @property
    def perfect(self) -> Guesses:
        """Counts for as many guesses, all correct."""
        return Guesses(self.canaries, self.guessed, self.guessed)


GuessBound = Callable[[Guesses, float, float], float]
"""Returns a lower bound on epsilon from (guesses, delta, level)."""


def one_run_p_value(guesses: Guesses, epsilon: float, delta: float) -> float:
    """Returns the largest probability of so many correct guesses under (epsilon, delta)-privacy.

    Raises:
        ValueError: for epsilon or delta out of range.
    """
    check_delta(delta)
    if not epsilon >= 0:
        raise ValueError(f"epsilon must be at least 0, got {epsilon}")
    m, r, v = guesses.canaries, guesses.guessed, guesses.correct
    if v == 0:
        return 1.0
    tail = stats.binom(r, 1 / (1 + math.exp(-epsilon)))
    beta = float(tail.sf(v - 1))
    if delta == 0:
        return min(1.0, beta)
    i = np.arange(1, v + 1)
    alpha = max(0.0, float(((tail.sf(v - i - 1) - beta) / i).max()))
    return min(1.0, beta + 2 * m * delta * alpha)


def one_run(guesses: Guesses, delta: float, level: float = 0.95) -> float:
    """Returns the largest epsilon that is refuted at `level`; assumes nothing of the mechanism."""
    check_level(level)

    def short(epsilon: float) -> float:
        return one_run_p_value(guesses, epsilon, delta) - (1 - level)

    if short(0.0) > 0:
        return 0.0
    high = 1.0
    while short(high) <= 0:
        high *= 2
    return float(optimize.brentq(short, 0.0, high, xtol=1e-12))  # pyright: ignore[reportArgumentType]


def one_run_shift(guesses: Guesses, level: float = 0.95) -> float:
    """Returns the largest shift of a Gaussian trade-off curve that is refuted at `level`; 0 if none is."""
    check_level(level)
    return _largest(lambda shifts: _f_dp_refuted(guesses, shifts, 1 - level))


def one_run_f_dp(guesses: Guesses, delta: float, level: float = 0.95) -> float:
    """Returns the epsilon at the shift of `one_run_shift`; holds for compositions of Gaussians without sampling."""
    check_delta(delta, least=1e-300)
    return gaussian_epsilon(one_run_shift(guesses, level), delta)


def order_statistics_shift(guesses: Guesses, level: float = 0.95) -> float:
    """Returns the largest refuted shift, by the error probabilities of the most confident guesses.

    It is valid only if the guesses are those of the canaries with the largest absolute log likelihood ratios.
    """
    check_level(level)
    if guesses.guessed == 0:
        return 0.0
    ranks = _ranks(guesses.canaries, guesses.guessed)
    errors = guesses.guessed - guesses.correct

    def refuted(shifts: ndarray) -> ndarray:
        return np.array([_fewer_errors(surest_errors(ranks, shift), errors) <= 1 - level for shift in shifts])

    return _largest(refuted)


def order_statistics(guesses: Guesses, delta: float, level: float = 0.95) -> float:
    """Returns the epsilon at the shift of `order_statistics_shift`.

    It holds if each canary's score is its own Gaussian likelihood ratio.
    """
    check_delta(delta, least=1e-300)
    return gaussian_epsilon(order_statistics_shift(guesses, level), delta)


def surest_errors(ranks: tuple[ndarray, ndarray], shift: float) -> ndarray:
    """Returns the error probabilities of the most confident guesses about a Gaussian mechanism, from the surest on.

    With the log likelihood ratio L a guess by its sign is wrong with probability 1 / (1 + e^|L|). |L| is shift times
    |z|, with z from an equal mixture of two normals half the shift to either side of 0.

    Args:
        ranks: nodes [r, k] and weights [k], of the distributions of the ranks of m uniform numbers.
        shift: of the mechanism.
    """
    nodes, weights = ranks
    size = np.linspace(0, shift / 2 + 12, 8001)
    share = ndtr(size - shift / 2) - ndtr(-size - shift / 2)
    # Flat ends of the distribution function would make its inverse ambiguous; they hold 1e-30 of its mass.
    at = np.interp(nodes, share, size)
    return (1 / (1 + np.exp(np.minimum(shift * at, 700)))) @ weights


@lru_cache(maxsize=16)
def _ranks(m: int, r: int) -> tuple[ndarray, ndarray]:
    """Returns a quadrature over the distributions of the r largest of m uniform numbers: nodes [r, k], weights [k]."""
    points, weights = np.polynomial.legendre.leggauss(48)
    k = np.arange(r)[:, None]
    return stats.beta.ppf((points + 1)[None] / 2, m - k, k + 1), weights / 2


def _fewer_errors(chances: ndarray, errors: int) -> float:
    """Chernoff's bound on the probability of at most so many errors, given independent error probabilities."""
    if errors >= float(chances.sum()):
        return 1.0

    def exponent(t: float) -> float:
        return t * errors + float(np.log1p(chances * math.expm1(-t)).sum())

    best = optimize.minimize_scalar(exponent, bounds=(0.0, 50.0), method="bounded")
    return math.exp(min(0.0, float(best.fun)))


def _f_dp_refuted(guesses: Guesses, shifts: ndarray, tau: float) -> ndarray:
    """Returns whether so many correct guesses have probability below tau under each Gaussian curve (Algorithm 3)."""
    m, r, v = guesses.canaries, guesses.guessed, guesses.correct
    right, wrong = np.full(shifts.shape, tau * v / m), np.full(shifts.shape, tau * (r - v) / m)
    for i in range(v - 1, -1, -1):
        # 1 - f inverted, for the Gaussian trade-off curve: Phi(Phi^-1(x) - mu).
        after = np.maximum(wrong, ndtr(ndtri(right) - shifts))
        right = np.minimum(1.0, right + i / (r - i) * (after - wrong))
        wrong = after
    return right + wrong > r / m


def _largest(refuted: Callable[[ndarray], ndarray]) -> float:
    """Returns the largest refuted shift, rounded down: if a shift is refuted, so is every smaller one."""
    low, high = 0.0, LARGEST_SHIFT
    if not refuted(np.array([1e-9]))[0]:
        return 0.0
    for _ in range(ROUNDS):
        shifts = np.linspace(low, high, SHIFTS + 2)[1:-1]
        # Up to the first shift that is not refuted, even if rounding refutes a later shift.
        kept = int(np.argmin(np.append(refuted(shifts), False)))
        low, high = (float(shifts[kept - 1]) if kept else low), (float(shifts[kept]) if kept < SHIFTS else high)
    return low
