"""Reconstruction robustness (ReRo): bound on the success of any attacker who picks the truth among candidates.

Hayes, Mahloujifar & Balle, "Bounding Training Data Reconstruction in DP-SGD", NeurIPS 2023 (arXiv:2302.07225): an
attacker who succeeds with probability at most kappa before seeing the releases succeeds afterwards with at most the
largest probability, under the releases with the record, of an event that has probability kappa under those without it.
For one Gaussian that is Phi(Phi^-1(kappa) + 1/sigma); for sampled ones it is found by Monte Carlo, whose estimate is
not a bound by itself: its upper confidence limit is.

Guarantee:
    Relation add/remove or zero-out, each release a Gaussian at `noise_multiplier` for any codec: a mask or a projection
    changes the release but not the bound. The candidates have to be exchangeable with the truth.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy import ndarray
from scipy import stats
from scipy.special import ndtr, ndtri

from leakbench.defenses.core import Ledger
from leakbench.leaderboard.records.details import Detail
from leakbench.leaderboard.records.record import Metric

RESAMPLES = 1000
"""Bootstrap resamples of a Monte-Carlo estimate."""

VIOLATION = 1e-4
"""A success this improbable under the bound refutes the claim: small, because a board tests many cells."""

_NUMBERS = 10_000_000
"""Random numbers in memory at a time."""


@dataclass(frozen=True, kw_only=True)
class RobustnessBound:
    """A bound on the success probability.

    Attributes:
        value: the bound, or its estimate.
        upper: its upper 97.5 % confidence limit; the value if exact.
        samples: Monte-Carlo samples; 0 if exact.
    """

    value: float
    upper: float
    samples: int = 0


def reconstruction_bound(
    kappa: float,
    *,
    noise_multiplier: float,
    steps: int = 1,
    sample_rate: float = 1.0,
    samples: int = 200_000,
    seed: int = 0,
) -> RobustnessBound:
    """Returns the largest success probability of an attacker who sees all releases and knows all other records.

    Args:
        kappa: success probability without the releases, in (0, 1): 1/n for n equally likely candidates.
        noise_multiplier: noise std / sensitivity of each step.
        steps: number of releases.
        sample_rate: probability to take part in a step (Poisson sampling); 1 for every step, with an exact bound.
        samples: number of Monte-Carlo samples.
        seed: Monte-Carlo seed.

    Raises:
        ValueError: an argument out of range, or so little noise that `samples` do not reproduce the mean of the
            likelihood ratio, which is 1.
    """
    if not 0 < kappa < 1:
        raise ValueError(f"kappa must be in (0, 1), got {kappa}")
    if not (noise_multiplier > 0 and math.isfinite(noise_multiplier)):
        raise ValueError(f"noise_multiplier must be positive and finite, got {noise_multiplier}")
    if not 0 < sample_rate <= 1:
        raise ValueError(f"sample_rate must be in (0, 1], got {sample_rate}")
    for name, value, least in (("steps", steps, 1), ("samples", samples, math.ceil(10 / kappa))):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    if sample_rate == 1:
        value = gaussian_bound(kappa, math.sqrt(steps) / noise_multiplier)
        return RobustnessBound(value=value, upper=value)
    ratios = _likelihood_ratios(noise_multiplier, steps, sample_rate, samples, seed)
    error = float(ratios.std(ddof=1)) / math.sqrt(samples)
    if abs(float(ratios.mean()) - 1) > 3 * error:
        raise ValueError(
            f"samples must be enough for a mean likelihood ratio of 1, got {ratios.mean():.3g} of {samples} "
            f"at noise_multiplier {noise_multiplier}; take more, or sample_rate 1 for a bound that is exact"
        )
    ranked, share = np.sort(ratios)[::-1], math.ceil(samples * kappa)
    value = float(ranked[:share].sum() / samples)
    return RobustnessBound(
        value=min(1.0, value), upper=min(1.0, _upper(ranked, share, np.random.default_rng([seed, 1]))), samples=samples
    )


def gaussian_bound(kappa: float, mu: float) -> float:
    """Returns the bound for Gaussians of total shift mu, in standard deviations of their noise."""
    return float(ndtr(ndtri(kappa) + mu))


def bound_metric(ledger: Ledger, others: int, *, batch: int = 1) -> Metric:
    """Returns the bound on `iip`, or on `prior_success`, of an update that is known to contain the record.

    Args:
        ledger: the releases of the batch.
        others: number of candidates besides the truth, exchangeable with it. Other truths do not count: an attacker who
            knows them rules them out.
        batch: number b of truths of an update. A reconstruction may be matched to any of them. For each truth, the
            success probabilities of r reconstructions before the release add up to at most r / (others + 1). The bound
            is concave in kappa, so b times the bound at 1 / (others + 1) covers the success rate for every r.
    """

    def without(reason: str) -> Metric:
        return Metric(value=None, n=others + 1, better="lower", reason=reason)

    if others < 1:
        return without("there are no other images that the truth would have to be told from")
    if reasons := sorted({entry.reason for entry in ledger.entries if entry.reason}):
        return without(f"nothing is proved: {'; '.join(reasons)}")
    if any(entry.noise_multiplier is None or entry.row is not None for entry in ledger.entries):
        return without("noise is correlated over steps, of which no bound is computed")
    # Gaussians compose by their squares; participation is known, so no sampling amplifies.
    squares = sum(entry.steps / entry.noise_multiplier**2 for entry in ledger.entries if entry.noise_multiplier)
    kappa = 1 / (others + 1)
    detail = Detail({"kappa": kappa, "mu": math.sqrt(squares), "batch": batch})
    value = min(1.0, batch * gaussian_bound(kappa, math.sqrt(squares)))
    return Metric(value=value, n=others + 1, better="lower", reason="computed exactly", detail=detail)


def refuted(success: Metric, bound: Metric) -> bool:
    """True if a success rate this high has a probability below `VIOLATION` under the bound.

    Args:
        success: success rate over targets, such as `iip` or `prior_success`.
        bound: result of `bound_metric` for the same targets.
    """
    if success.value is None or bound.value is None or not success.n:
        return False
    return float(stats.binom.sf(math.floor(success.value * success.n + 1e-9) - 1, success.n, bound.value)) < VIOLATION


def _likelihood_ratios(noise_multiplier: float, steps: int, sample_rate: float, samples: int, seed: int) -> ndarray:
    """Returns likelihood ratios of "took part" to "did not", for releases without the record."""
    draw, logs = np.random.default_rng([seed, 0]), np.zeros(samples)
    together = max(1, _NUMBERS // samples)
    for first in range(0, steps, together):
        w = draw.normal(scale=noise_multiplier, size=(samples, min(together, steps - first)))
        # log(1 - q + q exp((2 w - 1) / (2 sigma^2))), which may overflow before the logarithm.
        inside = (2 * w - 1) / (2 * noise_multiplier**2)
        logs += np.logaddexp(math.log1p(-sample_rate), math.log(sample_rate) + inside).sum(axis=1)
    return np.exp(logs)


def _upper(ranked: ndarray, share: int, draw: np.random.Generator) -> float:
    """Returns the 97.5 % bootstrap quantile of (1/N) times the sum of the `share` largest values."""
    # Each value occurs Poisson(1) times in a resample. The top alone is resampled: it holds the `share` largest values
    # of nearly every resample, and counts are cut off at a total of `share`.
    top = ranked[: min(len(ranked), share + math.ceil(8 * math.sqrt(share)) + 1)]
    sums = np.empty(RESAMPLES)
    for at in range(RESAMPLES):
        before = np.minimum(draw.poisson(1.0, len(top)).cumsum(), share)
        sums[at] = np.diff(before, prepend=0) @ top
    return float(np.quantile(sums, 0.975)) / len(ranked)
