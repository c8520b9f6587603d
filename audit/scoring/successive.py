"""Cosine of successive updates: how alike what a step releases is to what the step before released.

"DPDR: Gradient Decomposition and Reconstruction for Differentially Private Deep Learning", arXiv:2406.02744, rests on
it: where gradients of successive steps point the same way, as is said of early training, the last release tells most of
the next. Measured is the released update, in the space of the parameters: what an observer of updates decodes, whatever
a step was released as. `sgd` adds no noise, so that its updates are the gradients that the claim is about; independent
noise alone has a cosine of about 0.

Deviation: of a defense with noise this is how alike the releases are, and not the gradients under them, which are
private.
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

from leakbench.leaderboard.records.record import Metric

BLOCKS = 20
"""Blocks of successive pairs that an interval is over, at most: more of them are shorter, and depend on one another."""

SHORTEST = 10
"""Pairs in a block, at least, unless there would be fewer than two blocks."""


class SuccessiveCosines:
    """The cosine of each update and the one before, taken as a run goes; a `Meter` of `leakbench.defenses.core`.

    Only the direction of the last update is kept, and two numbers a step, on the device of the updates: to read one
    there at every step would hold the run up.
    """

    def __init__(self, steps: int) -> None:
        """Nothing is known yet.

        Args:
            steps: of the run.
        """
        self._cosines = torch.full((steps,), math.nan)
        self._norms = torch.zeros(steps)
        self._direction: Tensor | None = None

    def add(self, step: int, update: Float[Tensor, " dim"]) -> None:
        """Takes in the update of a step; of a zero update there is no direction, and no cosine on either side."""
        if self._cosines.device != update.device:
            self._cosines, self._norms = self._cosines.to(update.device), self._norms.to(update.device)
        norm = torch.linalg.vector_norm(update)
        direction = update / norm  # NaN where the norm is 0, and so is every cosine with it
        self._norms[step] = norm
        if self._direction is not None:
            self._cosines[step] = torch.dot(direction, self._direction.to(direction))
        self._direction = direction

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"cosines": self._cosines, "norms": self._norms, "direction": self._direction}

    def load(self, state: dict[str, Any]) -> None:
        """Goes on from a checkpoint."""
        self._cosines, self._norms, self._direction = state["cosines"], state["norms"], state["direction"]

    def score(self) -> Metric:
        """The metric `successive_cosine` of a finished run."""
        norms, cosines = (values.cpu().double().numpy() for values in (self._norms, self._cosines))
        # The first step has none before it, in this run.
        return score_successive(cosines[1:], norms)


def score_successive(cosines: Float[ndarray, " pairs"], norms: Float[ndarray, " steps"]) -> Metric:
    """The mean over steps of the cosine of an update and the one before.

    The interval is one of Student's t over the means of blocks of successive pairs: neighbouring cosines share an
    update, and training drifts, so that pairs are not independent, while means of long blocks nearly are. What the
    cosine loses over a whole training is between the blocks and widens it, which errs on the safe side. It covers the
    mean over the steps of a training like this one: over seeds, boards have their own.

    Args:
        cosines: of each step but the first with the step before, in the order of steps; NaN where either update has no
            direction.
        norms: of all updates, in gradient units.

    Returns:
        The mean, whose n is the number of pairs; `detail` has also those that were left out, and the means over the
        first and the last tenth of the steps. Without a value where an update is not finite, or two pairs are not left.
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
    # Rounding may put a cosine of parallel updates past 1.
    cosines = np.clip(cosines, -1.0, 1.0)
    value, blocks = float(np.mean(cosines[known])), max(2, min(BLOCKS, n // SHORTEST))
    low, high = block_interval(cosines[known], blocks)
    tenth = max(1, steps // 10)
    detail: dict[str, float | int | str | None] = {
        "pairs": n,
        "left_out": len(cosines) - n,
        "zero_updates": zero,
        "first_tenth": _mean(cosines[:tenth]),
        "last_tenth": _mean(cosines[-tenth:]),
        "tenth_of_steps": tenth,
        "blocks": blocks,
        "method": "t interval over means of blocks of successive steps",
    }
    return Metric(value=value, low=max(-1.0, low), high=min(1.0, high), n=n, better="higher", detail=detail)


def block_interval(values: Float[ndarray, " n"], blocks: int) -> tuple[float, float]:
    """A 95 % interval for the mean of values that depend on their neighbours, by the method of batch means.

    Args:
        values: in their order; at least as many as there are blocks.
        blocks: of equal length, up to one value; at least two.
    """
    means = [float(np.mean(block)) for block in np.array_split(values, blocks)]
    half = float(stats.t.ppf(0.975, blocks - 1) * np.std(means, ddof=1) / math.sqrt(blocks))
    value = float(np.mean(values))
    return value - half, value + half


def _mean(values: Float[ndarray, " n"]) -> float | None:
    """The mean of those that are numbers; None where none is."""
    known = values[np.isfinite(values)]
    return float(np.mean(known)) if len(known) else None
