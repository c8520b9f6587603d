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
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ...kernels.machine_code import Processor, in_threads, processor
from ...kernels.row_products import RowProducts, row_products

_STRIP = 8192  # numbers whose float32 inner products are accurate to 2e-7 of the factors' norms
_FEWEST = 4  # strips; for fewer, a single product is nearly as accurate
# Size of the right factor from which the kernel saves more time than its call costs. The size of the left factor must
# not matter, because then a row's products would depend on the number of rows.
_WORTH_IT = 2**13
_PANEL = 128  # right rows at a time, a strip of which stays in the second-level cache
_WORTH_A_THREAD = 1e8  # flops from which another thread saves more than it costs
_STRIPS_A_THREAD = 4
_TILES_A_THREAD = 4
_BYTES = {torch.float32: 4, torch.float64: 8}


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
    if not compiled_for(rows, basis.T):
        return inner_products(rows, basis)
    return _sums(rows, basis.T, _BYTES[rows.dtype]).to(rows.dtype)


def outer_products(
    signals: Float[Tensor, "n out"], inputs: Float[Tensor, "n in"], start: int, basis: Float[Tensor, "span k"]
) -> Float[Tensor, "n k"]:
    """Returns inner products of flattened outer products s xᵀ with directions; all three must be `compiled_for`.

    Args:
        signals: factors s, in rows.
        inputs: factors x, in rows.
        start: first coordinate of the directions' span in a flattened product.
        basis: directions as columns, as for `product`.
    """
    if len(signals) != len(inputs) or not 0 <= start <= signals.shape[1] * inputs.shape[1] - len(basis):
        raise ValueError(
            f"signals and inputs must be of the same rows, and directions lie within their products, got "
            f"{tuple(signals.shape)} and {tuple(inputs.shape)}, directions of {len(basis)} numbers from {start} on"
        )
    # Rows are formed a strip at a time; a product of the inputs with all directions would have [n, k, out] numbers.
    runs = _outer_runs(start, start + len(basis), inputs.shape[1], _kernel(inputs, _BYTES[inputs.dtype], scaled=True))
    return _sums(inputs, basis.T, _BYTES[inputs.dtype], factors=signals, runs=runs).to(inputs.dtype)


def exact_products(rows: Float[Tensor, "n d"], others: Float[Tensor, "k d"]) -> Float[Tensor, "n k"]:
    """Returns inner products of rows with others in float64, by the kernel if nothing needs a gradient."""
    if not compiled_for(rows, others):
        return rows.double() @ others.double().T
    return _sums(rows, others, 8)


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


def lower_products(rows: Float[Tensor, "m d"], *, exact: bool) -> Float[Tensor, "m m"]:
    """Returns inner products of rows with one another, in float64; entries above the diagonal are undefined.

    Args:
        rows: rows that are `compiled_for`.
        exact: whether all arithmetic is in float64; otherwise a few kilobytes of a row are summed in its own dtype, and
            these sums added in float64.
    """
    return _sums(rows, rows, 8 if exact else _BYTES[rows.dtype], lower=True)


def compiled_for(*rows: Float[Tensor, "_ _"]) -> bool:
    """Returns whether the kernel can read these rows (needs AVX-512) and saves time for a right factor of this size."""
    return (
        _wide() is not None
        and rows[-1].numel() >= _WORTH_IT
        and len(rows[-1]) > 1
        and all(
            type(each) is Tensor
            and each.device.type == "cpu"
            and each.dtype == rows[-1].dtype
            and each.dtype in _BYTES
            and (each.stride(1) == 1 or each.shape[1] == 1)
            and each.numel() > 0
            and not (torch.is_grad_enabled() and each.requires_grad)
            for each in rows
        )
    )


@cache
def _wide() -> Processor | None:
    """The processor, if it has AVX-512."""
    host = processor()
    return None if host is None or host.vector < 64 else host


def _kernel(rows: Tensor, number: int, *, scaled: bool) -> RowProducts:
    host = _wide()
    assert host is not None  # noqa: S101  checked by the caller
    return row_products(host, rows.element_size(), number, scaled=scaled)


@dataclass(frozen=True)
class _Runs:
    """Traversal of rows by the kernel, see `kernels/row_products.py`."""

    runs: Int64[Tensor, "n 5"]
    strips: Int64[Tensor, "m 3"]


@lru_cache(maxsize=256)
def _runs(size: int, kernel: RowProducts) -> _Runs:
    """Traversal of whole rows, a strip at a time."""
    places = torch.arange(0, size, kernel.strip)
    widths, number = (size - places).clamp(max=kernel.strip), torch.arange(len(places))
    none = torch.zeros_like(places)
    vectors = (widths + kernel.lanes - 1) // kernel.lanes
    return _Runs(
        torch.stack([places, places, widths, none, none], dim=1), torch.stack([number, number + 1, vectors], dim=1)
    )


@lru_cache(maxsize=256)
def _outer_runs(start: int, stop: int, width: int, kernel: RowProducts) -> _Runs:
    """Traversal of flattened outer products over [start, stop): runs of inputs, each with the index of its output."""
    runs: list[tuple[int, int, int, int, int]] = []
    strips: list[tuple[int, int, int]] = []
    first, filled, at = 0, 0, start
    while at < stop:
        output, place = divmod(at, width)
        length = min(width - place, stop - at, kernel.strip)
        room = -(-length // kernel.lanes) * kernel.lanes
        if filled + room > kernel.strip:
            strips.append((first, len(runs), filled // kernel.lanes))
            first, filled = len(runs), 0
        runs.append((place, at - start, length, output, filled))
        filled, at = filled + room, at + length
    strips.append((first, len(runs), filled // kernel.lanes))
    return _Runs(torch.tensor(runs), torch.tensor(strips))


def _sums(
    left: Tensor,
    right: Tensor,
    number: int,
    *,
    lower: bool = False,
    factors: Tensor | None = None,
    runs: _Runs | None = None,
) -> Float[Tensor, "n k"]:
    """Computes inner products by the kernel, which has no bounds checks of its own.

    Args:
        left: rows, or inputs of outer products.
        right: rows.
        number: bytes per number in the kernel's arithmetic.
        lower: whether entries above the diagonal may be left out.
        factors: signals of outer products.
        runs: traversal of outer products.
    """
    if runs is None and left.shape[1] != right.shape[1]:
        raise ValueError(f"rows must be of one length, got {left.shape[1]} and {right.shape[1]} numbers")
    kernel = _kernel(left, number, scaled=factors is not None)
    runs = runs or _runs(left.shape[1], kernel)
    factors = left if factors is None else factors
    count, columns, threads = len(left), len(right), torch.get_num_threads()
    # Rows are split at places that depend on their length alone, so that the sum of a row does not depend on the
    # batch; examples are split only if threads remain.
    parts = _edges(len(runs.strips), max(1, min(threads, len(runs.strips) // _STRIPS_A_THREAD)))
    tiles = -(-count // kernel.left)
    # Lower rows have more entries below the diagonal.
    shares = _edges(tiles, max(1, min(threads // (len(parts) - 1), tiles // _TILES_A_THREAD)), 0.5 if lower else 1.0)
    panels = _edges(-(-columns // kernel.right), -(-columns // _PANEL))
    sums = left.new_zeros(len(parts) - 1, tiles * kernel.left, panels[-1] * kernel.right, dtype=torch.float64)

    def work(task: int) -> None:
        part, share = divmod(task, len(shares) - 1)
        high, low = (tile * kernel.left for tile in shares[share : share + 2])
        for begin, end in pairwise(column * kernel.right for column in panels):
            # In a square, rows above the panel have no entries below the diagonal.
            top = max(high, begin // kernel.left * kernel.left) if lower else high
            if top >= min(low, count):
                continue
            left_rows, right_rows, part_sums = left[top:low], right[begin:end], sums[part, top:, begin:]
            room = left.new_empty((end - begin + kernel.left) * kernel.strip * kernel.number, dtype=torch.uint8)
            kernel.add(
                *(value for each in (left_rows, right_rows) for value in (each.data_ptr(), each.stride(0), len(each))),
                *(factors[top:].data_ptr(), factors.stride(0)),
                *(runs.runs.data_ptr(), runs.strips[parts[part] :].data_ptr(), parts[part + 1] - parts[part]),
                *(part_sums.data_ptr(), part_sums.stride(0), room.data_ptr(), top - begin if lower else columns),
            )

    flops = 2.0 * count * right.numel()
    at_once = max(1, min(threads, int(flops / _WORTH_A_THREAD)))
    in_threads(work, (len(parts) - 1) * (len(shares) - 1), at_once=at_once)
    return (sums[0] if len(sums) == 1 else sums.sum(dim=0))[:count, :columns]


def _edges(total: int, parts: int, power: float = 1.0) -> list[int]:
    """Boundaries of parts of equal size, or of parts whose cumulative size grows with a power."""
    return [round(total * (i / parts) ** power) for i in range(parts + 1)]
