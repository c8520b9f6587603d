"""Exact draws from the discrete Gaussian, from the operating system's random bits.

The discrete Gaussian of scale s has probability proportional to exp(-k^2 / 2 s^2) at every integer k: Canonne, Kamath &
Steinke, "The Discrete Gaussian for Differential Privacy", NeurIPS 2020. The sampler follows Karney, "Sampling Exactly
from the Normal Distribution", ACM TOMS 2016, with integers instead of real deviates. A magnitude is h M + l, with M a
power of two: h is drawn by inversion from the discrete Gaussian of scale s / M on 0, 1, 2, ..., l uniformly below M,
and the pair is accepted with probability exp(-(2 h l M + l^2) / 2 s^2). Then a sign is drawn, and a negative zero is
rejected, because 0 would otherwise be counted twice.

Every comparison of a uniform number with a probability uses 32 random bits first. If they do not decide, a few times in
10^8, more bits are drawn and the probability is computed to as many digits as needed. No probability is therefore
rounded, however small, and there is no largest value.

Guarantee:
    Draws are independent and have exactly the stated probabilities, if the bits of `os.urandom` are independent and
    fair. The duration of a draw depends on its value (rejections, further bits), and is not hidden.
"""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from decimal import Decimal, localcontext
from functools import lru_cache

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

LARGEST = 2.0**35
"""Largest scale: sign and lower part of a magnitude share 32 random bits."""

_COARSE = 16  # for s >= 16 the scale of h is in [16, 32): a table of a few hundred entries, 97 % of draws accepted
_PART = 2**17  # draws that a thread makes at a time
_PIECE = 2**15  # draws processed at once, which stay in the cache
_DIGITS = 60  # decimal digits of the table, which ends at a weight below 10^-60
_WORD = 2**32


def draw(size: int, scale: float) -> Int64[Tensor, " size"]:
    """Draws independent integers.

    Args:
        size: number of draws.
        scale: s, in (0, 2^35]; for s >= 1 it equals the standard deviation up to a relative 10^-7.

    Raises:
        ValueError: for a scale out of range.
    """
    table = _table(float(scale))
    values = np.empty(size, dtype=np.int64)
    parts = [values[start : start + _PART] for start in range(0, size, _PART)]
    if len(parts) < 2:
        for part in parts:
            _fill(part, table)
    else:
        with ThreadPoolExecutor(min(torch.get_num_threads(), len(parts))) as pool:
            list(pool.map(lambda part: _fill(part, table), parts))
    return torch.from_numpy(values)


def probabilities(values: np.ndarray, scale: float) -> np.ndarray:
    """Computes the probability of each of these integers, in float64.

    Args:
        values: integers.
        scale: s.
    """
    reach = math.ceil(40 * scale) + 40  # exp(-40^2 / 2) is zero in float64
    total = math.fsum(math.exp(-k * k / (2 * scale**2)) for k in range(-reach, reach + 1))
    return np.exp(-np.square(values.astype(np.float64)) / (2 * scale**2)) / total


@dataclass(frozen=True)
class _Table:
    """Precomputed tables for draws at a given scale.

    Attributes:
        scale: s.
        step: M, a power of two.
        edges: floor(2^32 F(k)) for k = 0, 1, ..., with F the distribution function of h; uint32.
        guide: smallest possible h for each value of a random number's upper 16 bits.
        split: mask of the values of the upper 16 bits that do not determine h, so that lower bits are read too.
    """

    scale: float
    step: int
    edges: np.ndarray
    guide: np.ndarray
    split: np.ndarray


@lru_cache(maxsize=16)
def _table(scale: float) -> _Table:
    if not 0 < scale <= LARGEST:
        raise ValueError(f"the scale of a discrete Gaussian must be in (0, 2^35], got {scale}")
    step = 2 ** max(0, math.floor(math.log2(scale / _COARSE)))
    below = _cumulative(scale / step, _DIGITS)
    edges = np.array([int(value * _WORD) for value in below], dtype=np.uint64)
    edges = np.minimum(edges, _WORD - 1).astype(np.uint32)  # the last ones differ from 1 by less than 2^-32
    starts = np.arange(2**16, dtype=np.uint32) << np.uint32(16)
    guide = np.searchsorted(edges, starts, side="right")
    split = guide != np.searchsorted(edges, starts | np.uint32(0xFFFF), side="right")
    # 32 bits may not separate an edge at the very start of a bucket from numbers below it.
    split |= np.isin(starts, edges)
    return _Table(scale, step, edges, guide.astype(np.int64), split)


@lru_cache(maxsize=64)
def _cumulative(scale: float, digits: int) -> tuple[Decimal, ...]:
    """Distribution function of h at 0, 1, 2, ..., in decimal arithmetic, up to a weight below 10^-digits."""
    with localcontext() as context:
        context.prec = digits
        variance = 2 * Decimal(scale) ** 2
        weights, k = [Decimal(1)], 0
        while weights[-1] > Decimal(10) ** -digits:
            k += 1
            weights.append((-(Decimal(k) ** 2) / variance).exp())
        total, below, probabilities = sum(weights), Decimal(0), []
        for weight in weights:
            below += weight
            probabilities.append(below / total)
    return tuple(probabilities)


def _fill(values: np.ndarray, table: _Table) -> None:
    """Draws until the array is full; rejected draws are replaced."""
    for start in range(0, len(values), _PIECE):
        piece = values[start : start + _PIECE]
        done = 0
        while done < len(piece):
            # Accepted draws keep their order, and a surplus is cut off at the end: this selects no values.
            missing = len(piece) - done
            accepted = _propose(missing + missing // 16 + 8, table)[:missing]
            piece[done : done + len(accepted)] = accepted
            done += len(accepted)


def _propose(count: int, table: _Table) -> np.ndarray:
    """Makes `count` proposals and returns the accepted ones, in order."""
    words = np.frombuffer(os.urandom(12 * count), dtype=np.uint32).reshape(3, count)
    high = _inverted(words[0], table)
    negative = words[2] >> np.uint32(31) == 1
    if table.step == 1:
        return np.where(negative, -high, high)[~(negative & (high == 0))]
    low = (words[2] & np.uint32(table.step - 1)).astype(np.int64)
    keep = _kept(words[1], high, low, table)
    values = high * table.step + low
    keep &= ~(negative & (values == 0))
    return np.where(negative, -values, values)[keep]


def _inverted(words: np.ndarray, table: _Table) -> np.ndarray:
    """Inverts F at uniform numbers with these first 32 bits: h is the number of values of F that are not larger."""
    upper = words >> np.uint32(16)
    quantiles = table.guide[upper]
    doubtful = np.flatnonzero(table.split[upper])
    if len(doubtful):
        doubtful_words = words[doubtful]
        right = np.searchsorted(table.edges, doubtful_words, side="right")
        quantiles[doubtful] = right
        # Some F(k) begins with the same 32 bits as the number: further bits decide.
        tied = np.flatnonzero(np.searchsorted(table.edges, doubtful_words, side="left") != right)
        for place in tied:
            quantiles[doubtful[place]] = _inverted_slowly(int(doubtful_words[place]), table)
    return quantiles


def _inverted_slowly(word: int, table: _Table) -> int:
    """Inverts a single number, with as many further bits as needed."""
    prefix, bits, digits = word, 32, _DIGITS
    while True:
        prefix, bits = (prefix << 64) | int.from_bytes(os.urandom(8), "big"), bits + 64
        digits = max(digits, bits * 4 // 10 + 30)
        below = _cumulative(table.scale / table.step, digits)
        with localcontext() as context:
            context.prec = digits + 10
            # Larger than the rounding error of some hundred terms plus the tail outside the table.
            error = Decimal(10) ** (10 - digits)
            low, high = Decimal(prefix) / 2**bits, Decimal(prefix + 1) / 2**bits
            sure = sum(value + error <= low for value in below)
            possible = sum(value - error < high for value in below)
        if sure == possible and sure < len(below):
            return sure


def _kept(words: np.ndarray, high: np.ndarray, low: np.ndarray, table: _Table) -> np.ndarray:
    """Mask of uniform numbers, beginning with these 32 bits, that are below exp(-(2 h l M + l^2) / 2 s^2)."""
    fraction, scale = low / table.step, table.scale / table.step
    bound = np.exp(-(2.0 * high + fraction) * fraction / (2 * scale**2)) * _WORD
    # Word w stands for all numbers in [w, w + 1) / 2^32: if the bound lies in this interval, further bits decide. The
    # exponential in float64 is accurate to 10^-14, which is 10^-5 of an interval; the margins of 0.001 exceed that.
    keep = words < bound - 1.001
    for place in np.flatnonzero(keep != (words < bound + 0.001)):
        keep[place] = _kept_slowly(int(words[place]), int(high[place]), int(low[place]), table)
    return keep


def _kept_slowly(word: int, high: int, low: int, table: _Table) -> bool:
    """Decides for a single number, with as many further bits as needed."""
    prefix, bits = word, 32
    while True:
        digits = bits * 4 // 10 + 30
        with localcontext() as context:
            context.prec = digits + 10
            exponent = Decimal((2 * high * table.step + low) * low) / (2 * Decimal(table.scale) ** 2)
            bound, error = (-exponent).exp(), Decimal(10) ** -digits
            if Decimal(prefix + 1) / 2**bits <= bound - error:
                return True
            if Decimal(prefix) / 2**bits >= bound + error:
                return False
        prefix, bits = (prefix << 64) | int.from_bytes(os.urandom(8), "big"), bits + 64
