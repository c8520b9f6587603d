"""Sensitivity of a matrix mechanism under the participation patterns of a sampler.

A stream of correlated noise has a strategy matrix C (`plan/noise_correlation.py`). A record in steps j, k, .. with
contributions of norm at most 1 moves C S by at most the root of the sum of |C^T C| over all pairs of these steps
(Choquette-Choo, McMahan, Rush & Thakurta, "Multi-Epoch Matrix Factorization Mechanisms for Private Machine Learning",
ICML 2023). The root of the largest sum over all patterns that the sampler allows is the stream's sensitivity, and the
whole stream is a Gaussian mechanism, adaptively chosen contributions included.

Guarantee:
    `cyclic` sampling with at least as many groups as C has bands amplifies: the columns of C at a record's steps do not
    overlap, so each step is a Poisson-subsampled Gaussian (Choquette-Choo, Ganesh, McKenna, McMahan, Rush, Thakurta &
    Xu, "(Amplified) Banded Matrix Factorization: A Unified Approach to Private Training", NeurIPS 2023). Otherwise
    sampling does not amplify: under `poisson`, `truncated_poisson`, `fixed` and `full` a record is assumed to be in
    every step, under `partition` and `cyclic` at the same position of every epoch or cycle, under `shuffle` and
    `random_allocation` at an arbitrary position of each.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from ..plan.noise_correlation import NoiseStrategy, gram, longest_column
from .events import Gaussian
from .sampling import Sampling


def stream_events(
    strategy: NoiseStrategy,
    sampling: Sampling,
    sigma: float,
    *,
    first: int,
    position: int,
    steps: int,
    retaken: bool = False,
) -> list[Gaussian]:
    """Returns the Gaussian events of consecutive steps of a noise stream.

    Args:
        strategy: strategy of the stream.
        sampling: sampler of the steps.
        sigma: noise multiplier that is charged to a record in a single step.
        first: index of the first step in the run.
        position: position of the first step in the stream.
        steps: number of steps.
        retaken: as for `sensitivity`.
    """
    cycles = range(first // sampling.groups, (first + steps - 1) // sampling.groups + 1)
    if amplified(strategy, sampling):
        return [Gaussian(sampling.rate_in_group, sigma, len(cycles))]
    return [Gaussian(1.0, sigma / sensitivity(strategy, sampling, first, position, steps, retaken=retaken), 1)]


def amplified(strategy: NoiseStrategy, sampling: Sampling) -> bool:
    """Returns whether the columns of C at a record's steps do not overlap, so that sampling lowers epsilon."""
    return sampling.kind == "cyclic" and bands(strategy) <= sampling.groups


@lru_cache(maxsize=256)
def bands(strategy: NoiseStrategy) -> int:
    """Number of bands of C: columns at least so many steps apart do not overlap."""
    overlap = gram(strategy) != 0
    lags = np.subtract.outer(np.arange(strategy.steps), np.arange(strategy.steps))
    return int(lags[overlap].max()) + 1


@lru_cache(maxsize=1024)
def sensitivity(
    strategy: NoiseStrategy, sampling: Sampling, first: int, position: int, steps: int, *, retaken: bool = False
) -> float:
    """Returns the largest change of C S by a record, relative to that of a record in a single step.

    Args:
        strategy: strategy of the stream.
        sampling: sampler of the steps.
        first: index of the first step in the run.
        position: position of the first step in the stream.
        steps: number of steps.
        retaken: whether steps were taken again. Then a row of C S is released for several S, and if entries of C differ
            in sign, no S moves all rows by most. Every row is at most that of |C|.
    """
    places = slice(position, position + steps)
    shared = np.abs(gram(strategy, absolute=retaken)[places, places])
    numbers = first + np.arange(steps)
    # Limited to the length of the run, because at a tiny rate an epoch exceeds a 64-bit integer.
    turns = min(sampling.groups if sampling.kind == "cyclic" else sampling.steps_per_epoch, first + steps)
    if sampling.kind in ("partition", "cyclic"):
        alike = [np.flatnonzero(numbers % turns == place) for place in range(turns)]
        largest = max(float(shared[np.ix_(indices, indices)].sum()) for indices in alike if len(indices))
    elif sampling.kind in ("shuffle", "random_allocation"):
        largest = _one_of_each(shared, numbers // turns)
    else:
        largest = float(shared.sum())
    return math.sqrt(largest) / longest_column(strategy)


def _one_of_each(shared: np.ndarray, epochs: np.ndarray) -> float:
    """Returns an upper bound on the sum of `shared` over pairs of steps, with an arbitrary step in each epoch."""
    starts = np.flatnonzero(np.diff(epochs, prepend=-1))
    pairs = np.maximum.reduceat(np.maximum.reduceat(shared, starts, axis=0), starts, axis=1)
    alone = np.maximum.reduceat(np.diag(shared), starts)  # an epoch paired with itself is a step paired with itself
    return float(pairs.sum() - np.trace(pairs) + alone.sum())
