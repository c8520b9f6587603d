"""Bounds between a privacy claim and the success of membership tests: AUC, TPR, implied epsilon, exact intervals.

An (epsilon, delta)-private mechanism, or a Gaussian mechanism with mean shift `mu` in units of the noise, has a
trade-off curve: the least miss rate of any membership test at each false positive rate. The area above the curve is the
best AUC. Sources: Kairouz, Oh & Viswanath, "The Composition Theorem for Differential Privacy", ICML 2015 (the region of
(epsilon, delta)); Dong, Roth & Su, "Gaussian Differential Privacy", JRSS B 2022 (Gaussian curve, its delta).

`epsilon=None` and `math.inf` both mean that nothing is claimed.
"""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray
from scipy import optimize, stats
from scipy.special import log_ndtr, ndtr, ndtri


def gaussian_auc(mu: float) -> float:
    """Returns the AUC of the likelihood-ratio test between N(0, 1) and N(mu, 1).

    Args:
        mu: shift, in standard deviations of the noise; 1 / noise_multiplier for an example that fills its bound.
    """
    # P(X < Y) for X ~ N(0, 1), Y ~ N(mu, 1): their difference is N(mu, 2).
    return float(ndtr(mu / math.sqrt(2)))


def gaussian_tpr(mu: float, fpr: float) -> float:
    """Returns the true positive rate of the likelihood-ratio test between N(0, 1) and N(mu, 1).

    Args:
        mu: shift, in standard deviations of the noise.
        fpr: false positive rate, in [0, 1].

    Raises:
        ValueError: fpr is outside [0, 1].
    """
    if not 0 <= fpr <= 1:
        raise ValueError(f"fpr must be in [0, 1], got {fpr}")
    # 1 - G_mu(fpr), with G_mu(a) = Phi(Phi^-1(1 - a) - mu) the trade-off curve of Dong et al.
    return float(ndtr(ndtri(fpr) + mu))


def gaussian_delta(epsilon: float, mu: float) -> float:
    """Returns the smallest delta at which a Gaussian of shift mu is (epsilon, delta)-private (Dong et al., Cor. 2.13).

    Args:
        epsilon: nats, >= 0.
        mu: shift, in standard deviations of the noise, >= 0.

    Raises:
        ValueError: an argument is negative.
    """
    if epsilon < 0 or mu < 0:
        raise ValueError(f"epsilon and mu must be >= 0, got {epsilon} and {mu}")
    if mu == 0 or math.isinf(epsilon):
        return 0.0
    # Phi(-epsilon/mu + mu/2) - e^epsilon Phi(-epsilon/mu - mu/2); the second term is computed in logarithms, because
    # e^epsilon alone overflows even if its product with the tail is tiny.
    tail = math.exp(epsilon + float(log_ndtr(-epsilon / mu - mu / 2)))
    return max(0.0, float(ndtr(-epsilon / mu + mu / 2)) - tail)


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Returns the smallest epsilon (nats) at which a Gaussian of shift mu is (epsilon, delta)-private.

    Args:
        mu: shift, in standard deviations of the noise, >= 0; infinite without noise.
        delta: in (0, 1).

    Raises:
        ValueError: delta is outside (0, 1): a Gaussian is private at no epsilon with delta 0.
    """
    if not 0 < delta < 1:
        raise ValueError(f"delta must be in (0, 1), got {delta}; a Gaussian has no finite epsilon at delta 0")
    if math.isinf(mu):
        return math.inf
    if gaussian_delta(0.0, mu) <= delta:
        return 0.0
    high = 1.0  # delta falls in epsilon, so doubling brackets the root
    while gaussian_delta(high, mu) > delta:
        high *= 2
    root = optimize.brentq(lambda epsilon: gaussian_delta(epsilon, mu) - delta, 0.0, high, xtol=1e-12)
    return float(root)  # pyright: ignore[reportArgumentType] -- a float unless full_output is asked for


def largest_tpr(epsilon: float | None, delta: float, fpr: float) -> float:
    """Returns the largest true positive rate that (epsilon, delta)-privacy allows at a false positive rate.

    Args:
        epsilon: claimed, nats; None or infinite: no claim.
        delta: claimed, in [0, 1].
        fpr: false positive rate, in [0, 1].

    Raises:
        ValueError: an argument is outside its range.
    """
    _check_claim(epsilon, delta)
    if not 0 <= fpr <= 1:
        raise ValueError(f"fpr must be in [0, 1], got {fpr}")
    if epsilon is None or math.isinf(epsilon):
        return 1.0
    # Kairouz et al.: the miss rate is at least the larger of two lines in the false positive rate, and 0.
    steep = 1 - delta - math.exp(min(epsilon, 700.0)) * fpr  # e^709 is the largest float
    return 1 - max(0.0, steep, math.exp(-epsilon) * (1 - delta - fpr))


def largest_auc(epsilon: float | None, delta: float) -> float:
    """Returns the largest AUC that (epsilon, delta)-privacy allows a test: 1 - (1 - delta)^2 / (1 + e^epsilon).

    It is the area above max(0, 1 - delta - e^epsilon a, e^-epsilon (1 - delta - a)): two triangles that meet at a = (1
    - delta) / (1 + e^epsilon). The bound holds for membership decided by coins and for both orders of the removal; on a
    single trained model with fixed members, chance can exceed it, so compare the low end of an interval.

    Args:
        epsilon: claimed, nats; None or infinite: no claim, so 1.0.
        delta: claimed, in [0, 1].

    Raises:
        ValueError: epsilon is negative or delta outside [0, 1].
    """
    _check_claim(epsilon, delta)
    if epsilon is None or math.isinf(epsilon):
        return 1.0
    shrink = math.exp(-epsilon)  # e^epsilon overflows above 709
    return 1 - (1 - delta) ** 2 * shrink / (1 + shrink)


def epsilon_implied(
    misses: Int[ndarray, "*counts"],
    members: int,
    alarms: Int[ndarray, "*counts"],
    non_members: int,
    delta: float,
    *,
    level: float = 0.95,
) -> Float[ndarray, "*counts"]:
    """Returns the least epsilon (nats) that permits error rates this low, by their upper confidence limits.

    Both rates are taken at their Clopper-Pearson upper ends, each of which fails with probability (1 - level) / 2; 0 if
    epsilon = 0 already permits such errors. A lower bound on epsilon in its own right only if the trials are
    independent and the threshold was fixed before they were examined (Nasr et al., "Adversary Instantiation", S&P
    2021).

    Args:
        misses: members taken for non-members, a count per test.
        members: trials with a member, at least 1.
        alarms: non-members taken for members, by the same tests.
        non_members: trials with a non-member, at least 1.
        delta: of the claim, in [0, 1].
        level: confidence, simultaneous over both rates.
    """
    alpha = (1 - level) / 2  # per rate, so that both hold together with probability `level` (union bound)
    fnr, fpr = (
        # If every trial errs the upper end is 1. The quantile has no valid second parameter then: 1 stands in, unused.
        np.where(k == n, 1.0, stats.beta.ppf(1 - alpha, k + 1, np.maximum(n - k, 1)))
        for k, n in ((misses, members), (alarms, non_members))
    )
    # Both orders of (epsilon, delta): 1 - delta - fnr <= e^epsilon fpr, and with the rates exchanged.
    with np.errstate(divide="ignore"):  # log 0 is -inf: such a side implies nothing
        sides = [np.log(np.maximum(0.0, 1 - delta - a)) - np.log(b) for a, b in ((fnr, fpr), (fpr, fnr))]
    return np.maximum(0.0, np.maximum(*sides))


def clopper_pearson(successes: float | int, n: int, *, level: float = 0.95) -> tuple[float, float]:
    """Returns the exact (Clopper-Pearson) interval of a proportion; each side errs with at most (1 - level) / 2.

    Args:
        successes: count, in [0, n]; fractional counts are interpolated by the beta function.
        n: trials, >= 1.
        level: confidence.

    Returns:
        (low, high), low = 0 without a success and high = 1 without a failure.

    Raises:
        ValueError: counts or level outside their ranges.
    """
    alpha = (1 - level) / 2
    return clopper_pearson_lower(successes, n, alpha), clopper_pearson_upper(successes, n, alpha)


def clopper_pearson_lower(successes: float | int, n: int, alpha: float) -> float:
    """Returns a one-sided lower bound of a proportion that errs with probability at most alpha."""
    _check_counts(successes, n, alpha)
    return 0.0 if successes == 0 else float(stats.beta.ppf(alpha, successes, n - successes + 1))


def clopper_pearson_upper(successes: float | int, n: int, alpha: float) -> float:
    """Returns a one-sided upper bound of a proportion that errs with probability at most alpha."""
    _check_counts(successes, n, alpha)
    return 1.0 if successes == n else float(stats.beta.ppf(1 - alpha, successes + 1, n - successes))


def _check_counts(successes: float | int, n: int, alpha: float) -> None:
    if n < 1 or not 0 <= successes <= n:
        raise ValueError(f"successes must be in [0, n] with n >= 1, got {successes} of {n}")
    if not 0 < alpha < 1:
        raise ValueError(f"an error rate must be in (0, 1), got {alpha}")


def _check_claim(epsilon: float | None, delta: float) -> None:
    if epsilon is not None and not epsilon >= 0:
        raise ValueError(f"epsilon must be >= 0, or None where nothing is claimed, got {epsilon}")
    if not 0 <= delta <= 1:
        raise ValueError(f"delta must be in [0, 1], got {delta}")
