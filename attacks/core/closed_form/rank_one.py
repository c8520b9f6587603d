"""Rank-1 matrices from partial or noisy observations: rows of a linear layer's gradient are multiples of an input.

For z = W x + b and one example, dL/dW = k x^T and dL/db = k, so [dL/dW | dL/db] = k (x, 1)^T. Functions here compute
(x, 1) from the whole matrix, from some of its entries, under noise, and from inner products with known directions.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..threat_model.attack_errors import RankDeficient


def completed(
    values: Float[Tensor, "rows columns"], observed: Bool[Tensor, "rows columns"]
) -> tuple[Float[Tensor, " columns"], Bool[Tensor, " columns"]]:
    """Returns the right factor of a rank-1 matrix, scaled to 1 at the last column, by least squares over rows.

    The first step uses rows whose entry in the last column is seen: x_i = sum_j k_j G_ji / sum_j k_j^2. Ratios G_ji /
    k_j are not averaged, because the smallest k_j would dominate. Then a row without that entry gets its k_j from known
    columns, and determines further columns: a column is known if and only if it is connected to the last in the
    bipartite graph of entries that are seen and not 0.

    Args:
        values: entries of the matrix; unseen entries are not read.
        observed: observed entries.

    Returns:
        The right factor, 0 for unknown columns, and the mask of known columns.
    """
    shown = torch.where(observed, values, 0.0)
    entries = observed.to(values)
    right, known = torch.zeros_like(values[0]), torch.zeros_like(observed[0])
    left, rows_known = torch.zeros_like(values[:, 0]), torch.zeros_like(observed[:, 0])
    right[-1], known[-1] = 1.0, True
    while True:
        energy = entries @ right.square()
        rows = (energy > 0) & ~rows_known
        left[rows] = (shown @ right)[rows] / energy[rows]
        rows_known |= rows
        energy = entries.T @ left.square()
        columns = (energy > 0) & ~known
        if not columns.any():
            return right, known
        right[columns] = (shown.T @ left)[columns] / energy[columns]
        known |= columns


def total_least_squares(
    values: Float[Tensor, "rows columns"],
    observed: Bool[Tensor, "rows columns"],
    std: Float[Tensor, "rows columns"],
    start: Float[Tensor, " columns"],
    iterations: int = 300,
) -> tuple[Float[Tensor, " columns"], float]:
    """Returns the maximum likelihood right factor of a rank-1 matrix, under Gaussian noise on every entry.

    All columns have errors, including the last: least squares over rows treats the last as exact and shrinks the others
    towards 0. If all entries are seen and each column has a constant standard deviation, the solution is the top right
    singular vector of the whitened matrix; otherwise it is computed by alternating between the factors.

    Args:
        values: entries of the matrix; unseen entries are not read.
        observed: observed entries.
        std: standard deviation of the noise of each entry, positive for seen entries.
        start: start of the right factor; columns that nothing determines keep it.
        iterations: largest number of alternations.

    Returns:
        The right factor, up to scale, and the norm of the whitened rank-1 matrix over the 99.9 % quantile of the
        largest singular value of noise: above 1 the matrix stands out of the noise.
    """
    rows, columns = values.shape
    # Johnstone, Annals of Statistics 2001: the largest eigenvalue of noise, up to the 99.9% point of Tracy-Widom's law.
    edge = rows**0.5 + columns**0.5
    edge *= (1 + 3.27 * (rows**-0.5 + columns**-0.5) ** (1 / 3) / edge) ** 0.5
    if bool(observed.all()) and bool((std == std[:1]).all()):
        _, singular, right = torch.linalg.svd(values / std[:1], full_matrices=False)
        return right[0] * std[0], float(singular[0]) / edge
    weights = torch.where(observed, std.clamp(min=torch.finfo(std.dtype).tiny).square().reciprocal(), 0.0)
    weighted = weights * torch.where(observed, values, 0.0)
    right, left = start.clone(), torch.zeros_like(values[:, 0])
    for _ in range(iterations):
        left = _ratio(weighted @ right, weights @ right.square(), left)
        before, right = right, _ratio(weighted.T @ left, weights.T @ left.square(), right)
        right = right * (before.norm() / right.norm().clamp(min=torch.finfo(right.dtype).tiny))
        if float((right - before).norm()) <= 1e-12 * float(before.norm()):
            break
    left = _ratio(weighted @ right, weights @ right.square(), left)
    fitted = (weights * torch.outer(left, right).square()).sum().sqrt()
    return right, float(fitted) / edge


def standard_errors(
    values: Float[Tensor, "rows columns"],
    entries: Bool[Tensor, "rows columns"],
    std: Float[Tensor, "rows columns"],
    right: Float[Tensor, " columns"],
) -> tuple[Float[Tensor, " columns"], float]:
    """Returns standard errors of a right factor whose last entry is 1, under noise, and the excess misfit of the fit.

    To first order x_i has the variance s^2 (1 + x_i^2) / |k|^2 if all entries are seen under noise s; the term x_i^2 is
    the error of the scale, by the last column. The noise's part of the estimated k^2 is subtracted, because pure noise
    would otherwise look precise. The error of k_j is neglected, which matters for rows with few seen entries.

    Args:
        values: entries of the matrix; unseen entries are not read.
        entries: observed entries.
        std: standard deviation of the noise of each entry, positive for seen entries.
        right: the maximum likelihood right factor.

    Returns:
        The standard errors, infinite if nothing stands out of the noise, and the excess of the sum of squared residuals
        over its expectation, in its standard deviations.
    """
    weights = torch.where(entries, std.clamp(min=torch.finfo(std.dtype).tiny).square().reciprocal(), 0.0)
    shown, energy = torch.where(entries, values, 0.0), weights @ right.square()
    left = _ratio((weights * shown) @ right, energy, torch.zeros_like(energy))
    own_noise = _ratio(torch.ones_like(energy), energy, torch.zeros_like(energy))
    precision = weights.T @ (left.square() - own_noise).clamp(min=0)
    spread = torch.where(precision > 0, precision.reciprocal(), torch.inf)
    residual = float((weights * (shown - torch.outer(left, right)).square()).sum())
    observed = weights > 0
    free = max(1, int(observed.sum() - observed.any(dim=1).sum() - observed.any(dim=0).sum() + 1))
    errors = (spread + right.square() * spread[-1]).sqrt().nan_to_num(nan=torch.inf, posinf=torch.inf)
    return errors, (residual - free) / (2 * free) ** 0.5


def bilinear(
    coefficients: Float[Tensor, " k"],
    weight_basis: Float[Tensor, "rows columns k"],
    bias_basis: Float[Tensor, "rows k"],
    starts: list[Float[Tensor, " columns"]],
    enough: float = 1e-9,
    iterations: int = 200,
) -> tuple[Float[Tensor, " columns"], float, Float[Tensor, "k unknowns"]]:
    """Solves V^T vec([k x^T | k]) = u by alternating least squares over (k, x).

    Each factor is linear given the other. Gauss-Newton steps over both remove the remaining error: they converge
    quadratically where alternation is slow.

    Args:
        coefficients: u.
        weight_basis: the rows of V that belong to the entries of k x^T.
        bias_basis: the rows of V that belong to k.
        starts: starts of x, in order; the result has the smallest residual.
        enough: relative residual at which no further start is tried: that of rounding, or of the noise.
        iterations: largest number of alternations of each start.

    Returns:
        x, |u - V^T vec([k x^T | k])| / |u|, and the derivatives of the coefficients by k and then x, there.

    Raises:
        RankDeficient: there are fewer coefficients than unknowns, or they leave some unknowns undetermined.
    """
    rows, columns, count = weight_basis.shape
    if count < rows + columns:
        raise RankDeficient(
            f"{count} coefficients must be at least as many as the {rows + columns} unknowns of a layer of {columns} "
            f"inputs and {rows} outputs",
            deficit=rows + columns - count,
        )
    system = _Bilinear(coefficients, weight_basis, bias_basis)
    best: tuple[float, Tensor, Tensor] | None = None
    for start in starts:
        solution = system.solved(start, iterations)
        if best is None or solution[0] < best[0]:
            best = solution
        if best[0] <= enough:
            break
    if best is None:
        raise ValueError("starts must hold at least one vector, got none")
    error, left, right = best
    jacobian = system.jacobian(left, right)
    rank = int(torch.linalg.matrix_rank(jacobian, rtol=1e-9))
    if rank < rows + columns:
        raise RankDeficient(
            f"{count} coefficients must determine the {rows + columns} unknowns of the layer, and leave "
            f"{rows + columns - rank} of them open",
            deficit=rows + columns - rank,
        )
    return right, error, jacobian


@dataclass(frozen=True)
class _Bilinear:
    """The equations of `bilinear`, whose arguments it holds."""

    coefficients: Tensor
    weight_basis: Tensor
    bias_basis: Tensor

    def of_left(self, right: Tensor) -> Tensor:
        """Returns the coefficients as a linear map of k, [k, rows]."""
        return (torch.einsum("oik,i->ok", self.weight_basis, right) + self.bias_basis).T

    def of_right(self, left: Tensor) -> Tensor:
        """Returns the coefficients as a linear map of x, [k, columns]."""
        return torch.einsum("oik,o->ki", self.weight_basis, left)

    def jacobian(self, left: Tensor, right: Tensor) -> Tensor:
        return torch.cat([self.of_left(right), self.of_right(left)], dim=1)

    def missing(self, left: Tensor, right: Tensor) -> Tensor:
        return self.coefficients - self.of_left(right) @ left

    def error(self, left: Tensor, right: Tensor) -> float:
        size = self.coefficients.norm().clamp(min=torch.finfo(self.coefficients.dtype).tiny)
        return float(self.missing(left, right).norm() / size)

    def solved(self, right: Tensor, iterations: int) -> tuple[float, Tensor, Tensor]:
        """Returns the relative residual, k and x, from a start of x."""
        left, error = torch.zeros_like(self.bias_basis[:, 0]), 1.0
        for _ in range(iterations):
            left = _solve(self.of_left(right), self.coefficients)
            right = _solve(self.of_right(left), self.coefficients - self.bias_basis.T @ left)
            before, error = error, self.error(left, right)
            if error < 1e-3 or before - error < 1e-4 * error:
                break
        for _ in range(50):
            step = _solve(self.jacobian(left, right), self.missing(left, right))
            tried = (left + step[: len(left)], right + step[len(left) :])
            now = self.error(*tried)
            if not now < error:
                break
            left, right, before, error = *tried, error, now
            if before - error < 1e-6 * error:
                break
        return error, left, right


def repeated(
    ratios: Float[Tensor, "rows columns"],
    observed: Bool[Tensor, "rows columns"],
    variance: Float[Tensor, "rows columns"],
    tolerance: float,
) -> Int[Tensor, " rows"]:
    """Groups rows that are equal on their common entries, up to noise and rounding.

    Two rows that share fewer than three entries away from 0 are not compared: images have many zeros in common.

    Args:
        ratios: rows to compare; unseen entries are not read.
        observed: observed entries.
        variance: variance of the noise of each ratio; 0 without noise.
        tolerance: relative, for rounding.

    Returns:
        The group of each row, by the smallest row index in the group; -1 if no other row equals the row.
    """
    shown, entries = torch.where(observed, ratios, 0.0), observed.to(ratios)
    noise = torch.where(observed, variance, 0.0)
    squares = shown.square() @ entries.T
    # |a - b|^2 over common entries; the cancellation is far below any tolerance that float32 updates have in float64.
    apart = squares + squares.T - 2 * shown @ shown.T
    together = noise @ entries.T
    # The sum of n squares of noise is within a factor of two of its mean, for all but the smallest n.
    allowed = 2 * (together + together.T) + tolerance**2 * torch.maximum(squares, squares.T)
    nonzero = (shown != 0).to(ratios)
    sharing = nonzero @ entries.T
    equal = (apart <= allowed) & (torch.minimum(sharing, sharing.T) >= 3)
    equal.fill_diagonal_(False)
    paired = equal.any(dim=1)
    equal.fill_diagonal_(True)
    group = torch.arange(len(ratios), device=ratios.device)
    if len(ratios) == 0:
        return group
    while True:  # the smallest number that reaches a row, a step further each time
        spread = torch.where(equal, group, len(ratios)).amin(dim=1)
        if torch.equal(spread, group):
            return torch.where(paired, group, -1)
        group = spread


def _ratio(above: Tensor, below: Tensor, otherwise: Tensor) -> Tensor:
    return torch.where(below > 0, above / torch.where(below > 0, below, 1.0), otherwise)


def _solve(matrix: Tensor, values: Tensor) -> Tensor:
    """Solves least squares with the smallest norm: undetermined directions stay at 0."""
    # By the pseudoinverse: least squares on CUDA takes matrices of full rank alone.
    return torch.linalg.pinv(matrix, rtol=1e-12) @ values
