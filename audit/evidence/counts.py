"""Lower bounds on epsilon from the errors of a membership test, over independent trials with and without the record.

Clopper-Pearson: Nasr et al., "Adversary Instantiation", S&P 2021. Gaussian: Nasr et al., "Tight Auditing of
Differentially Private Machine Learning", USENIX Security 2023. Bayesian: Zanella-Béguelin et al., "Bayesian Estimation
of Differential Privacy", ICML 2023.

The threshold of the test has to be fixed before its trials are seen; `thresholds` has valid ways to choose it from
data.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from dp_accounting.pld import privacy_loss_distribution
from numpy import ndarray
from scipy import optimize, stats
from scipy.special import ndtri

from .claim_bounds import clopper_pearson_upper, epsilon_implied, gaussian_epsilon
from .estimate import check_delta, check_level

QUANTILES = 20_000
"""Points of the quadrature over a posterior."""

GRID = 1e-3
"""Discretisation interval of privacy loss distributions, in nats: a coarser grid is looser, never wrong."""

_LEAST_SIGMA, _MOST_SIGMA = 0.05, 500.0


@dataclass(frozen=True)
class Errors:
    """Error counts of a membership test.

    Attributes:
        misses: trials with the record that it classified as without.
        positives: trials with the record.
        alarms: trials without the record that it classified as with.
        negatives: trials without the record.
    """

    misses: int
    positives: int
    alarms: int
    negatives: int

    def __post_init__(self) -> None:
        for name, count, n in (("misses", self.misses, self.positives), ("alarms", self.alarms, self.negatives)):
            if n < 1 or not 0 <= count <= n:
                raise ValueError(f"{name} must be between 0 and a number of trials above 0, got {count} of {n}")

    @property
    def none(self) -> Errors:
        """Counts for as many trials, without errors."""
        return Errors(0, self.positives, 0, self.negatives)

    def rates_at_most(self, level: float) -> tuple[float, float]:
        """Returns upper bounds on the miss and the false alarm rate, which hold jointly with probability `level`."""
        alpha = (1 - level) / 2  # union bound
        return (
            clopper_pearson_upper(self.misses, self.positives, alpha),
            clopper_pearson_upper(self.alarms, self.negatives, alpha),
        )


CountBound = Callable[[Errors, float, float], float]
"""Returns a lower bound on epsilon from (errors, delta, level)."""


def clopper_pearson(errors: Errors, delta: float, level: float = 0.95) -> float:
    """Returns the least epsilon that allows error rates this low, at `level`; assumes nothing of the mechanism."""
    check_delta(delta)
    check_level(level)
    misses, alarms = np.array([errors.misses]), np.array([errors.alarms])
    (epsilon,) = epsilon_implied(misses, errors.positives, alarms, errors.negatives, delta, level=level)
    return float(epsilon)


def gaussian_shift(errors: Errors, level: float = 0.95) -> float:
    """Returns the least shift mu of a Gaussian mechanism with errors this rare; 0 if no better than random guessing."""
    check_level(level)
    misses, alarms = errors.rates_at_most(level)
    # Never its absolute value: a test that is worse than random guessing proves nothing.
    return max(0.0, float(ndtri(1 - alarms) - ndtri(misses)))


def gaussian(errors: Errors, delta: float, level: float = 0.95) -> float:
    """Returns the epsilon at the shift of `gaussian_shift`; holds for compositions of Gaussians without sampling."""
    check_delta(delta, least=1e-300)
    return gaussian_epsilon(gaussian_shift(errors, level), delta)


def sampled_gaussian(sample_rate: float, steps: int) -> CountBound:
    """Returns the bound for Gaussians with Poisson sampling and unknown noise.

    Args:
        sample_rate: of the mechanism, in (0, 1].
        steps: at least 1.

    Returns:
        A bound that rejects all noise multipliers whose trade-off curve forbids error rates this low, and returns the
        epsilon of the smallest rejected multiplier, found by bisection: no remaining multiplier has a smaller epsilon.
        Curves are pessimistic, and the epsilon is optimistic (dp-accounting), so that rounding never raises the bound.
    """
    if not 0 < sample_rate <= 1:
        raise ValueError(f"sample_rate must be in (0, 1], got {sample_rate}")
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")

    def bound(errors: Errors, delta: float, level: float = 0.95) -> float:
        check_delta(delta, least=1e-300)
        check_level(level)
        misses, alarms = errors.rates_at_most(level)
        if misses + alarms >= 1:
            return 0.0
        # A record that takes part in no step cannot be detected, whatever the noise.
        absent = (1 - sample_rate) ** steps
        if misses < absent * (1 - alarms):
            raise ValueError(
                f"error rates must be possible under sample_rate {sample_rate:g} and {steps} steps, in which a record "
                f"takes no part with chance {absent:.3g}, got misses of at most {misses:.3g} at false alarms of at "
                f"most {alarms:.3g}: the mechanism samples otherwise"
            )

        def allowed(log_sigma: float) -> bool:
            return least_misses(alarms, math.exp(log_sigma), sample_rate, steps) <= misses

        low, high = math.log(_LEAST_SIGMA), math.log(_MOST_SIGMA)
        if allowed(high):
            return 0.0  # error rates so high that even the largest noise allows them
        if not allowed(low):
            high = low
        while high - low > 1e-3:
            middle = (low + high) / 2
            low, high = (middle, high) if allowed(middle) else (low, middle)
        # At the upper end, which is rejected: its epsilon is below that of any remaining noise multiplier.
        return max(0.0, _distribution(math.exp(high), sample_rate, steps, False).get_epsilon_for_delta(delta))

    return bound


def least_misses(alarms: float, noise_multiplier: float, sample_rate: float, steps: int) -> float:
    """Returns a lower bound on the miss rate of any test of sampled Gaussians at a rate of false alarms.

    For each epsilon, privacy at (epsilon, delta(epsilon)) forbids the region below two lines (Kairouz et al., 2015); a
    delta that is too large moves them down, so a pessimistic delta is safe.
    """
    losses = _distribution(noise_multiplier, sample_rate, steps, True)
    epsilons = np.concatenate([np.linspace(0, 2, 81), np.geomspace(2.05, 200, 120)])
    deltas = np.array(losses.get_delta_for_epsilon(epsilons.tolist()))
    steep = 1 - deltas - np.exp(np.minimum(epsilons, 700)) * alarms
    flat = np.exp(-epsilons) * (1 - deltas - alarms)
    return float(max(0.0, steep.max(), flat.max()))


@lru_cache(maxsize=64)
def _distribution(
    noise_multiplier: float, sample_rate: float, steps: int, pessimistic: bool
) -> privacy_loss_distribution.PrivacyLossDistribution:
    # With little noise the losses are large; a proportional grid keeps its number of points.
    interval = max(GRID, GRID * steps**0.5 / noise_multiplier**2)
    single_step = privacy_loss_distribution.from_gaussian_mechanism(
        noise_multiplier,
        sampling_prob=sample_rate,
        value_discretization_interval=interval,
        pessimistic_estimate=pessimistic,
        use_connect_dots=pessimistic,  # the tighter grid, which has no optimistic estimate
    )
    return single_step.self_compose(steps)


def bayesian(errors: Errors, delta: float, level: float = 0.95) -> float:
    """Returns the quantile at 1 - level of epsilon's posterior: a credible bound, not a confidence bound.

    Both error rates have the posterior of Jeffreys' prior, independently, and a mechanism is (epsilon, delta)-private
    if its rates lie between four lines.
    """
    check_delta(delta)
    check_level(level)
    of_misses = stats.beta(errors.misses + 0.5, errors.positives - errors.misses + 0.5)
    of_alarms = stats.beta(errors.alarms + 0.5, errors.negatives - errors.alarms + 0.5)
    # Equal-probability points of one posterior, so that its peaks need no care, and the CDF of the other.
    x = of_misses.ppf((np.arange(QUANTILES) + 0.5) / QUANTILES)

    def mass(epsilon: float) -> float:
        low, high = _private_rates(x, epsilon, delta)
        share = np.where(high > low, of_alarms.cdf(high) - of_alarms.cdf(low), 0.0)
        return float(share.mean())

    if mass(0.0) >= 1 - level:
        return 0.0
    high = 1.0
    while mass(high) < 1 - level:
        high *= 2
        if high > 1e4:
            raise ValueError("the posterior must have mass at a finite epsilon, and it has none below 10,000")
    return float(optimize.brentq(lambda e: mass(e) - (1 - level), 0.0, high, xtol=1e-9))  # pyright: ignore[reportArgumentType]


def _private_rates(misses: ndarray, epsilon: float, delta: float) -> tuple[ndarray, ndarray]:
    """Returns the least and largest false alarm rate that (epsilon, delta)-privacy allows at each miss rate."""
    grow, shrink = math.exp(min(epsilon, 700.0)), math.exp(-epsilon)
    low = np.maximum((1 - misses - delta) * shrink, 1 - delta - grow * misses)
    high = np.minimum(grow * (1 - misses) + delta, 1 - (misses - delta) * shrink)
    return np.clip(low, 0, 1), np.clip(high, 0, 1)
