"""Banded matrix factorisation: correlated noise from a banded strategy matrix, amplified by cyclic Poisson sampling.

Choquette-Choo, Ganesh, McKenna, McMahan, Rush, Thakurta & Xu, "(Amplified) Banded Matrix Factorization: A Unified
Approach to Private Training", NeurIPS 2023 (Algorithm 9, as jax_privacy numbers it). The noise of the steps is C^-1 Z,
with Z independent and C, the strategy matrix, lower triangular with `bands` diagonals: a step's noise is its own draw
minus fractions of the noise of the last `bands` - 1 steps. Columns of C at least `bands` apart do not overlap, so a
record whose group is sampled every `bands` steps is charged as under Poisson sampling within its group.
Deviation: C is Toeplitz, and its `bands` coefficients minimise the mean squared error of the prefix sums (by L-BFGS on
the exact gradient), as in McKenna, "Scaling up the Banded Matrix Factorization Mechanism for Large Scale Differentially
Private ML", 2024.

Guarantee:
    Under `cyclic` sampling of at least `bands` groups: a Poisson-subsampled Gaussian per cycle, at the rate within a
    group. Under `partition` with epochs of at least `bands` steps: a Gaussian per epoch. Otherwise a single Gaussian
    for the run, with the largest sensitivity over the steps in which the sampler may use a record.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy import optimize, signal

from .core import Banded, BoundKind, Defense, Streamed, bounded, refuse_count


def band_mf(
    *,
    clip_norm: float = 1.0,
    bands: int = 8,
    noise_multiplier: float | None = None,
    bound: BoundKind = "clip",
    regulariser: float | None = None,
) -> Defense:
    """DP-SGD with noise of a banded strategy matrix; for `cyclic` sampling of `bands` groups, or `partition`.

    Args:
        clip_norm: C, upper limit on the norm of a bounded gradient, L2, in gradient units.
        bands: number of nonzero diagonals of C, including the main diagonal; 1 is DP-SGD.
        noise_multiplier: multiplier of the Gaussian charged for a single use of a record; None until calibrated.
        bound: bounding method: "clip", "normalize" (AUTO-S, NSGD), "adaptive_weight" (DP-PSAC) or "adaptive", a clip
            norm that follows a quantile (in suites; `adapted` in Python).
        regulariser: parameter of "normalize" or "adaptive_weight", in gradient units; None for the papers' 0.01 and
            0.1.
    """
    refuse_count("bands", bands)
    method = _BandMF(bound=bounded(clip_norm, bound, regulariser), bands=bands)
    return Defense(method, noise_multiplier, name="band_mf")


@dataclass(frozen=True, kw_only=True)
class _BandMF(Streamed):
    bands: int

    def strategy(self, steps: int) -> Banded:
        return Banded(steps, coefficients(steps, min(self.bands, steps)))


@lru_cache(maxsize=64)
def coefficients(steps: int, bands: int) -> tuple[float, ...]:
    """Computes the first column of C after its 1, to minimise the mean squared error of prefix sums at fixed privacy.

    Args:
        steps: number of steps of the run.
        bands: number of nonzero entries of the column.
    """
    if bands == 1:
        return ()
    # Starting point: the column of the full square root of the prefix sum matrix.
    root = np.cumprod(1 - 0.5 / np.arange(1, bands))
    # The first step of L-BFGS has the length of the unit. In a long run, most columns at distance 1 have noise that
    # grows without bound, and the search ends there at once: three units are tried, and the best result is kept.
    columns = [_search(root, steps, unit) for unit in (1.0, 0.1, 0.01)]
    return tuple(float(c) for c in min(columns, key=lambda behind: _loss(behind, steps)[0]))


def _search(start: np.ndarray, steps: int, unit: float) -> np.ndarray:
    """Returns the column found by L-BFGS from a starting point, with variables in multiples of `unit`."""

    def scaled(moved: np.ndarray) -> tuple[float, np.ndarray]:
        value, slopes = _loss(start + unit * moved, steps)
        return value, unit * slopes

    options = {"ftol": 1e-13}
    optimum = optimize.minimize(scaled, np.zeros_like(start), jac=True, method="L-BFGS-B", options=options)
    return start + unit * optimum.x


_UNSTABLE = 1e300
"""Loss of a column whose noise overflows float64, so large that the line search rejects it."""


def _loss(behind: np.ndarray, steps: int) -> tuple[float, np.ndarray]:
    """Logarithm of the mean squared error of prefix sums at fixed privacy, and its gradient."""
    with np.errstate(over="ignore", invalid="ignore"):
        value, slopes = _error(behind, steps)
    stable = np.isfinite(value) and bool(np.isfinite(slopes).all())
    return (value, slopes) if stable else (_UNSTABLE, np.zeros_like(behind))


def _error(behind: np.ndarray, steps: int) -> tuple[float, np.ndarray]:
    """Like `_loss`, but not finite if the noise overflows float64."""
    column = np.concatenate([[1.0], behind])
    impulse = np.zeros(steps)
    impulse[0] = 1.0
    # The noise of prefix sums has the series 1 / (c(x) (1 - x)), whose t-th coefficient enters steps - t of the sums.
    noise = np.asarray(signal.lfilter([1.0], np.convolve(column, [1.0, -1.0]), impulse))
    weighted = noise * np.arange(steps, 0, -1)
    error, square = float(weighted @ noise), float(column @ column)
    # d noise / d c_j is -noise * (1 / c), j steps later.
    change = np.asarray(signal.lfilter([1.0], column, noise))
    slopes = np.array([weighted[j:] @ change[: steps - j] for j in range(1, len(column))])
    return np.log(error) + np.log(square), 2 * behind / square - 2 * slopes / error
