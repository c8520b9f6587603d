"""Covariance of a normal distribution from few vectors: shrunk, plus a diagonal, never as a full matrix.

Ledoit & Wolf, "A well-conditioned estimator for large-dimensional covariance matrices", Journal of Multivariate
Analysis 2004: (1 - d) S + d mu I, with the weight d that minimises the expected squared error. With Q vectors in m
dimensions only Q x Q products of S are needed, and the inverse of a diagonal plus rank Q is that of a Q x Q matrix
(Woodbury).
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ..threat_model.attack_errors import NotApplicable

_COLUMNS = 2**14  # in float64 at a time: rows may be float32 of millions of coordinates


def shrinkage(centred: Float[Tensor, "q m"]) -> tuple[float, float]:
    """Returns Ledoit and Wolf's weight of the identity, in [0, 1], and its scale, the mean variance.

    Args:
        centred: vectors less their mean.
    """
    q, m = centred.shape
    lengths = _gram(centred, centred.new_ones(m, dtype=torch.float64))
    scale = float(lengths.trace()) / (q * m)
    # Squared Frobenius norms over m: of S, of S - mu I, and of the error of S that single vectors add.
    of_s = float(lengths.square().sum()) / (q * q * m)
    away = of_s - scale * scale
    error = (float(lengths.diag().square().sum()) / (q * m) - of_s) / q
    return (min(error / away, 1.0) if away > 0 else 1.0), scale


@dataclass(frozen=True)
class ShrunkGaussian:
    """Covariance Sigma = D + U^T U of a normal distribution, and products with its inverse.

    Attributes:
        diagonal: D, positive.
        factor: U.
        root: lower Cholesky factor of I + U D^-1 U^T.
    """

    diagonal: Float[Tensor, " m"]
    factor: Float[Tensor, "q m"]
    root: Float[Tensor, "q q"]

    @classmethod
    def of_sums(cls, vectors: Float[Tensor, "q m"], count: float, noise_std: Float[Tensor, " m"]) -> "ShrunkGaussian":
        """Estimates the covariance of the sum of `count` independent vectors like these, plus noise.

        Args:
            vectors: at least two.
            count: number of summands, at least 0, not necessarily whole.
            noise_std: standard deviation of the sum's noise.

        Raises:
            NotApplicable: too few vectors, vectors that are all alike, or a coordinate without any variance.
        """
        if len(vectors) < 2:
            raise NotApplicable(f"a covariance must be of at least 2 vectors, got {len(vectors)}")
        centred = vectors - vectors.mean(0)
        # Rounding of the difference to the mean is no spread.
        if float(centred.square().mean()) <= 1e-12 * float(vectors.square().mean()):
            raise NotApplicable("a covariance must be of vectors that differ, and those of the public examples do not")
        weight, scale = shrinkage(centred)
        diagonal = noise_std.double().square() + count * weight * scale
        if not (diagonal > 0).all():
            raise NotApplicable(
                "a sum must vary in every coordinate to be compared with, by its noise or by the others"
            )
        factor = centred * (count * (1 - weight) / len(vectors)) ** 0.5
        inner = _gram(factor, 1 / diagonal)
        identity = torch.eye(len(inner), dtype=inner.dtype, device=inner.device)
        return cls(diagonal, factor, torch.linalg.cholesky(identity + inner))

    def solved(self, vector: Float[Tensor, " m"]) -> Float[Tensor, " m"]:
        """Returns the inverse of the covariance times a vector, float64."""
        scaled = vector.double() / self.diagonal
        inside = torch.cholesky_solve(self._products(scaled[None]).T, self.root)[:, 0]
        parts = [inside @ part.double() for part in self.factor.split(_COLUMNS, dim=1)]
        return scaled - torch.cat(parts) / self.diagonal

    def squared_lengths(self, rows: Float[Tensor, "n m"]) -> Float[Tensor, " n"]:
        """Returns v^T Sigma^-1 v of each row, float64."""
        scaled = rows.double() / self.diagonal
        inside = torch.linalg.solve_triangular(self.root, self._products(scaled).T, upper=False)
        return (scaled * rows.double()).sum(1) - inside.square().sum(0)

    def _products(self, rows: Float[Tensor, "n m"]) -> Float[Tensor, "n q"]:
        columns = zip(rows.split(_COLUMNS, dim=1), self.factor.split(_COLUMNS, dim=1), strict=True)
        total = rows.new_zeros(len(rows), len(self.factor))
        for own, factor in columns:
            total = total + own @ factor.double().T
        return total


def _gram(rows: Float[Tensor, "q m"], weight: Float[Tensor, " m"]) -> Float[Tensor, "q q"]:
    total = weight.new_zeros(len(rows), len(rows))
    for part, own in zip(rows.split(_COLUMNS, dim=1), weight.split(_COLUMNS), strict=True):
        wide = part.double()
        total = total + (wide * own) @ wide.T
    return total
