"""DP-SGD with a banded inverse square root: noise that takes back fixed shares of the last few draws.

Kalinin, McKenna, Upadhyay & Lampert, "Back to Square Roots: An Optimal Bound on the Matrix Factorization Error for
Multi-Epoch Differentially Private SGD", 2025. The matrix of prefix sums has the square root with first column
(1 - x)^(-1/2); its inverse, (1 - x)^(1/2) = 1 - x / 2 - x^2 / 8 - .., is cut off after `bands` coefficients, so that a
step's noise is what it draws less shares of what the steps before drew. Nothing is optimised.
Guarantee:
    One Gaussian for the run, by the steps that its sampler lets a record join. C, the inverse of the cut series, has no
    end, so that no sampling amplifies; under `partition` a record is charged for the columns of its place in each
    epoch.
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
        clip_norm: C, which no bounded gradient is longer than, L2, in gradient units.
        bands: coefficients of the inverse, its leading 1 counted; 1 is DP-SGD.
        noise_multiplier: what one use of a record is charged as; None until it is calibrated.
        bound: how a row is brought to that norm: "clip", "normalize" (AUTO-S, NSGD), "adaptive_weight" (DP-PSAC)
            or "adaptive", by which the clip norm follows a quantile (in suites; `adapted` in Python).
        regulariser: of "normalize" and "adaptive_weight", in gradient units; their papers' 0.01 and 0.1 if None.
    """
    refuse_count("bands", bands)
    return Defense(_Bisr(bound=bounded(clip_norm, bound, regulariser), bands=bands), noise_multiplier, name="bisr")


@dataclass(frozen=True, kw_only=True)
class _Bisr(Streamed):
    bands: int

    def strategy(self, steps: int) -> BandedInverse:
        return BandedInverse(steps, coefficients(self.bands))


def coefficients(bands: int) -> tuple[float, ...]:
    """Those of (1 - x)^(1/2) behind its 1, `bands` - 1 of them."""
    found, last = [], 1.0
    for power in range(1, bands):
        last *= (power - 1.5) / power
        found.append(last)
    return tuple(found)
