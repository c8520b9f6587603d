"""Privacy loss of random allocation: in every epoch of t steps, a record joins a single step, drawn uniformly.

Feldman & Shenfeld, "Privacy Amplification by Random Allocation", 2025: an epoch of Gaussian mechanisms, however
adaptive, is dominated by t outputs N(0, sigma^2), of which a uniformly drawn output has mean 1. The likelihood ratio of
the two hypotheses is then W = (Y_1 + .. + Y_t) / t, with Y_i = exp(x_i / sigma^2 - 1 / (2 sigma^2)) lognormal and of
mean 1 if the record is absent; if it is present, a single Y has the size-biased distribution. Both directions of the
hockey stick divergence are means of convex functions of W, so that each Y may be replaced by any mean-preserving
spread: here by its two neighbours on a grid, and the mass beyond the grid by its last point and infinity. The
distribution of a sum of t such variables follows from a power of a Fourier transform.

Deviation: Feldman & Shenfeld ("Efficient Privacy Loss Accounting for Subsampling and Random Allocation", ICML 2026)
round to grids of another kind.

Guarantee:
    The distributions dominate the epoch's, in both directions, up to the rounding error of the transforms, which counts
    as infinite loss. Relation: a record is replaced by an empty contribution (zero-out). Below a noise multiplier of
    about 1 the grid is coarse, and epsilon larger than necessary, up to its value without amplification.
"""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np
from dp_accounting.pld import common
from scipy import fft, stats

_POINTS = 2**18
"""Largest number of grid intervals for the likelihood ratio of a step."""
_TAIL = 1e-15
"""Mass by which a grid or a sum is truncated, counted as infinite loss."""
_ROUNDING = 2.0**-53
_ORDERS = np.array([-20.0, -8.0, -3.0, -1.0, 1.0, 3.0, 8.0, 20.0])


def ratios(noise_multiplier: float, steps: int) -> tuple[np.ndarray, float, float]:
    """Returns a distribution on a grid that is a mean-preserving spread of a step's likelihood ratio.

    Args:
        noise_multiplier: positive.
        steps: number of steps of an epoch.

    Returns:
        Masses [n] at multiples of a width; that width; and the part of the mean that is missing beyond the grid, the
        mass of infinite loss if the record is present.
    """
    sigma = noise_multiplier
    # Size-biased, the ratio's logarithm is normal with mean 1 / (2 sigma^2).
    edge = math.exp(min(stats.norm.isf(_TAIL) / sigma + 0.5 / sigma**2, 600.0))
    spread = math.sqrt(math.expm1(min(sigma**-2, 600.0)))
    width = edge / _POINTS
    # No finer than the bulk of the distribution needs, if noise is large.
    width = max(width, 1e-3 * min(spread, 1.0))
    points = math.ceil(edge / width) + 1
    at = np.log(np.arange(1, points) * width) * sigma
    # Masses and means of the cells between grid points.
    masses, means = _cells(at + 0.5 / sigma), _cells(at - 0.5 / sigma)
    grid = np.arange(points) * width
    right = np.clip((means - grid[:-1] * masses) / width, 0.0, masses)
    probabilities = np.zeros(points)
    probabilities[:-1] += masses - right
    probabilities[1:] += right
    beyond = float(stats.norm.sf(at[-1] + 0.5 / sigma))
    probabilities[-1] += beyond
    lacking = max(0.0, float(stats.norm.sf(at[-1] - 0.5 / sigma)) - grid[-1] * beyond)
    return probabilities, width, lacking


def _cells(at: np.ndarray) -> np.ndarray:
    """Returns masses of a standard normal between consecutive points, beginning at minus infinity.

    Computed from the nearer tail, which loses fewer digits.
    """
    below, above = stats.norm.cdf(at), stats.norm.sf(at)
    return np.concatenate([below[:1], np.where(at[1:] < 0, np.diff(below), -np.diff(above))])


def epoch(noise_multiplier: float, steps: int, *, present: bool) -> tuple[np.ndarray, np.ndarray, float]:
    """Returns the likelihood ratio of an epoch.

    Args:
        noise_multiplier: noise multiplier of a step.
        steps: number of steps of an epoch.
        present: whether the record takes part, so that the ratio of its step is size-biased.

    Returns:
        Ratios [n], rising; their masses [n]; and the mass that counts as infinite loss.
    """
    step_masses, width, lacking = ratios(noise_multiplier, steps)
    biased = step_masses * (np.arange(len(step_masses)) * width)
    if steps == 1:
        return np.arange(len(step_masses)) * width, biased if present else step_masses, lacking if present else 0.0
    others = steps - 1 if present else steps
    low, high = 0, len(step_masses) - 1
    if others > 1:
        with np.errstate(over="ignore"):  # in a bound that is then not the best
            orders = (_ORDERS / len(step_masses)).tolist()
            low, high = common.compute_self_convolve_bounds(cast(Any, step_masses), others, _TAIL, orders=orders)
    length = high - low + (len(step_masses) if present else 1)
    size = cast(int, fft.next_fast_len(max(length, len(step_masses)), real=True))
    transform = np.asarray(fft.rfft(step_masses, size)) ** others
    if present:
        transform = transform * np.asarray(fft.rfft(biased, size))
    # The transform wraps around; the mass outside the bounds is below the mass added to `lost` here.
    masses = np.maximum(np.roll(np.asarray(fft.irfft(transform, size)), -(low % size))[:length], 0.0)
    lost = 2 * _TAIL + steps * _ROUNDING * math.log2(size + 1) + (lacking if present else 0.0)
    return (low + np.arange(length)) * (width / steps), masses, lost


def divergences(noise_multiplier: float, steps: int, interval: float, *, removed: bool) -> tuple[int, np.ndarray]:
    """Returns hockey stick divergences of an epoch at consecutive multiples of an interval.

    Args:
        noise_multiplier: of a step.
        steps: number of steps of an epoch.
        interval: nats.
        removed: whether the record is in the first of the two distributions; otherwise it is in the second.

    Returns:
        Number of the first multiple, and the divergences there and after it, falling.
    """
    values, masses, infinite = epoch(noise_multiplier, steps, present=removed)
    with np.errstate(divide="ignore"):
        losses = np.log(values) if removed else -np.log(values)
    if not removed:
        losses, masses = losses[::-1], masses[::-1]  # rising
    never = np.isinf(losses)  # a ratio of 0: certain evidence of absence
    infinite += float(masses[never & (losses > 0)].sum())
    losses, masses = losses[~never], masses[~never]
    # Very rare losses only lengthen the grid; their mass counts as infinite.
    upper = np.cumsum(masses[::-1])[::-1]
    kept = int(np.count_nonzero(upper > _TAIL))
    infinite += float(upper[kept]) if kept < len(upper) else 0.0
    losses, masses = losses[:kept], masses[:kept]
    if not kept:  # too little noise for the grid
        return 0, np.ones(1)
    low = math.floor(max(losses[int(np.argmax(np.cumsum(masses) > _TAIL))], -700.0) / interval)
    high = math.ceil(losses[-1] / interval)
    grid = np.arange(low, high + 1)
    upper = np.append(np.cumsum(masses[::-1])[::-1], 0.0)
    upper_weighted = np.append(np.cumsum((masses * np.exp(-losses))[::-1])[::-1], 0.0)
    above = np.searchsorted(losses, grid * interval, side="right")
    return low, np.clip(infinite + upper[above] - np.exp(grid * interval) * upper_weighted[above], 0.0, 1.0)
