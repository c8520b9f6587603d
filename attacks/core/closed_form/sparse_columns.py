"""Sparse columns of a low-rank factorisation: directions q for which left @ q is zero in many rows.

The gradient of a linear layer is D X^T, and a ReLU makes D zero wherever a neuron is inactive for an example. Singular
vectors give D up to an invertible matrix, D = left @ Q. Sparsity identifies Q: a combination of several columns of D is
zero only in rows in which all of them are zero, or happen to cancel. The sparsest directions are therefore the columns,
and a greedy choice of independent directions finds them once all are among the candidates.

Candidates come from two sources: kernels of b - 1 random rows (Dimitrov et al., "SPEAR", NeurIPS 2024), or a search for
directions of small L1 norm on the sphere, as in dictionary learning.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .low_rank import LowRank

DirectionSource = Callable[[int], Tensor]
"""Number of draws -> unit directions [k, b], candidates for columns; fewer than draws if some gave no direction."""

SPARSE = 0.1
"""Fraction of the rows, beyond the b - 1 that any direction can make zero, that a candidate must make zero at first."""

EXTRA = 3
"""Number of such rows that suffices later on, without noise: that many are not zero by chance."""

SAME = 1e-6
"""Candidates whose cosine is within this distance of 1 are equal, without noise."""

POOL = 4
"""Number of candidates kept for each column; stronger candidates replace weaker ones."""

FITTED = 512
"""Largest number of candidates of a block that are fitted."""


@dataclass(frozen=True, kw_only=True)
class Scales:
    """Thresholds below which a number counts as zero.

    Attributes:
        rough: threshold for left @ q if q solves only b - 1 equations, which magnifies their error.
        fine: threshold for left @ q if q was fitted to all rows that it makes zero.
        same: 1 less the cosine of two candidates that are the same.
        apart: smallest distance of an independent candidate from the span of the others.
    """

    rough: float
    fine: float
    same: float
    apart: float


def scales(factors: LowRank) -> Scales:
    """Returns thresholds from the error of the directions: entries of left @ q have mean square 1 / m."""
    typical = 1 / math.sqrt(len(factors.left))
    if factors.exact:
        rough = min(max(100 * factors.error, 1e-6 * typical), 0.1 * typical)
        return Scales(rough=rough, fine=min(max(30 * factors.error, 1e-9 * typical), rough), same=SAME, apart=1e-3)
    # Under noise a rough direction has an error of several standard deviations; zeros above 0.3 of a typical entry are
    # meaningless.
    rough = min(6 * factors.error, 0.3 * typical)
    return Scales(rough=rough, fine=min(3 * factors.error, 0.3 * typical), same=0.02, apart=0.1)


def kernels(left: Tensor, generator: torch.Generator, outputs: Tensor | None = None) -> DirectionSource:
    """Returns a source of directions that are orthogonal to b - 1 random rows.

    A row helps to find an example's column if its neuron is inactive for that example; a row whose neuron is active for
    all examples never helps. The layer's outputs for an average of the batch indicate these rows. If inputs are alike,
    most neurons are active for all or for none, and few uniform draws succeed; so three of four draws are from the
    half, quarter or eighth of the rows with the lowest outputs.

    Args:
        left: float64 [m, b]; rows of zeros are left out by the caller.
        generator: source of randomness, on the CPU.
        outputs: [m], outputs of the rows' neurons for some average of the inputs; None to draw from all rows alike.

    Returns:
        Function of the number of draws; draws whose rows are linearly dependent give no direction.
    """
    rows, rank = left.shape
    place = None if outputs is None else outputs.argsort().argsort().cpu()
    # A window of hardly more rows than are drawn would repeat the same directions.
    windows = torch.tensor([max(rows >> halvings, min(rows, 3 * rank)) for halvings in range(4)])

    def draw(count: int) -> Tensor:
        order = torch.rand(count, rows, generator=generator)
        if place is not None:
            window = windows[torch.randint(len(windows), (count,), generator=generator)]
            order = order - (place >= window[:, None]).to(order)
        chosen = order.topk(rank - 1, dim=1, sorted=False).indices if rank > 1 else order.new_zeros(count, 0).long()
        closing = torch.randn(count, 1, rank, generator=generator, dtype=left.dtype).to(left.device)
        systems = torch.cat([left[chosen.to(left.device)], closing], dim=1)
        # A random last row is set to 1 on the kernel, so that a single solve finds the kernel; the pivots show whether
        # the rows are independent.
        factors, pivots, _ = torch.linalg.lu_factor_ex(systems)
        ends = factors.diagonal(dim1=1, dim2=2).abs()
        enough = ends.amin(dim=1) > 1e-10 * ends.amax(dim=1)
        right_side = torch.zeros(int(enough.sum()), rank, 1, dtype=left.dtype, device=left.device)
        right_side[:, -1] = 1
        directions = torch.linalg.lu_solve(factors[enough], pivots[enough], right_side)[..., 0]
        return directions / directions.norm(dim=1, keepdim=True)

    return draw


def small_on_sphere(left: Tensor, generator: torch.Generator, *, iterations: int) -> DirectionSource:
    """Returns a source of local minima of sum |left @ q| over unit vectors, each from a random start.

    Subgradient steps on the sphere come first. Iteratively reweighted least squares then sharpens the minimum: rows
    with a small |row @ q| get a larger weight, w^2 / ((row @ q)^2 + w^2), and q is the direction along which the
    weighted rows are smallest. The width w shrinks.

    Args:
        left: float64 [m, b], orthonormal columns.
        generator: source of randomness, on the CPU.
        iterations: subgradient steps of each start.

    Returns:
        Function of the number of starts.
    """
    rows, rank = left.shape

    def draw(count: int) -> Tensor:
        start = torch.randn(count, rank, generator=generator, dtype=left.dtype).to(left.device)
        q = start / start.norm(dim=1, keepdim=True)
        # Subgradient steps on the sphere are cheap, and select the minimum.
        for step in range(iterations):
            slope = torch.sign(q @ left.T) @ left
            slope = slope - (slope * q).sum(dim=1, keepdim=True) * q
            # Step lengths decay geometrically, which suits sharp minima.
            length = 0.5 * 0.01 ** (step / iterations)
            q = q - length * slope / slope.norm(dim=1, keepdim=True).clamp(min=1e-12)
            q = q / q.norm(dim=1, keepdim=True)
        width = 0.1 / math.sqrt(rows)
        for _ in range(6):
            weights = width**2 / ((q @ left.T).square() + width**2)
            q = _least(left, weights)[0]
            width *= 0.3
        return q

    return draw


def fitted(left: Tensor, directions: Tensor, sizes: Scales, least: int) -> tuple[Tensor, Tensor]:
    """Fits each candidate to all rows that it makes zero, and returns candidates and strengths.

    The number of zeros does not tell a column from a mixture: rows whose neurons are active for all examples span at
    most as many dimensions as the next layer is wide, and a direction orthogonal to all of them has many zeros, but is
    determined poorly. The zero rows of a true column determine it in every other direction. The strength of a candidate
    is therefore the second smallest eigenvalue of the normal matrix of its zero rows.

    Args:
        left: float64 [m, b], about orthonormal columns.
        directions: unit [k, b].
        sizes: thresholds of zero.
        least: number of zeros that a candidate needs.

    Returns:
        Directions [k', b] and strengths [k'] in [0, 1], the strongest first, each once.
    """
    zero = (directions @ left.T).abs() <= sizes.rough
    # The first candidates and not the sparsest, which may all be the same column.
    keep = (zero.sum(dim=1) >= least).nonzero()[:FITTED, 0]
    directions, zero = directions[keep], zero[keep]
    strengths = left.new_zeros(len(directions))
    for threshold in (sizes.rough, sizes.fine, sizes.fine):
        directions, strengths = _least(left, zero.to(left.dtype))
        zero = (directions @ left.T).abs() <= threshold
    keep = zero.sum(dim=1) >= least
    return merged(directions[keep], strengths[keep], sizes.same)


def merged(directions: Tensor, strengths: Tensor, same: float) -> tuple[Tensor, Tensor]:
    """Sorts directions by strength, and keeps the first of those that are equal up to sign."""
    order = strengths.argsort(descending=True, stable=True)
    directions, strengths = directions[order], strengths[order]
    alike = (directions @ directions.T).abs() > 1 - same
    first = ~alike.triu(diagonal=1).any(dim=0)
    return directions[first], strengths[first]


def independent(directions: Tensor, most: int, apart: float) -> Tensor:
    """Returns indices of up to `most` directions, each independent of those chosen before it, in order."""
    chosen, remainders = [], directions.clone()
    # Each step chooses the first direction that is left, and projects it out of all others.
    for _ in range(most):
        distance = remainders.norm(dim=1)
        far = (distance > apart).nonzero()
        if not len(far):
            break
        pick = int(far[0])
        chosen.append(pick)
        unit = remainders[pick] / distance[pick]
        remainders = remainders - (remainders @ unit)[:, None] * unit
    return torch.tensor(chosen, dtype=torch.int64, device=directions.device)


def filled(directions: Tensor, rank: int) -> Tensor:
    """Returns a basis [b, b] of the given directions, as columns, and their orthogonal complement."""
    missing = rank - len(directions)
    if not missing:
        return directions.T
    if not len(directions):
        return torch.eye(rank, dtype=directions.dtype, device=directions.device)
    orthogonal = torch.linalg.svd(directions, full_matrices=True).Vh[len(directions) :]
    return torch.cat([directions, orthogonal]).T


def _least(left_factor: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Returns unit vectors [k, b] with the smallest weighted sum of squares, and the second smallest eigenvalue [k].

    Args:
        left_factor: [m, b], b at least 2.
        weights: weights of the rows [k, m].
    """
    rank = left_factor.shape[1]
    pairs = (left_factor[:, :, None] * left_factor[:, None]).reshape(len(left_factor), -1)
    values, vectors = torch.linalg.eigh((weights @ pairs).view(-1, rank, rank))
    return vectors[..., 0], values[..., 1]
