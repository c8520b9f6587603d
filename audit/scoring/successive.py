"""Cosine of successive updates: similarity of each step's released update to the previous step's.

"DPDR: Gradient Decomposition and Reconstruction for Differentially Private Deep Learning", arXiv:2406.02744, rests on
this similarity: if gradients of successive steps point the same way, as claimed for early training, the last release
predicts most of the next. The cosine is that of released updates in parameter space, as an observer of updates decodes
them, for any form of release. `sgd` adds no noise, so its updates are the gradients of that claim; independent noise
alone has a cosine of about 0.

Deviation: for a defense with noise this measures the similarity of the releases, not of the private gradients under
them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from scipy import stats
from torch import Tensor

from leakbench.leaderboard.records.details import Detail
from leakbench.leaderboard.records.record import Metric

BLOCKS = 20
"""Largest number of blocks of successive pairs for an interval: shorter blocks depend on one another."""

SHORTEST = 10
"""Smallest number of pairs in a block, unless there would be fewer than two blocks."""


class SuccessiveCosines:
    """The cosine of each update with the previous one, computed during a run; a `Meter` of `leakbench.defenses.core`.

    Only the direction of the last update is kept, and two numbers per step, on the device of the updates: reading a
    value at every step would synchronise the device.
    """

    def __init__(self, steps: int) -> None:
        """Starts without values.

        Args:
            steps: number of steps of the run.
        """
        self._cosines = torch.full((steps,), math.nan)
        self._norms = torch.zeros(steps)
        self._direction: Tensor | None = None

    def add(self, step: int, update: Float[Tensor, " dim"]) -> None:
        """Adds the update of a step; a zero update has no direction, and no cosine on either side."""
        if self._cosines.device != update.device:
            self._cosines, self._norms = self._cosines.to(update.device), self._norms.to(update.device)
        norm = torch.linalg.vector_norm(update)
        direction = update / norm  # NaN for norm 0, as is every cosine with it
        self._norms[step] = norm
        if self._direction is not None:
            self._cosines[step] = torch.dot(direction, self._direction.to(direction))
        self._direction = direction

    def state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        return {"cosines": self._cosines, "norms": self._norms, "direction": self._direction}

    def load(self, state: dict[str, Any]) -> None:
        """Resumes from a checkpoint."""
        self._cosines, self._norms, self._direction = state["cosines"], state["norms"], state["direction"]

    def score(self) -> Metric:
        """Returns the metric `successive_cosine` of a finished run."""
        norms, cosines = (values.cpu().double().numpy() for values in (self._norms, self._cosines))
        # The first step has no predecessor in this run.
        return score_successive(cosines[1:], norms)


def score_successive(cosines: Float[ndarray, " pairs"], norms: Float[ndarray, " steps"]) -> Metric:
    """Returns the mean over steps of the cosine between an update and the previous one.

    The interval is Student's t over the means of blocks of successive pairs: neighbouring cosines share an update, and
    training drifts, so pairs are dependent, while means of long blocks nearly are not. Drift of the cosine over a whole
    training is between the blocks and widens the interval, which is conservative. It covers the mean over the steps of
    a training like this one; the interval over seeds is computed by boards.

    Args:
        cosines: cosine of each step but the first with the previous step, in the order of steps; NaN if either update
            has no direction.
        norms: norms of all updates, in gradient units.

    Returns:
        The mean, whose n is the number of pairs; `detail` has also the number of excluded pairs, and the means over the
        first and the last tenth of the steps. No value if an update is not finite, or fewer than two pairs are left.
    """
    steps, undefined = len(norms), int((~np.isfinite(norms)).sum())
    known = np.isfinite(cosines)
    n, zero = int(known.sum()), int((norms == 0).sum())
    if undefined:
        reason = f"the update of {undefined} of {steps} steps is not finite: the model diverged"
        return Metric(value=None, n=n, better="higher", reason=reason)
    if n < 2:
        reason = (
            f"fewer than two pairs of successive updates that are not zero: {n} in {steps} steps, {zero} of them zero"
        )
        return Metric(value=None, n=n, better="higher", reason=reason)
    # Rounding may push a cosine of parallel updates beyond 1.
    cosines = np.clip(cosines, -1.0, 1.0)
    value, blocks = float(np.mean(cosines[known])), max(2, min(BLOCKS, n // SHORTEST))
    low, high = block_interval(cosines[known], blocks)
    tenth = max(1, steps // 10)
    detail = {
        "pairs": n,
        "left_out": len(cosines) - n,
        "zero_updates": zero,
        "first_tenth": _mean(cosines[:tenth]),
        "last_tenth": _mean(cosines[-tenth:]),
        "tenth_of_steps": tenth,
        "blocks": blocks,
        "method": "t interval over means of blocks of successive steps",
    }
    return Metric(value=value, low=max(-1.0, low), high=min(1.0, high), n=n, better="higher", detail=Detail(detail))


def block_interval(values: Float[ndarray, " n"], blocks: int) -> tuple[float, float]:
    """Returns a 95 % interval for the mean of serially dependent values, by the method of batch means.

    Args:
        values: in their order; at least as many as blocks.
        blocks: of equal length, up to one value; at least two.
    """
    means = [float(np.mean(block)) for block in np.array_split(values, blocks)]
    half = float(stats.t.ppf(0.975, blocks - 1) * np.std(means, ddof=1) / math.sqrt(blocks))
    value = float(np.mean(values))
    return value - half, value + half


def _mean(values: Float[ndarray, " n"]) -> float | None:
    """Returns the mean of the finite values; None if there are none."""
    known = values[np.isfinite(values)]
    return float(np.mean(known)) if len(known) else None
