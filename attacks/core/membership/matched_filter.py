"""Matched filter: three numbers per candidate and step instead of two vectors, enough for the likelihood ratio.

The matched filter of a signal v in Gaussian noise is the inner product with v, whitened (Neyman & Pearson 1933): the
log likelihood ratio of r ~ N(v, diag(s^2)) against r ~ N(0, diag(s^2)) is <v, r>_s - |v|_s^2 / 2 with <a, b>_s = sum_j
a_j b_j / s_j^2. Coordinates without noise have no likelihood ratio; there the distance of r from v decides.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class MatchedFilter:
    """Matched filter of each candidate, in order; all float64.

    Attributes:
        inner: <v, r>_s over coordinates with noise, with v its contribution and r the release less all other
            contributions.
        squared_norms: |v|_s^2 over the same coordinates.
        residuals: |r - v| / |v| over the coordinates without noise: 0 if the release shows exactly its contribution, 1
            if nothing; NaN if v is 0 there, or all coordinates have noise.
    """

    inner: Float[Tensor, " n"]
    squared_norms: Float[Tensor, " n"]
    residuals: Float[Tensor, " n"]

    @property
    def log_likelihood_ratio(self) -> Float[Tensor, " n"]:
        """Lambda in nats, given participation."""
        return self.inner - self.squared_norms / 2
