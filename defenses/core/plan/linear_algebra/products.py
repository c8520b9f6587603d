"""Products of long float32 rows with a few directions, without the accumulated rounding error of long sums.

MKL adds the products of a long row in a few running sums. In float32, this loses 1e-2 of the inner product of two
parallel vectors of ten million normal numbers, and 2e-5 to 1e-3 at two million. Coefficients along a direction are
subtracted from rows, and their squares from squared norms: the norm of the remainder would differ from the norm that
the bound assumes. Long rows are therefore multiplied in strips, whose products are then added.

On AMD, MKL uses half of AVX-512. For contiguous rows that need no gradient, a compiled kernel
(`kernels/row_products.py`) is twice as fast there, and a row's products do not depend on the rest of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor

from ...kernels.row_products import RowProducts, row_products

_STRIP = 8192  # numbers whose float32 inner products are accurate to 2e-7 of the factors' norms
_FEWEST = 4  # strips; for fewer, a single product is nearly as accurate


def inner_products(rows: Float[Tensor, "n d"], basis: Float[Tensor, "d k"]) -> Float[Tensor, "n k"]:
    """Returns `rows @ basis`, in strips; differentiable.

    Args:
        rows: rows of the left factor.
        basis: directions as columns.
    """
    strips = rows.shape[1] // _STRIP
    if strips < _FEWEST:
        return rows @ basis
    cut = strips * _STRIP
    # Views, without a copy of the rows.
    blocks = rows[:, :cut].unflatten(1, (strips, _STRIP)).transpose(0, 1)
    sums = blocks.bmm(basis[:cut].unflatten(0, (strips, _STRIP))).sum(dim=0)
    return sums if cut == rows.shape[1] else sums + rows[:, cut:] @ basis[cut:]


def product(rows: Float[Tensor, "n d"], basis: Float[Tensor, "d k"]) -> Float[Tensor, "n k"]:
    """Returns `rows @ basis`, by the kernel if nothing needs a gradient.

    Args:
        rows: rows of the left factor.
        basis: transpose of a matrix with contiguous rows, such as leading directions; otherwise MKL is used.
    """
    if not RowProducts.usable(rows, basis.T):
        return inner_products(rows, basis)
    return row_products(rows)(rows, basis.T)[0].to(rows.dtype)


def outer_products(
    signals: Float[Tensor, "n out"], inputs: Float[Tensor, "n in"], start: int, basis: Float[Tensor, "span k"]
) -> Float[Tensor, "n k"]:
    """Returns inner products of flattened outer products s xᵀ with directions; all three must be `RowProducts.usable`.

    Args:
        signals: factors s, in rows.
        inputs: factors x, in rows.
        start: first coordinate of the directions' span in a flattened product.
        basis: directions as columns, as for `product`.
    """
    # Rows are formed a strip at a time; a product of the inputs with all directions would have [n, k, out] numbers.
    return row_products(inputs, scaled=True)(inputs, basis.T, signals, start)[0].to(inputs.dtype)


def exact_products(rows: Float[Tensor, "n d"], others: Float[Tensor, "k d"]) -> Float[Tensor, "n k"]:
    """Returns inner products of rows with others in float64, by the kernel if nothing needs a gradient."""
    if not RowProducts.usable(rows, others):
        return rows.double() @ others.double().T
    return row_products(rows, exact=True)(rows, others)[0]


OuterPiece = tuple[int, int, Tensor, Tensor]
"""A range (start, stop) of flattened outer products, and their factors: signals and inputs, in rows."""


def inner_with(
    signals: Float[Tensor, "n out"], inputs: Float[Tensor, "n in"], pieces: Sequence[OuterPiece]
) -> list[Float[Tensor, "n m"]]:
    """Returns inner products of outer products s xᵀ with ranges of other outer products, in float64.

    <s xᵀ, t yᵀ> = <s, t> <x, y>; a matrix row that the range cuts contributes a part of its inputs.

    Args:
        signals: factors s, in rows.
        inputs: factors x, in rows.
        pieces: ranges of the others, with their factors t and y.
    """
    width = inputs.shape[1]
    # Columns at which a range cuts a matrix row: inputs between two cuts are multiplied once for all ranges.
    cuts = sorted({0, width} | {place % width for start, stop, *_ in pieces for place in (start, stop)})
    known: dict[tuple[int, int, int], Tensor] = {}

    def along(others: Tensor, low: int, high: int) -> Tensor:
        products: list[Tensor] = []
        for a, b in pairwise(cuts):
            if low <= a and b <= high:
                if (id(others), a, b) not in known:
                    known[id(others), a, b] = exact_products(inputs[:, a:b], others[:, a:b])
                products.append(known[id(others), a, b])
        return sum(products[1:], start=products[0])

    totals = []
    for start, stop, leaving, entering in pieces:
        total = signals.new_zeros(len(signals), len(leaving), dtype=torch.float64)
        first, last = -(-start // width), stop // width  # whole rows of the matrix
        if first < last:
            total += exact_products(signals[:, first:last], leaving[:, first:last]) * along(entering, 0, width)
        # The first and last row, if cut, or the single row that is cut on both sides.
        edges = [(start, min(stop, first * width)), (max(start, last * width), stop)]
        for low, high in edges if first <= last else [(start, stop)]:
            if low < high:
                row = low // width
                through = signals[:, row].double().unsqueeze(1) * leaving[:, row].double()
                total += through * along(entering, low - row * width, high - row * width)
        totals.append(total)
    return totals
