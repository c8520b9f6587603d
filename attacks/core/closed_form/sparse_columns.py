"""Sparse columns from a matrix of low rank: the directions q that make left @ q zero in many rows.

The gradient of a linear layer is D X^T, and ReLU makes D zero wherever a neuron is off for an example. Singular vectors
give D up to an invertible matrix, D = left @ Q, and Q is identified by its sparse columns: a combination of several
columns is zero only in rows in which all of them are, or happen to cancel. The directions that most rows hold at zero
are therefore the columns, and greedy choice of independent columns finds them once all are among the candidates.

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
"""Number of draws -> unit directions [k, b], some of which are columns; fewer if some draws gave no direction."""

SPARSE = 0.1
"""Fraction of the rows, beyond those that any direction can make zero, that must be zero for a candidate at first."""

EXTRA = 3
"""The same later on and without noise, as a number of rows: that many are not zero by chance."""

SAME = 1e-6
"""Candidates whose cosine is within this of 1 are the same, without noise."""

POOL = 4
"""Candidates kept for each column; stronger candidates replace weaker."""

FITTED = 512
"""Candidates of a block that are fitted."""


@dataclass(frozen=True, kw_only=True)
class Scales:
    """Sizes below which a number is zero.

    Attributes:
        rough: threshold for left @ q if q solves few equations and carries their error, magnified.
        fine: threshold for left @ q if q was fitted to all rows that it makes zero.
        same: 1 less the cosine of two candidates that are the same.
        apart: distance from the span of others of a candidate that adds a direction.
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
    # Under noise a rough direction is off by several errors; beyond 0.3 of a typical entry zeros mean nothing.
    rough = min(6 * factors.error, 0.3 * typical)
    return Scales(rough=rough, fine=min(3 * factors.error, 0.3 * typical), same=0.02, apart=0.1)


def kernels(left: Tensor, coins: torch.Generator, outputs: Tensor | None = None) -> DirectionSource:
    """Returns a source of directions that b - 1 random rows make zero.

    A row is useful for an example if its neuron is off for it, and a row that is on for all is useless. The layer's
    outputs for an average of the batch show which rows those are. If inputs are alike most rows are on for all or for
    none, and few draws from all rows succeed; so three of four draws are from the half, quarter or eighth of the rows
    with the lowest outputs.

    Args:
        left: float64 [m, b]; rows of zeros are left out by the caller.
        coins: generator, on the CPU.
        outputs: [m], outputs of the rows' neurons for some average of the inputs; None to draw from all rows alike.

    Returns:
        Function of the number of draws; directions of draws whose rows are of lower rank are left out.
    """
    rows, rank = left.shape
    place = None if outputs is None else outputs.argsort().argsort().cpu()
    # A window of few more rows than are drawn would give the same directions again and again.
    windows = torch.tensor([max(rows >> halvings, min(rows, 3 * rank)) for halvings in range(4)])

    def draw(count: int) -> Tensor:
        order = torch.rand(count, rows, generator=coins)
        if place is not None:
            window = windows[torch.randint(len(windows), (count,), generator=coins)]
            order = order - (place >= window[:, None]).to(order)
        chosen = order.topk(rank - 1, dim=1, sorted=False).indices if rank > 1 else order.new_zeros(count, 0).long()
        closing = torch.randn(count, 1, rank, generator=coins, dtype=left.dtype).to(left.device)
        systems = torch.cat([left[chosen.to(left.device)], closing], dim=1)
        # A last row at random is 1 on the kernel, so a single solve finds it; its pivots show whether the rows are
        # enough.
        factors, pivots, _ = torch.linalg.lu_factor_ex(systems)
        ends = factors.diagonal(dim1=1, dim2=2).abs()
        enough = ends.amin(dim=1) > 1e-10 * ends.amax(dim=1)
        right_side = torch.zeros(int(enough.sum()), rank, 1, dtype=left.dtype, device=left.device)
        right_side[:, -1] = 1
        directions = torch.linalg.lu_solve(factors[enough], pivots[enough], right_side)[..., 0]
        return directions / directions.norm(dim=1, keepdim=True)

    return draw


def small_on_sphere(left: Tensor, coins: torch.Generator, *, iterations: int) -> DirectionSource:
    """Returns a source of local minima of sum |left @ q| over unit vectors, each from a random start.

    Iteratively reweighted least squares: the weight of a row is 1 / |row @ q|, so that small rows are made smaller
    still, and q is the direction along which the weighted rows are smallest. Weights are bounded by a width that
    shrinks.

    Args:
        left: float64 [m, b], orthonormal columns.
        coins: generator, on the CPU.
        iterations: steps of each start.

    Returns:
        Function of the number of starts.
    """
    rows, rank = left.shape

    def draw(count: int) -> Tensor:
        # A random row of `left` rather than a random direction: it lies nearer to a column.
        start = torch.randn(count, rank, generator=coins, dtype=left.dtype).to(left.device)
        q = start / start.norm(dim=1, keepdim=True)
        # Gradient steps on the sphere first: cheap, and they decide which minimum it will be.
        for step in range(iterations):
            slope = torch.sign(q @ left.T) @ left
            slope = slope - (slope * q).sum(dim=1, keepdim=True) * q
            # The distance falls geometrically, as for sharp minima.
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
    """Fits candidates to all rows that they make zero, and returns their strengths.

    The number of zeros does not separate a column from a mixture: rows that are on for all examples lie in as few
    dimensions as the next layer is wide, and a direction across all of these has many zeros and is held by few others.
    Zeros hold a column in every other direction. The strength of a candidate is therefore that of the direction in
    which its zeros hold it least.

    Args:
        left: float64 [m, b], about orthonormal columns.
        directions: unit [k, b].
        sizes: thresholds of zero.
        least: number of zeros that a candidate needs.

    Returns:
        Directions [k', b] and strengths [k'] in [0, 1], the strongest first, each once.
    """
    zero = (directions @ left.T).abs() <= sizes.rough
    # The first of them, not the sparsest, which may all be the same column.
    keep = (zero.sum(dim=1) >= least).nonzero()[:FITTED, 0]
    directions, zero = directions[keep], zero[keep]
    strengths = left.new_zeros(len(directions))
    for threshold in (sizes.rough, sizes.fine, sizes.fine):
        directions, strengths = _least(left, zero.to(left.dtype))
        zero = (directions @ left.T).abs() <= threshold
    keep = zero.sum(dim=1) >= least
    return merged(directions[keep], strengths[keep], sizes.same)


def merged(directions: Tensor, strengths: Tensor, same: float) -> tuple[Tensor, Tensor]:
    """Sorts directions by strength, and drops all but the first of equal directions of any sign."""
    order = strengths.argsort(descending=True, stable=True)
    directions, strengths = directions[order], strengths[order]
    alike = (directions @ directions.T).abs() > 1 - same
    first = ~alike.triu(diagonal=1).any(dim=0)
    return directions[first], strengths[first]


def independent(directions: Tensor, most: int, apart: float) -> Tensor:
    """Returns indices of the first directions that are independent of those before them, at most `most`."""
    chosen, rest = [], directions.clone()
    # At most as many steps as columns: each takes the first that is left, and removes its part from all others.
    for _ in range(most):
        distance = rest.norm(dim=1)
        far = (distance > apart).nonzero()
        if not len(far):
            break
        pick = int(far[0])
        chosen.append(pick)
        unit = rest[pick] / distance[pick]
        rest = rest - (rest @ unit)[:, None] * unit
    return torch.tensor(chosen, dtype=torch.int64, device=directions.device)


def filled(directions: Tensor, rank: int) -> Tensor:
    """Returns a basis [b, b] of the given directions, as columns, and their orthogonal complement."""
    missing = rank - len(directions)
    if not missing:
        return directions.T
    if not len(directions):
        return torch.eye(rank, dtype=directions.dtype, device=directions.device)
    rest = torch.linalg.svd(directions, full_matrices=True).Vh[len(directions) :]
    return torch.cat([directions, rest]).T


def _least(left_factor: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Returns unit vectors [k, b] of the least weighted sum of squared rows, and [k] the least across them.

    Args:
        left_factor: [m, b], b at least 2.
        weights: weights of the rows [k, m].
    """
    rank = left_factor.shape[1]
    pairs = (left_factor[:, :, None] * left_factor[:, None]).reshape(len(left_factor), -1)
    values, vectors = torch.linalg.eigh((weights @ pairs).view(-1, rank, rank))
    return vectors[..., 0], values[..., 1]
