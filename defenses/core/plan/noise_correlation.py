"""Noise that is correlated over steps: strategy matrices, which say how, and what they need to be kept.

Matrix mechanisms (Denisov, McMahan, Rush, Smith & Thakurta, NeurIPS 2022) release what steps sum, S, as S + C^-1 Z with
Z independent: each step takes back a part of earlier noise, so that the sum of all updates, which is where a model ends
up, carries less of it. C, lower triangular with ones on its diagonal, is the strategy; one record moves C S by at most
its columns at the steps that the record is in.

A strategy is run as a recurrence over few vectors. Before step t it holds M [size, dim], in units of fresh noise z; the
step's noise is z + weights M, and M becomes carry M + entry z. `NoiseMemory` runs it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from scipy import linalg, signal
from torch import Tensor

from ..randomness.noise import Noise

MOST_STEPS = 5000
"""Of a run with correlated noise: its cost follows from all pairs of steps."""

Recurrence = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Weights [size], carry [size, size] and entry [size] of a step."""


@runtime_checkable
class NoiseStrategy(Protocol):
    """How the noise of a stream of steps is correlated; a value, fixed before the first of them."""

    @property
    def steps(self) -> int:
        """Length of the stream."""
        ...

    @property
    def size(self) -> int:
        """Vectors to keep from step to step."""
        ...

    def recurrence(self, position: int) -> Recurrence:
        """How the step at a position, from 0, uses and changes what is kept."""
        ...

    def matrix(self) -> np.ndarray:
        """C [steps, steps], lower triangular with a diagonal of ones."""
        ...


@dataclass(frozen=True)
class Banded:
    """A Toeplitz strategy whose columns have few entries: steps further apart than these are independent.

    Attributes:
        steps: length of the stream.
        coefficients: the first column of C behind its 1.
    """

    steps: int
    coefficients: tuple[float, ...]

    @property
    def size(self) -> int:
        """The noise of so many steps is kept."""
        return len(self.coefficients)

    def recurrence(self, position: int) -> Recurrence:
        """Noise w solves C w = z: w_t = z - sum_j c_j w_(t-j)."""
        weights = -np.array(self.coefficients)
        carry = np.eye(self.size, k=-1)
        carry[:1] = weights
        return weights, carry, np.eye(self.size)[0] if self.size else np.zeros(0)

    def matrix(self) -> np.ndarray:
        """Lower triangular Toeplitz."""
        return _toeplitz(np.array((1.0, *self.coefficients)), self.steps)


@dataclass(frozen=True)
class BandedInverse:
    """A Toeplitz strategy whose inverse has few entries: noise is a moving sum of what was drawn.

    Attributes:
        steps: length of the stream.
        coefficients: the first column of C^-1 behind its 1.
    """

    steps: int
    coefficients: tuple[float, ...]

    @property
    def size(self) -> int:
        """What was drawn in so many steps is kept."""
        return len(self.coefficients)

    def recurrence(self, position: int) -> Recurrence:
        """Noise w = z + sum_j d_j z_(t-j)."""
        entry = np.eye(self.size)[0] if self.size else np.zeros(0)
        return np.array(self.coefficients), np.eye(self.size, k=-1), entry

    def matrix(self) -> np.ndarray:
        """The inverse series, lower triangular Toeplitz."""
        return _toeplitz(inverse_series(np.array((1.0, *self.coefficients)), self.steps), self.steps)


@dataclass(frozen=True)
class Buffered:
    """A Toeplitz strategy whose first column is a sum of falling powers: few vectors for any number of steps.

    Attributes:
        steps: length of the stream.
        scales: one for each buffer.
        decays: of the buffers, in [0, 1): c_j = sum_k scales_k decays_k^(j-1) for j >= 1.
    """

    steps: int
    scales: tuple[float, ...]
    decays: tuple[float, ...]

    @property
    def size(self) -> int:
        """One vector a buffer."""
        return len(self.decays)

    def recurrence(self, position: int) -> Recurrence:
        """Each buffer is a decaying sum of earlier noise."""
        weights = -np.array(self.scales)
        return weights, np.diag(self.decays) + weights, np.ones(self.size)

    def matrix(self) -> np.ndarray:
        """Lower triangular Toeplitz."""
        powers = np.array(self.decays)[:, None] ** np.arange(self.steps - 1)
        return _toeplitz(np.concatenate([[1.0], np.array(self.scales) @ powers]), self.steps)


@dataclass(frozen=True)
class Tree:
    """Binary tree aggregation: a prefix sum is that of the few tree nodes that it is made of.

    Attributes:
        steps: length of the stream.
    """

    steps: int

    @property
    def size(self) -> int:
        """One node a level."""
        return self.steps.bit_length()

    def recurrence(self, position: int) -> Recurrence:
        """A step that completes a node of level k draws that node's noise, and takes back that of the k below it."""
        level = _level(position)
        weights = np.zeros(self.size)
        weights[:level] = -1.0
        carry = np.eye(self.size)
        carry[: level + 1] = 0.0
        return weights, carry, np.eye(self.size)[level]

    def matrix(self) -> np.ndarray:
        """A row for the node that each step completes: 1 at the steps below it."""
        rows = np.arange(self.steps)
        widths = np.array([2 ** _level(int(t)) for t in rows])
        return ((rows[:, None] - rows < widths[:, None]) & (rows <= rows[:, None])).astype(float)


def _level(position: int) -> int:
    """Level of the largest tree node that a step completes: how often its number, from 1, is even."""
    number = position + 1
    return (number & -number).bit_length() - 1


@dataclass(frozen=True)
class StrategyRow:
    """The place of a step in a stream of correlated noise.

    Attributes:
        strategy: of the stream.
        position: of the step in it, from 0; a step at 0 begins a stream.
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
        """Standard deviation of what is drawn, in a plan's noise: a record used once then costs one Gaussian."""
        return longest_column(self.strategy)

    @property
    def marginal(self) -> float:
        """Standard deviation of the step's noise as it is released, in the same units."""
        return self.fresh * float(_spread(self.strategy)[self.position])


@lru_cache(maxsize=4)
def gram(strategy: NoiseStrategy) -> np.ndarray:
    """What columns of a strategy have in common, C^T C [steps, steps]."""
    matrix = strategy.matrix()
    return matrix.T @ matrix


@lru_cache(maxsize=256)
def longest_column(strategy: NoiseStrategy) -> float:
    """Norm of the longest column: what one record in one step moves C S by, at most."""
    return float(np.linalg.norm(strategy.matrix(), axis=0).max())


@lru_cache(maxsize=64)
def _spread(strategy: NoiseStrategy) -> np.ndarray:
    """Standard deviations of C^-1 Z [steps]."""
    inverse = linalg.solve_triangular(strategy.matrix(), np.eye(strategy.steps), lower=True)
    return np.linalg.norm(inverse, axis=1)


class NoiseMemory:
    """What the noise of a step owes to that of earlier ones; as secret as the noise itself."""

    def __init__(self) -> None:
        """Before the first step of any stream."""
        self._last: StrategyRow | None = None
        self._kept: list[Tensor] = []

    def add(
        self, row: StrategyRow, sums: list[Tensor], stds: list[float], noise: Noise
    ) -> list[Float[Tensor, " size"]]:
        """Adds the noise of one step, and keeps of it what later ones need.

        What is released is round(S_t + std (weights M) + std z). Since M follows from earlier releases less their sums,
        it is a function of releases and of the step's row of C S plus fresh noise: as for independent noise, nothing
        depends on how the noise was rounded.

        Args:
            row: the place of the step.
            sums: of each block, float64.
            stds: of the fresh noise on each block.
            noise: secret source.

        Raises:
            ValueError: for exact noise, or a step that does not follow the one before.
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
        """What a checkpoint must keep; secret."""
        return self._last, [kept.cpu() for kept in self._kept]

    def load(self, state: tuple[StrategyRow | None, list[Tensor]], device: torch.device) -> None:
        """Takes the stream up where `state` was taken."""
        self._last, self._kept = state[0], [kept.to(device) for kept in state[1]]


def _toeplitz(column: np.ndarray, steps: int) -> np.ndarray:
    """Lower triangular, of a first column that may be shorter or longer."""
    full = np.zeros(steps)
    full[: len(column)] = column[:steps]
    lags = np.subtract.outer(np.arange(steps), np.arange(steps))
    return np.where(lags >= 0, full[np.maximum(lags, 0)], 0.0)


def prefix_errors(column: np.ndarray, steps: int) -> np.ndarray:
    """Standard deviations of the noise on prefix sums under a Toeplitz strategy, fresh noise having 1.

    Args:
        column: first of C, beginning with 1.
        steps: of the stream.
    """
    return np.sqrt(np.cumsum(np.cumsum(inverse_series(column, steps)) ** 2))


def inverse_series(series: np.ndarray, steps: int) -> np.ndarray:
    """The first coefficients of 1 / series."""
    impulse = np.zeros(steps)
    impulse[0] = 1.0
    return np.asarray(signal.lfilter([1.0], series, impulse))
