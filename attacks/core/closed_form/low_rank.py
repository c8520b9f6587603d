"""Matrices of low rank: the number of directions of a gradient, and completion from some of its entries.

The gradient of a linear layer's weights is a sum of an outer product per example, so its rank is at most the size of
the batch. Without noise the remaining singular values are rounding. Noise fills all directions alike, and its largest
singular value is known (Marchenko & Pastur 1967): directions above it are signal (Gavish & Donoho, "The optimal hard
threshold for singular values is 4/sqrt(3)", IEEE Trans. Inf. Theory 2014, whose rule for unknown noise is used). A
matrix of low rank is determined by few of its entries: it has b (m + n - b) degrees of freedom.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..threat_model.attack_errors import NotApplicable

HELD_OUT = 0.05
"""Fraction of known entries that a completion is tested on."""

ENTRIES_PER_UNKNOWN = 1.2
"""Known entries per degree of freedom, below which a rank is not tried, because any values would fit."""

PREDICTS = 0.5
"""Largest relative error on held-out entries of an accepted completion under noise."""

SETTLED = 20
"""Steps of alternating least squares before slow progress may end the fit."""


@dataclass(frozen=True, kw_only=True)
class LowRank:
    """Matrix as left @ right, up to rounding or noise.

    Attributes:
        left: float64 [m, b], orthonormal columns.
        right: float64 [b, n].
        error: standard deviation of an entry of `left`, by noise or rounding.
        exact: whether the remainder of the matrix is only rounding.
    """

    left: Tensor
    right: Tensor
    error: float
    exact: bool

    @property
    def rank(self) -> int:
        """Number of directions."""
        return self.left.shape[1]


def rounding_floor(shape: torch.Size, eps: float) -> float:
    """Returns a bound on the singular values of rounding errors, relative to the largest singular value."""
    # Rounding errors of size eps act as noise, with a largest singular value of about sqrt(m) + sqrt(n); the factor 8
    # covers errors of the sums before.
    return 8 * eps * math.sqrt(max(shape))


def factorised(matrix: Tensor, eps: float) -> LowRank:
    """Factorises a matrix into its directions above rounding, or above noise if it has full rank.

    Args:
        matrix: [m, n].
        eps: relative rounding of its entries, that of the dtype in which it was released.

    Raises:
        NotApplicable: no direction stands above.
    """
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    if not values[:1].any():
        raise NotApplicable("the gradient of the layer must not be zero everywhere: no neuron was active")
    floor = rounding_floor(matrix.shape, eps) * values[0]
    rank = int((values > floor).sum())
    exact = rank < len(values)
    if exact:
        # Rounding is measured and not bounded, because the thresholds of zeros derive from it.
        scale = float(values[rank].clamp(min=float(values[0]) * eps / 8)) / math.sqrt(max(matrix.shape))
    else:
        rank, scale = _above_noise(values, matrix.shape)
    if rank == 0:
        raise NotApplicable(
            f"the gradient of the layer must be of lower rank than {len(values)}, got no direction that stands out: "
            "it is noise, or of a batch larger than the layer"
        )
    return LowRank(
        left=left[:, :rank],
        right=values[:rank, None] * right[:rank],
        error=scale / float(values[rank - 1]),
        exact=exact,
    )


def _above_noise(values: Tensor, shape: torch.Size) -> tuple[int, float]:
    """Returns the number of singular values above noise of unknown size, and the noise's standard deviation."""
    beta = min(shape) / max(shape)
    omega = 0.56 * beta**3 - 0.95 * beta**2 + 1.82 * beta + 1.43
    best = math.sqrt(2 * (beta + 1) + 8 * beta / (beta + 1 + math.sqrt(beta**2 + 14 * beta + 1)))
    threshold = omega * values.median()
    return int((values > threshold).sum()), float(threshold) / (best * math.sqrt(max(shape)))


@dataclass(frozen=True, kw_only=True)
class Completion:
    """Low-rank matrix completed from some of its entries.

    Attributes:
        matrix: float64 [m, n]; the known entries as given if these are exact, else as fitted.
        rank: the accepted rank.
        noise: standard deviation of the known entries about the fit, by held-out entries; 0 if it is rounding.
        share: share of the entries that were known.
    """

    matrix: Tensor
    rank: int
    noise: float
    share: float

    def directions(self, eps: float, rows: Tensor, columns: Tensor) -> LowRank:
        """Factorises the submatrix of some rows and columns.

        Args:
            eps: relative rounding of known entries.
            rows: bool [m].
            columns: bool [n].
        """
        matrix = self.matrix[rows][:, columns]
        if self.noise == 0:
            return factorised(matrix, eps)
        left, values, right = torch.linalg.svd(matrix, full_matrices=False)
        rank = min(self.rank, len(values))
        # For an entry of `left`: the noise of the known entries of its row, over the length of the direction.
        error = self.noise / (math.sqrt(self.share) * float(values[rank - 1].clamp(min=1e-300)))
        return LowRank(left=left[:, :rank], right=values[:rank, None] * right[:rank], error=error, exact=False)


def completed(
    matrix: Tensor, known: Tensor, eps: float, generator: torch.Generator, *, most: int, iterations: int = 600
) -> Completion:
    """Completes a matrix of low rank from some of its entries, by alternating least squares with extrapolation.

    Ranks are tried from 1 upwards. The first that predicts held-out entries up to rounding is accepted, and fitted
    again to all entries. Under noise none does, and the rank with the smallest error is accepted.

    Args:
        matrix: [m, n]; entries that are not known are not read.
        known: bool [m, n].
        eps: relative rounding of the entries.
        generator: source of the held-out entries.
        most: largest rank that is tried.
        iterations: largest number of iterations of each fit.

    Raises:
        NotApplicable: no rank predicts the held-out entries, with the number of entries for each unknown.
    """
    values, weights = torch.where(known, matrix, 0.0).double(), known.double()
    draws = torch.rand(known.shape, generator=generator, dtype=torch.float64).to(values.device)
    held_out = known & (draws < HELD_OUT)
    fitted_to = weights * ~held_out
    scale = values[held_out].square().mean().sqrt() if bool(held_out.any()) else values.new_ones(())
    # Residual of an entry that rounding may leave, relative to the entries: fits end a little above it.
    enough = max(1e-9, 100 * eps)
    share = float(weights.mean())
    entries, tried, best, right = int(known.sum()), 0, (math.inf, 0), values[:0]
    for rank in range(1, most + 1):
        if entries < ENTRIES_PER_UNKNOWN * unknowns(known.shape, rank) or not bool(held_out.any()):
            break
        tried = rank
        left, right = _fit(values, fitted_to, rank, iterations, enough)
        off = (values - left @ right)[held_out]
        missed = float(off.square().mean().sqrt() / scale)
        if missed < 100 * enough:
            left, right = _fit(values, weights, rank, iterations, 0.0, start=right)
            return Completion(matrix=torch.where(known, values, left @ right), rank=rank, noise=0.0, share=share)
        best = min(best, (missed, rank))
        # Ranks far beyond the best fit noise, and predict worse and worse.
        if rank >= best[1] + 3 and best[0] < PREDICTS:
            break
    missed, rank = best
    if missed < PREDICTS:
        left, right = _fit(values, weights, rank, iterations, 0.0)
        return Completion(matrix=left @ right, rank=rank, noise=missed * float(scale), share=share)
    more = unknowns(known.shape, tried + 1)
    raise NotApplicable(
        f"the {entries} of {known.numel()} released entries of the layer's gradient must complete to a matrix of low "
        f"rank; none of rank up to {tried} predicts entries that were held out, and rank {tried + 1} has {more} "
        "unknowns"
    )


def unknowns(shape: torch.Size, rank: int) -> int:
    """Returns the degrees of freedom of a matrix of given rank."""
    return rank * (shape[0] + shape[1] - rank)


def _fit(
    values: Tensor, weights: Tensor, rank: int, iterations: int, enough: float, start: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Fits both factors to the given entries by alternating least squares with extrapolation, until progress stalls."""
    # Zeros in place of unknown entries: the directions are about right, if there are enough entries.
    right = torch.linalg.svd(values * weights, full_matrices=False).Vh[:rank] if start is None else start
    size = (values * weights).norm()
    ahead, left, before = right, _side(values, weights, right), math.inf
    for number in range(iterations):
        tried = _side(values, weights, ahead)
        fresh = _side(values.T, weights.T, tried.T).T
        residual = float(((values - tried @ fresh) * weights).norm() / size)
        if residual > before and ahead is not right:
            ahead = right  # the extrapolation overshot: repeat from the last accepted point
            continue
        slow = before - residual < 1e-6 * residual
        # The next step is extrapolated: plain alternation is slow in narrow valleys.
        ahead = fresh + min(0.9, number / (number + 3)) * (fresh - right)
        left, right, before = tried, fresh, residual
        if residual <= enough or (slow and number > SETTLED):
            break
    return left, right


def _side(values: Tensor, weights: Tensor, right: Tensor) -> Tensor:
    """Returns the least-squares left factor for a right factor [b, n]: a system of b unknowns for each row."""
    rank = right.shape[0]
    pairs = (right[:, None] * right[None]).reshape(rank * rank, -1)
    systems = (weights @ pairs.T).view(-1, rank, rank)
    # A row with fewer entries than unknowns takes the shortest of its solutions.
    small = 1e-14 * systems.diagonal(dim1=1, dim2=2).sum(dim=1).clamp(min=1e-300)
    systems = systems + small[:, None, None] * torch.eye(rank, dtype=values.dtype, device=values.device)
    factor = torch.linalg.cholesky_ex(systems).L
    left = torch.cholesky_solve((values * weights @ right.T)[..., None], factor)[..., 0]
    # Iterative refinement on the residual, because normal equations square the condition number.
    residual = (values - left @ right) * weights
    return left + torch.cholesky_solve((residual @ right.T)[..., None], factor)[..., 0]
