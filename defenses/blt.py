"""Buffered linear Toeplitz (BLT) noise: correlated over the whole run, with a few vectors of memory.

McMahan, Xu & Zhang, "A Hassle-free Algorithm for Strong Differential Privacy in Federated Learning Systems", EMNLP 2024
industry track, after Dvijotham, McMahan, Pillutla, Steinke & Thakurta, "Efficient and Near-Optimal Noise Generation for
Streaming Differential Privacy", FOCS 2024. The first column of C is 1 and then a sum of geometric series, one per
buffer; a buffer is a decaying sum of earlier noise, a fraction of which each step cancels.
Deviation: scales and decays minimise the mean squared error of prefix sums for a record that is used once (by L-BFGS,
adding a buffer at a time); the papers also minimise the largest error, and consider several uses.

Guarantee:
    A single Gaussian for the run, with the largest sensitivity over the steps in which the sampler may use a record;
    sampling does not amplify. Under `partition` a record is charged for the columns of C at its position in each epoch,
    which overlap.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy import optimize, signal

from .core import BoundKind, Buffered, Defense, Streamed, bounded, refuse_count

_MOST_BUFFERS = 10  # 15 take half a minute to fit, and 50 more than a hundred seconds


def blt(
    *,
    clip_norm: float = 1.0,
    buffers: int = 3,
    noise_multiplier: float | None = None,
    bound: BoundKind = "clip",
    regulariser: float | None = None,
) -> Defense:
    """DP-SGD with buffered linear Toeplitz noise; for `partition` sampling.

    Args:
        clip_norm: C, upper limit on the norm of a bounded gradient, L2, in gradient units.
        buffers: vectors kept from step to step, at most 10.
        noise_multiplier: multiplier of the Gaussian charged for a single use of a record; None until calibrated.
        bound: bounding method: "clip", "normalize" (AUTO-S, NSGD), "adaptive_weight" (DP-PSAC) or "adaptive", a clip
            norm that follows a quantile (in suites; `adapted` in Python).
        regulariser: parameter of "normalize" or "adaptive_weight", in gradient units; None for the papers' 0.01 and
            0.1.
    """
    refuse_count("buffers", buffers)
    if buffers > _MOST_BUFFERS:
        raise ValueError(f"buffers must be at most {_MOST_BUFFERS}, got {buffers}: each takes longer to fit")
    method = _Blt(bound=bounded(clip_norm, bound, regulariser), buffers=buffers)
    return Defense(method, noise_multiplier, name="blt")


@dataclass(frozen=True, kw_only=True)
class _Blt(Streamed):
    buffers: int

    def strategy(self, steps: int) -> Buffered:
        scales, decays = parameters(steps, self.buffers)
        return Buffered(steps, scales, decays)


@lru_cache(maxsize=64)
def parameters(steps: int, buffers: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Computes the scales and decays that minimise the mean squared error of prefix sums at fixed privacy.

    Args:
        steps: steps of the run.
        buffers: number of buffers.
    """
    starts = [_spread_out(steps, buffers)]
    if buffers > 1:
        # Starting points: the solution with a buffer less, plus a buffer of small scale.
        scales, decays = parameters(steps, buffers - 1)
        starts += [((*scales, 0.01), (*decays, decay)) for decay in (0.5, 0.9, 1 - max(steps, 2) ** -0.5)]
    points = [np.log([*scales, *(d / (1 - d) for d in decays)]) for scales, decays in starts]
    bounds = [(-14.0, 0.0)] * buffers + [(-9.0, 14.0)] * buffers  # scales to 1, decays from 10^-4 to 1 - 10^-6
    settings = {"method": "L-BFGS-B", "bounds": bounds, "options": {"ftol": 1e-13, "maxiter": 1000}}
    optimum = min(
        (optimize.minimize(_loss, x, args=(steps,), **settings) for x in points), key=lambda solution: solution.fun
    )
    best = _read(optimum.x)
    return tuple(map(float, best[0])), tuple(map(float, best[1]))


def _spread_out(steps: int, buffers: int) -> tuple[np.ndarray, np.ndarray]:
    """Starting point: decays from a step to the run, scales fitted to the square root of the prefix sum matrix."""
    decays = 1 - np.geomspace(0.8, 1 / max(steps, 2), buffers)
    root = np.cumprod(1 - 0.5 / np.arange(1, max(steps, 2)))
    scales = np.linalg.lstsq((decays[:, None] ** np.arange(len(root))).T, root, rcond=None)[0]
    return np.clip(scales, 1e-3, 1.0), decays


def _read(point: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    scales, odds = np.split(np.exp(point), 2)
    return scales, odds / (1 + odds)


def _loss(point: np.ndarray, steps: int) -> float:
    """Logarithm of the mean squared error of prefix sums at fixed privacy."""
    scales, decays = _read(point)
    column = np.concatenate([[1.0], scales @ decays[:, None] ** np.arange(steps - 1)])
    # Ratio of polynomials: the roots of the denominator are the decays.
    below = np.poly(decays)
    above = below.copy()
    for number, scale in enumerate(scales):
        above[1:] += scale * np.poly(np.delete(decays, number))
    impulse = np.zeros(steps)
    impulse[0] = 1.0
    with np.errstate(over="ignore", invalid="ignore"):  # for scales so large that the inverse diverges
        noise = signal.lfilter(below, np.convolve(above, [1.0, -1.0]), impulse)
        error = float((np.arange(steps, 0, -1) * noise) @ noise)
    return float(np.log(error) + np.log(column @ column)) if 0 < error < 1e200 else 500.0
