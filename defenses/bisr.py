"""Banded inverse square root (BISR): correlated noise that is a moving average of the last few draws.

Kalinin, McKenna, Upadhyay & Lampert, "Back to Square Roots: An Optimal Bound on the Matrix Factorization Error for
Multi-Epoch Differentially Private SGD", 2025. The square root of the prefix sum matrix is Toeplitz, with the generating
function (1 - x)^(-1/2). Its inverse, (1 - x)^(1/2) = 1 - x / 2 - x^2 / 8 - .., is truncated after `bands` coefficients
and is C^-1, so that a step's noise is its own draw minus fixed fractions of the previous `bands` - 1 draws. Nothing is
optimised.

Guarantee:
    A single Gaussian for the run, with the largest sensitivity over the steps in which the sampler may use a record. C,
    the inverse of the truncated series, is not banded, so sampling does not amplify; under `partition` a record is
    charged for the columns of C at its position in each epoch.
"""

from dataclasses import dataclass

from .core import BandedInverse, BoundKind, Defense, Streamed, bounded, refuse_count


def bisr(
    *,
    clip_norm: float = 1.0,
    bands: int = 8,
    noise_multiplier: float | None = None,
    bound: BoundKind = "clip",
    regulariser: float | None = None,
) -> Defense:
    """DP-SGD with the noise of a banded inverse square root; for `partition` sampling.

    Args:
        clip_norm: C, upper limit on the norm of a bounded gradient, L2, in gradient units.
        bands: coefficients of the inverse, including its leading 1; 1 is DP-SGD.
        noise_multiplier: multiplier of the Gaussian charged for a single use of a record; None until calibrated.
        bound: bounding method: "clip", "normalize" (AUTO-S, NSGD), "adaptive_weight" (DP-PSAC) or "adaptive", a clip
            norm that follows a quantile (in suites; `adapted` in Python).
        regulariser: parameter of "normalize" or "adaptive_weight", in gradient units; None for the papers' 0.01 and
            0.1.
    """
    refuse_count("bands", bands)
    return Defense(_Bisr(bound=bounded(clip_norm, bound, regulariser), bands=bands), noise_multiplier, name="bisr")


@dataclass(frozen=True, kw_only=True)
class _Bisr(Streamed):
    bands: int

    def strategy(self, steps: int) -> BandedInverse:
        return BandedInverse(steps, coefficients(self.bands))


def coefficients(bands: int) -> tuple[float, ...]:
    """Computes the `bands` - 1 coefficients of (1 - x)^(1/2) after its leading 1."""
    column, last = [], 1.0
    for power in range(1, bands):
        last *= (power - 1.5) / power
        column.append(last)
    return tuple(column)
