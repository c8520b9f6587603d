"""Noise that is correlated over steps: strategy matrices, and the memory that running them needs.

Matrix mechanisms (Denisov, McMahan, Rush, Smith & Thakurta, NeurIPS 2022) release the matrix S of all steps' sums as S
+ C^-1 Z, with Z independent Gaussian noise: each step cancels a part of earlier noise, so that the sum of all updates,
which determines the final model, has less of it. C, the strategy matrix, is lower triangular with a unit diagonal. The
release is a function of C S + Z, so the sensitivity is that of C S: a record changes it by the columns of C at the
steps in which the record takes part, each times the record's bounded contribution. A stream is a sequence of steps that
share a strategy matrix.

C^-1 Z is computed step by step, as a linear recurrence with a state M [size, dim], in units of the fresh noise z: the
step's noise is z + weights M, and M becomes carry M + entry z. `NoiseMemory` holds M.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ..randomness.noise import Noise

MOST_STEPS = 5000
"""Largest number of steps with correlated noise, because strategy matrices have [steps, steps] entries."""

Recurrence = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Output weights [size], transition matrix `carry` [size, size] and input vector `entry` [size] of a step."""


@runtime_checkable
class NoiseStrategy(Protocol):
    """Strategy matrix of a stream of steps and the recurrence of its noise; fixed before the first step."""

    @property
    def steps(self) -> int:
        """Length of the stream."""
        ...

    @property
    def size(self) -> int:
        """Number of vectors of length dim kept from step to step."""
        ...

    def recurrence(self, position: int) -> Recurrence:
        """Returns the recurrence of the step at a position, counted from 0."""
        ...

    def matrix(self) -> np.ndarray:
        """Strategy matrix C [steps, steps], lower triangular with a unit diagonal."""
        ...


@dataclass(frozen=True)
class Banded:
    """A Toeplitz strategy with a banded C (banded matrix factorisation).

    Attributes:
        steps: length of the stream.
        coefficients: first column of C after its 1.
    """

    steps: int
    coefficients: tuple[float, ...]

    @property
    def size(self) -> int:
        """Number of coefficients: the noise of so many past steps is kept."""
        return len(self.coefficients)

    def recurrence(self, position: int) -> Recurrence:
        """Solves C w = z for the noise: w_t = z - sum_j c_j w_(t-j)."""
        weights = -np.array(self.coefficients)
        carry = np.eye(self.size, k=-1)
        carry[:1] = weights
        return weights, carry, np.eye(self.size)[0] if self.size else np.zeros(0)

    def matrix(self) -> np.ndarray:
        """Lower triangular Toeplitz matrix of the coefficients."""
        return _toeplitz(np.array((1.0, *self.coefficients)), self.steps)


@dataclass(frozen=True)
class BandedInverse:
    """A Toeplitz strategy with a banded C^-1: the noise is a moving average of fresh draws.

    Attributes:
        steps: length of the stream.
        coefficients: first column of C^-1 after its 1.
    """

    steps: int
    coefficients: tuple[float, ...]

    @property
    def size(self) -> int:
        """Number of coefficients: the fresh draws of so many past steps are kept."""
        return len(self.coefficients)

    def recurrence(self, position: int) -> Recurrence:
        """Sums the fresh draws: w = z + sum_j d_j z_(t-j)."""
        entry = np.eye(self.size)[0] if self.size else np.zeros(0)
        return np.array(self.coefficients), np.eye(self.size, k=-1), entry

    def matrix(self) -> np.ndarray:
        """Lower triangular Toeplitz matrix of the inverse series."""
        return _toeplitz(inverse_series(np.array((1.0, *self.coefficients)), self.steps), self.steps)


@dataclass(frozen=True)
class Buffered:
    """A buffered linear Toeplitz strategy: the first column of C is a sum of geometric series, a buffer for each.

    Attributes:
        steps: length of the stream.
        scales: scale of each buffer.
        decays: decay of each buffer, in [0, 1): c_j = sum_k scales_k decays_k^(j-1) for j >= 1.
    """

    steps: int
    scales: tuple[float, ...]
    decays: tuple[float, ...]

    @property
    def size(self) -> int:
        """Number of buffers, a vector each."""
        return len(self.decays)

    def recurrence(self, position: int) -> Recurrence:
        """Updates each buffer, a decaying sum of earlier noise."""
        weights = -np.array(self.scales)
        return weights, np.diag(self.decays) + weights, np.ones(self.size)

    def matrix(self) -> np.ndarray:
        """Lower triangular Toeplitz matrix of the buffers' coefficients."""
        powers = np.array(self.decays)[:, None] ** np.arange(self.steps - 1)
        return _toeplitz(np.concatenate([[1.0], np.array(self.scales) @ powers]), self.steps)


@dataclass(frozen=True)
class Tree:
    """Binary tree aggregation: a prefix sum is the sum of the few tree nodes that cover it.

    Attributes:
        steps: length of the stream.
    """

    steps: int

    @property
    def size(self) -> int:
        """Number of levels of the tree; the noise of a node per level is kept."""
        return self.steps.bit_length()

    def recurrence(self, position: int) -> Recurrence:
        """Draws the noise of the level-k node that this step completes, and cancels that of the k nodes below it."""
        level = _level(position)
        weights = np.zeros(self.size)
        weights[:level] = -1.0
        carry = np.eye(self.size)
        carry[: level + 1] = 0.0
        return weights, carry, np.eye(self.size)[level]

    def matrix(self) -> np.ndarray:
        """Returns the matrix whose row t is the node that step t completes: 1 at the steps that the node sums."""
        rows = np.arange(self.steps)
        widths = np.array([2 ** _level(int(t)) for t in rows])
        return ((rows[:, None] - rows < widths[:, None]) & (rows <= rows[:, None])).astype(float)


def _level(position: int) -> int:
    """Level of the largest tree node that a step completes: the exponent of 2 in position + 1."""
    number = position + 1
    return (number & -number).bit_length() - 1


@dataclass(frozen=True)
class StrategyRow:
    """Position of a step in a stream of correlated noise.

    Attributes:
        strategy: strategy of the stream.
        position: index of the step in the stream, from 0; a step at position 0 begins a new stream.
    """

    strategy: NoiseStrategy
    position: int

    def __post_init__(self) -> None:
        steps = self.strategy.steps
        if not 1 <= steps <= MOST_STEPS:
            raise ValueError(
                f"correlated noise must have 1 to {MOST_STEPS} steps, got {steps}; take larger "
                "batches or fewer epochs, or a method that restarts it, as by a tree an epoch"
            )
        if not 0 <= self.position < steps:
            raise ValueError(f"position must be in the {steps} steps of the strategy, got {self.position}")

    @property
    def fresh(self) -> float:
        """Std of the fresh noise relative to the plan's: a record in a single step is charged the plan's multiplier."""
        return longest_column(self.strategy)

    @property
    def marginal(self) -> float:
        """Standard deviation of the step's whole noise, fresh and carried over, in the same units."""
        return self.fresh * float(_spread(self.strategy)[self.position])


@lru_cache(maxsize=4)
def gram(strategy: NoiseStrategy, *, absolute: bool = False) -> np.ndarray:
    """Gram matrix C^T C [steps, steps] of a strategy, or |C|^T |C|."""
    matrix = np.abs(strategy.matrix()) if absolute else strategy.matrix()
    return matrix.T @ matrix


@lru_cache(maxsize=256)
def longest_column(strategy: NoiseStrategy) -> float:
    """Norm of the longest column: the largest change of C S by a record that takes part in a single step."""
    return float(np.linalg.norm(strategy.matrix(), axis=0).max())


@lru_cache(maxsize=64)
def _spread(strategy: NoiseStrategy) -> np.ndarray:
    """Standard deviations [steps] of the rows of C^-1 Z."""
    from scipy.linalg import solve_triangular  # here, because at the top it would delay the import of every defense

    inverse = solve_triangular(strategy.matrix(), np.eye(strategy.steps), lower=True)
    return np.linalg.norm(inverse, axis=1)


class NoiseMemory:
    """State M of the recurrence for each block; as secret as the noise itself."""

    def __init__(self) -> None:
        """Starts without a state, before the first step of a stream."""
        self._last: StrategyRow | None = None
        self._kept: list[Tensor] = []

    def add(
        self, row: StrategyRow, sums: list[Tensor], stds: list[float], noise: Noise
    ) -> list[Float[Tensor, " size"]]:
        """Adds the noise of a step, and keeps what later steps need.

        The release is round(S_t + std (weights M) + std z). The z that enters M is read back from the rounded release,
        (release - S_t) / std - weights M, so that M is a function of earlier releases and sums alone. Rounding is then
        post-processing of a row of C S plus fresh noise, as for independent noise.

        Args:
            row: position of the step.
            sums: sum of each block, float64.
            stds: standard deviation of the fresh noise on each block.
            noise: secret source.

        Raises:
            ValueError: for exact noise, or a step that does not follow its predecessor.
        """
        if noise.exact:
            raise ValueError(
                "noise that is correlated over steps must be drawn in float64, got exact noise: what is kept of "
                "earlier steps is no whole number; leave --secure-noise out, or take a defense without correlated noise"
            )
        self._go_on(row, sums)
        weights, carry, entry = (
            torch.from_numpy(part).to(sums[0].device) for part in row.strategy.recurrence(row.position)
        )
        released = []
        for number, (values, std) in enumerate(zip(sums, stds, strict=True)):
            owed = weights @ self._kept[number]
            moved = values + std * owed
            released.append(noise.add(moved.clone(), std))
            fresh = (released[-1] - moved) / std
            self._kept[number] = carry @ self._kept[number] + entry[:, None] * fresh
        self._last = row
        return released

    def _go_on(self, row: StrategyRow, sums: list[Tensor]) -> None:
        sizes = [len(values) for values in sums]
        if row.position == 0:
            self._kept = [values.new_zeros(row.strategy.size, len(values)) for values in sums]
        elif self._last is None or (self._last.strategy, self._last.position + 1) != (row.strategy, row.position):
            last = "none" if self._last is None else f"step {self._last.position} of {self._last.strategy}"
            raise ValueError(
                f"a step at position {row.position} of a stream of correlated noise must follow the one before it, "
                f"got {last}; begin a stream at position 0"
            )
        elif [kept.shape[1] for kept in self._kept] != sizes:
            raise ValueError(
                f"blocks must have as many numbers as in the step before while noise is correlated, got {sizes} after "
                f"{[kept.shape[1] for kept in self._kept]}"
            )

    def state(self) -> tuple[StrategyRow | None, list[Tensor]]:
        """Returns the state for a checkpoint; secret."""
        return self._last, [kept.cpu() for kept in self._kept]

    def load(self, state: tuple[StrategyRow | None, list[Tensor]], device: torch.device) -> None:
        """Resumes the stream at a state."""
        self._last, self._kept = state[0], [kept.to(device) for kept in state[1]]


def _toeplitz(column: np.ndarray, steps: int) -> np.ndarray:
    """Returns a lower triangular Toeplitz matrix from its first column, cut or padded to `steps`."""
    full = np.zeros(steps)
    full[: len(column)] = column[:steps]
    lags = np.subtract.outer(np.arange(steps), np.arange(steps))
    return np.where(lags >= 0, full[np.maximum(lags, 0)], 0.0)


def prefix_errors(column: np.ndarray, steps: int) -> np.ndarray:
    """Computes standard deviations of the noise on prefix sums under a Toeplitz strategy, relative to fresh noise.

    Args:
        column: first column of C, beginning with 1.
        steps: length of the stream.
    """
    return np.sqrt(np.cumsum(np.cumsum(inverse_series(column, steps)) ** 2))


def inverse_series(series: np.ndarray, steps: int) -> np.ndarray:
    """Computes the first `steps` coefficients of the power series 1 / series."""
    from scipy.signal import lfilter  # here, because at the top it would delay the import of every defense

    impulse = np.zeros(steps)
    impulse[0] = 1.0
    return np.asarray(lfilter([1.0], series, impulse))
