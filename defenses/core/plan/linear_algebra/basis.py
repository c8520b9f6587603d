"""Leading right singular vectors of a matrix of public gradients, as a basis for subspace codecs.

Two methods for rows [m, dim] with m far below dim, both cheaper than a singular value decomposition. `gram`: the
eigenvectors of the rows' float64 Gram matrix, mapped back by a product with the rows. `randomized`: Halko, Martinsson &
Tropp, "Finding Structure with Randomness", SIAM Review 2011, Algorithms 4.4 and 5.1, which compresses the rows to a few
more than `rank` first. Rows are not centred: a subspace of gradients is meant to hold their mean too.

All passes run over strips of columns that fit the cache, and only a single matrix of the size of the basis is
allocated. Products within a strip are short sums, accurate to 1e-6 in float32; sums over strips are in float64.

Guarantee:
    The result is a function of the rows (and of the public generator) alone, and orthonormal to 1e-5: this is measured
    on the result, which is corrected where it does not hold. The privacy of a projection does not depend on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from ...kernels.row_products import RowProducts, row_products

_STRIP = 1024  # columns: 1024 * 2^-24 = 6.1e-5 bounds the rounding of a float32 inner product within a strip
_BAND = 48  # rows of a Gram matrix computed at once; MKL's kernels take 24 (float64) or 48 (float32)
_SMALL = 1e-12  # squares and reciprocals of numbers from here to 1 / _SMALL are well within the range of float32
_NEGLIGIBLE = 1e-10  # eigenvalues below this fraction of the largest are rounding error of float32 rows
_ORTHONORMAL = 1e-5  # the guaranteed error
_EXACT = 1e-7  # the error with float64 coefficients
_ROUNDING_SHOWS = 3e-6  # error from which coefficients that are rounded to the rows' dtype get a correction


@torch.no_grad()
def leading_directions(
    rows: Float[Tensor, "rows dim"],
    rank: int,
    *,
    method: Literal["gram", "randomized"] = "gram",
    generator: torch.Generator | None = None,
    oversampling: int = 10,
    passes: int = 2,
    ordered: bool = True,
) -> Float[Tensor, "dim k"]:
    """Returns an orthonormal basis of the directions with the largest uncentred second moment of the rows, in order.

    The entry of largest magnitude of each direction is positive (the first of equals), so that parties with the same
    rows exchange coefficients with the same signs. Within equal singular values any basis is correct, and rounding
    picks one. For a basis per layer, call it on the columns of each layer.

    Choice of method: `gram` is exact, and its cost grows with the square of the number of rows. `randomized` costs 2 *
    passes + 1 products of the rows with rank + oversampling vectors or, if these are fewer, the rows' inner products
    and one such product: on two CPU cores it is faster from about 5 rows per direction on (2.3 times at 1000 rows, 5
    times at 2000, for 100 directions). Its last directions are approximate unless the spectrum decays.

    Args:
        rows: gradients in rows, float32 or float64, on any device; in any units.
        rank: largest number of directions.
        method: algorithm.
        generator: public generator of `randomized`, on the CPU; unused by `gram`.
        oversampling: additional vectors of `randomized`.
        passes: power iterations of `randomized`; its errors shrink by a power of the singular value ratios, to which
            each iteration adds two.
        ordered: False if only the span matters; if all rows are kept, their basis is then computed by Cholesky, in a
            tenth of the time of eigenvectors.

    Returns:
        Orthonormal columns in the rows' dtype, on their device. They are fewer than `rank` if the rows span fewer
        dimensions: directions with a singular value below 1e-5 of the largest cannot be distinguished from rounding.
        Columns are contiguous in memory: the result is the transpose of a contiguous matrix.

    Raises:
        ValueError: when an argument is out of its range, or a row is not finite.
    """
    count, dim = rows.shape
    if rank < 1:
        raise ValueError(f"rank must be at least 1, got {rank}")
    if method not in ("gram", "randomized"):
        raise ValueError(f"method must be 'gram' or 'randomized', got {method!r}")
    if method == "randomized" and (generator is None or generator.device.type != "cpu"):
        raise ValueError("method 'randomized' needs a generator of public coins on the CPU; pass context.coins(...)")
    if min(oversampling, passes) < 0:
        raise ValueError(f"oversampling and passes must not be negative, got {oversampling} and {passes}")
    if rows.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"rows must be float32 or float64, got {rows.dtype}")
    if not rows.numel():
        raise ValueError(f"rows must hold at least one number, got {count} rows of length {dim}")

    rows = _of_moderate_size(rows)
    sketch = rank + oversampling
    if method == "gram" or sketch >= min(count, dim):
        basis = _from_gram(rows, rank, ordered=ordered)
    elif count <= min(dim, 4 * passes * sketch):
        # The inner products of all rows, half of a matrix, are fewer than those that the passes would take.
        moments = gram(rows, torch.float64)
        within = _iterated(rows, sketch, passes, generator, lambda chosen: moments @ chosen)
        basis = _from_gram(rows, rank, moments=moments, within=within, ordered=ordered)
    else:
        compressed = _compressed(rows, sketch, passes, generator)
        basis = _from_gram(compressed, rank, out=compressed, ordered=ordered)
    orient(basis)
    return basis.T


@torch.no_grad()
def leading_shares(
    moments: Float[Tensor, "rows rows"], dim: int, rank: int, *, generator: torch.Generator, passes: int
) -> Float[Tensor, "rows k"] | None:
    """Returns coefficients W of the leading directions Wᵀ rows, computed from the rows' inner products.

    Method `randomized` of `leading_directions` without oversampling, unordered and unsigned. In float64: directions
    formed in float64 are orthonormal to 1e-7.

    Args:
        moments: Gram matrix of the rows, float64.
        dim: length of a row.
        rank: largest number of directions.
        generator: public generator, on the CPU.
        passes: power iterations.

    Returns:
        None if `leading_directions` would not use inner products, if rows are huge, tiny or not finite, or if rounding
        is too large.
    """
    count, largest = len(moments), float(moments.diagonal().max())
    sketch = rank < min(count, dim)
    if count > dim or (sketch and count > 4 * passes * rank) or not _SMALL**2 < largest < _SMALL**-2:
        return None
    within = _iterated(moments, rank, passes, generator, lambda chosen: moments @ chosen) if sketch else None
    shares = _whitened(moments, rank, within, ordered=False)
    return shares.T if _distance_from_identity(shares @ moments @ shares.T) < _EXACT else None


@torch.no_grad()
def orthonormality_error(basis: Float[Tensor, "dim k"]) -> float:
    """Returns the largest entry of |V^T V - 1|, in float64 unless float32 is certain to place it below 1e-4."""
    if basis.numel() < 2**16:  # splitting it would take longer
        exact = basis.double()
        return _distance_from_identity(exact.T @ exact)
    directions = basis.T
    if directions.dtype == torch.float32 and not directions.is_cuda:
        error = _distance_from_identity(gram(directions, torch.float32))
        if error < 3e-5:  # plus at most 6.1e-5 of rounding
            return error
    return _distance_from_identity(gram(directions, torch.float64))


def _from_gram(
    rows: Float[Tensor, "m d"],
    rank: int,
    *,
    ordered: bool,
    moments: Float[Tensor, "m m"] | None = None,
    within: Float[Tensor, "m s"] | None = None,
    out: Tensor | None = None,
) -> Float[Tensor, "k d"]:
    """Returns the leading directions as contiguous rows, unsigned.

    Args:
        rows: more numbers per row than rows, if one of the other arguments is given.
        rank: largest number of directions.
        ordered: see `leading_directions`.
        moments: Gram matrix of the rows, if known.
        within: orthonormal columns, to whose span the coefficients of the combinations are restricted; None for all.
        out: output tensor; it may be `rows`.
    """
    if rows.shape[1] < rows.shape[0]:  # then the Gram matrix of the columns is smaller
        _, vectors = leading_eigenvectors(gram(rows.T, torch.float64), rank)
        return vectors.T.to(rows.dtype).contiguous()

    moments = gram(rows, torch.float64) if moments is None else moments
    exact = _whitened(moments, rank, within, ordered=ordered)
    # In float64 on CUDA, because float32 products may be TF32 there.
    working = torch.float64 if rows.is_cuda else rows.dtype
    weights = [exact.to(working)]
    # Rounding the coefficients adds to v_j a part of v_1, in proportion to sigma_1 / sigma_j: known before the product.
    rounded = weights[0].double()
    expected = rounded @ moments @ rounded.T
    if _distance_from_identity(expected) > _ROUNDING_SHOWS:
        weights.append(_orthonormaliser(expected).to(working))

    basis = rows.new_empty(len(exact), rows.shape[1]) if out is None else out[: len(exact)]
    measured = _combine(weights, rows, basis, working)
    while _distance_from_identity(measured) > _ORTHONORMAL / 2:  # singular values below 1e-4 of the largest; rare
        measured = _combine([_orthonormaliser(measured)], basis, basis, torch.float64)
    return basis


def _whitened(
    moments: Float[Tensor, "m m"], rank: int, within: Float[Tensor, "m s"] | None, *, ordered: bool
) -> Float[Tensor, "k m"]:
    """Returns coefficients of the leading directions from the rows' Gram matrix; arguments as for `_from_gram`."""
    inner = moments if within is None else within.T @ moments @ within
    exact = None if ordered or rank < len(inner) else whitening(inner, 1 / _NEGLIGIBLE)
    if exact is None:
        values, vectors = leading_eigenvectors(inner, rank)
        exact = (vectors / values.sqrt()).T  # v_j = rows^T u_j / sigma_j
    return exact if within is None else exact @ within.T


def _compressed(
    rows: Float[Tensor, "m d"], size: int, passes: int, generator: torch.Generator | None
) -> Float[Tensor, "s d"]:
    """Returns combinations Q^T rows that nearly span the leading directions, by subspace iteration."""
    working = torch.float64 if rows.is_cuda else rows.dtype

    def image(chosen: Tensor) -> Tensor:
        total, combinations = torch.zeros_like(chosen), chosen.T.to(working)
        for _, strips in _strips(rows):
            block = strips.to(working)
            products = torch.bmm(combinations.expand(len(block), -1, -1), block)
            total += torch.bmm(block, products.mT).sum(dim=0, dtype=torch.float64)
        return total

    chosen = _iterated(rows, size, passes, generator, image)
    compressed = rows.new_empty(size, rows.shape[1])
    _combine([chosen.T.to(working)], rows, compressed, working)
    return compressed


def _iterated(
    rows: Tensor, size: int, passes: int, generator: torch.Generator | None, image: Callable[[Tensor], Tensor]
) -> Float[Tensor, "m s"]:
    """Returns orthonormal coefficients after power iterations; `image` multiplies coefficients by the Gram matrix."""
    # On the CPU, because generators of different devices draw different numbers.
    draws = torch.randn(rows.shape[0], size, generator=generator, dtype=torch.float64).to(rows.device)
    # QR after each pass (Algorithm 4.4): powers alone lose the smaller directions to rounding.
    chosen = torch.linalg.qr(draws).Q
    for _ in range(passes):
        chosen = torch.linalg.qr(image(chosen)).Q
    return chosen


def leading_eigenvectors(moments: Float[Tensor, "m m"], rank: int) -> tuple[Float[Tensor, " k"], Float[Tensor, "m k"]]:
    """Returns the largest eigenvalues above rounding, in descending order, and their eigenvectors.

    Args:
        moments: symmetric, positive semidefinite.
        rank: largest number of eigenvalues.
    """
    values, vectors = torch.linalg.eigh(moments)  # ascending
    values, vectors = values.flip(0)[:rank], vectors.flip(1)[:, :rank]
    kept = int((values > _NEGLIGIBLE * values[0]).sum())
    return values[:kept], vectors[:, :kept]


def whitening(moments: Float[Tensor, "m m"], most: float) -> Float[Tensor, "m m"] | None:
    """Returns a lower triangular W with W moments W^T = 1; None if an eigenvalue may be too small.

    Args:
        moments: symmetric, positive semidefinite.
        most: limit on the condition number of `moments`.
    """
    factor, failed = torch.linalg.cholesky_ex(moments)
    if bool(failed):
        return None
    inverse = torch.linalg.solve_triangular(factor, torch.eye(len(factor)).to(factor), upper=False)
    # The largest eigenvalue is at most the trace, the smallest at least 1 / |W|^2. The test fails for NaN too.
    return inverse if float(moments.trace() * inverse.square().sum()) < most else None


def gram(rows: Float[Tensor, "m d"], working: torch.dtype) -> Float[Tensor, "m m"]:
    """Returns the Gram matrix of the rows: products in `working`, sums over strips in float64."""
    if RowProducts.usable(rows, rows):
        return _mirrored(row_products(rows, exact=working == torch.float64)(rows, rows, lower=True)[0])
    total = torch.zeros(len(rows), len(rows), dtype=torch.float64, device=rows.device)
    for _, strips in _strips(rows):
        _add_products(total, strips.to(working))
    return _mirrored(total)


def _combine(weights: list[Tensor], rows: Tensor, out: Tensor, working: torch.dtype) -> Float[Tensor, "k k"]:
    """Writes weights @ rows to `out`, which may be `rows`, and returns the Gram matrix of the result."""
    compiled = RowProducts.usable(out, out)
    total = torch.zeros(len(out), len(out), dtype=torch.float64, device=rows.device)
    for span, strips in _strips(rows):
        block = strips.to(working)
        for weight in weights:
            block = torch.bmm(weight.expand(len(block), -1, -1), block)
        out[:, span].unflatten(1, block.shape[::2]).copy_(block.transpose(0, 1))
        if not compiled:  # the compiled kernel is faster on all strips at once
            _add_products(total, block.to(out.dtype).to(working))
    return gram(out, working) if compiled else _mirrored(total)


def _add_products(total: Float[Tensor, "m m"], strips: Float[Tensor, "p m n"]) -> None:
    """Adds the inner products of the rows to the lower half of the symmetric `total`."""
    for start in range(0, len(total), _BAND):
        stop = min(start + _BAND, len(total))
        products = torch.bmm(strips[:, start:stop], strips[:, :stop].mT)
        total[start:stop, :stop] += products.sum(dim=0, dtype=torch.float64)


def _strips(rows: Float[Tensor, "m d"]) -> Iterator[tuple[slice, Float[Tensor, "p m n"]]]:
    """Cuts the columns into blocks of a few strips [strips, rows, columns]: a strip per thread, a block in cache."""
    count, dim = rows.shape
    room = 2**24 if rows.is_cuda else 2**20  # numbers in a block
    most = max(room // (max(count, 1) * _STRIP), torch.get_num_threads(), 1)
    start = 0
    while start < dim:
        strips = min(most, (dim - start) // _STRIP)
        width = strips * _STRIP or dim - start
        span = slice(start, start + width)
        yield span, rows[:, span].unflatten(1, (max(strips, 1), -1)).transpose(0, 1)
        start += width


def _of_moderate_size(rows: Tensor) -> Tensor:
    """Returns the rows, rescaled by a power of two if squares or reciprocals would overflow or underflow."""
    low, high = torch.aminmax(rows)
    peak = max(-low.item(), high.item())
    if not math.isfinite(peak):
        raise ValueError("rows must be finite, got a NaN or an infinity")
    if peak == 0 or _SMALL < peak < 1 / _SMALL:
        return rows
    exponent = -math.frexp(peak)[1]
    # In two steps, because 2^150 itself exceeds float32.
    return rows.mul(2.0 ** (exponent // 2)).mul_(2.0 ** (exponent - exponent // 2))


def _orthonormaliser(moments: Float[Tensor, "k k"]) -> Float[Tensor, "k k"]:
    """Returns L^-1 of Cholesky, which removes from each direction its components along stronger, more exact ones."""
    factor = torch.linalg.cholesky(moments)
    return torch.linalg.solve_triangular(factor, torch.eye(len(factor)).to(factor), upper=False)


def orient(basis: Float[Tensor, "k d"]) -> Float[Tensor, " k"]:
    """Makes the entry of largest magnitude of every direction positive, in place; returns the signs."""
    high, low = basis.amax(dim=1), -basis.amin(dim=1)
    flipped = low > high
    for tied in (low == high).nonzero().flatten().tolist():
        flipped[tied] = basis[tied, basis[tied].abs().argmax()] < 0
    signs = torch.where(flipped, -1.0, 1.0).to(basis)
    basis.mul_(signs.unsqueeze(1))
    return signs


def _distance_from_identity(moments: Float[Tensor, "k k"]) -> float:
    """Largest entry of |moments - 1|; 0 for no directions, NaN if an entry is NaN."""
    return (moments - torch.eye(len(moments)).to(moments)).abs().max().item() if len(moments) else 0.0


def _mirrored(lower: Float[Tensor, "m m"]) -> Float[Tensor, "m m"]:
    """Symmetric matrix from its lower half."""
    return lower.tril() + lower.tril(-1).T
