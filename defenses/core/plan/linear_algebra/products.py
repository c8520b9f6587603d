"""Products of long rows with a few directions in float32, without the drift of long sums.

MKL adds the products of a long row up in a few running totals. Of ten million numbers in float32 that loses 1e-2 of an
inner product of normal numbers that lie in one direction, and 2e-5 to 1e-3 of two million. Coefficients along a
direction are subtracted from rows, and their squares from squared norms: what is left over would be another length than
the bound was told. So long rows are multiplied in strips, whose sums are then added up.

MKL also uses half of AVX-512 on AMD. Where rows lie in one piece and nothing is differentiated, a kernel of our own
multiplies them (`kernels/row_products.py`), twice as fast there, and a row's products are the same whoever else is
there.
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

_STRIP = 8192  # numbers, whose inner products in float32 are right to 2e-7 of the factors' lengths
_FEWEST = 4  # strips, below which one product drifts by little more
# Of the kernel: numbers of the right factor, below which a call takes longer than it saves. Not of the left one, whose
# rows would be multiplied otherwise where they are many.
_WORTH_IT = 2**13
_PANEL = 128  # right rows at a time, of which a strip stays in the second cache
_WORTH_A_THREAD = 1e8  # flops, below which handing the work over takes longer than it saves
_STRIPS_A_THREAD = 4
_TILES_A_THREAD = 4
_BYTES = {torch.float32: 4, torch.float64: 8}


def inner_products(rows: Float[Tensor, "n d"], basis: Float[Tensor, "d k"]) -> Float[Tensor, "n k"]:
    """`rows @ basis`; differentiable.

    Args:
        rows: one a row.
        basis: one direction a column.
    """
    strips = rows.shape[1] // _STRIP
    if strips < _FEWEST:
        return rows @ basis
    cut = strips * _STRIP
    # Views: nothing of the rows' size is written.
    left = rows[:, :cut].unflatten(1, (strips, _STRIP)).transpose(0, 1)
    sums = left.bmm(basis[:cut].unflatten(0, (strips, _STRIP))).sum(dim=0)
    return sums if cut == rows.shape[1] else sums + rows[:, cut:] @ basis[cut:]


def product(rows: Float[Tensor, "n d"], basis: Float[Tensor, "d k"]) -> Float[Tensor, "n k"]:
    """`rows @ basis`, by the kernel where nothing is differentiated.

    Args:
        rows: one a row.
        basis: the transpose of a matrix whose rows lie in one piece, as leading directions are; others go by MKL.
    """
    if not compiled_for(rows, basis.T):
        return inner_products(rows, basis)
    return _sums(rows, basis.T, _BYTES[rows.dtype]).to(rows.dtype)


def outer_products(
    signals: Float[Tensor, "n out"], inputs: Float[Tensor, "n in"], start: int, basis: Float[Tensor, "span k"]
) -> Float[Tensor, "n k"]:
    """Inner products of outer products s xᵀ, flattened, with directions. All three are `compiled_for`.

    Args:
        signals: s, one a row.
        inputs: x, one a row.
        start: where the directions' span begins in a flattened product.
        basis: one direction a column, as for `product`.
    """
    if len(signals) != len(inputs) or not 0 <= start <= signals.shape[1] * inputs.shape[1] - len(basis):
        raise ValueError(
            f"signals and inputs must be of the same rows, and directions lie within their products, got "
            f"{tuple(signals.shape)} and {tuple(inputs.shape)}, directions of {len(basis)} numbers from {start} on"
        )
    # Rows are made a strip at a time, where a product of the inputs with all directions has [n, k, out] numbers.
    runs = _outer_runs(start, start + len(basis), inputs.shape[1], _kernel(inputs, _BYTES[inputs.dtype], scaled=True))
    return _sums(inputs, basis.T, _BYTES[inputs.dtype], factors=signals, runs=runs).to(inputs.dtype)


def exact_products(rows: Float[Tensor, "n d"], others: Float[Tensor, "k d"]) -> Float[Tensor, "n k"]:
    """Inner products of rows with others in float64, by the kernel where nothing is differentiated."""
    if not compiled_for(rows, others):
        return rows.double() @ others.double().T
    return _sums(rows, others, 8)


OuterPiece = tuple[int, int, Tensor, Tensor]
"""Of flattened outer products the places from a first to before a last one; signals and inputs, one a row."""


def inner_with(
    signals: Float[Tensor, "n out"], inputs: Float[Tensor, "n in"], pieces: Sequence[OuterPiece]
) -> list[Float[Tensor, "n m"]]:
    """Inner products of outer products s xᵀ with others, of which a piece is looked at, in float64.

    <s xᵀ, t yᵀ> = <s, t> <x, y>; a row of the matrix that a piece cuts has a share of the inputs.

    Args:
        signals: s, one a row.
        inputs: x, one a row.
        pieces: of the others, t and y.
    """
    width = inputs.shape[1]
    # Where rows are cut: between two such places inputs are multiplied once, for all pieces of the same inputs.
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

    found = []
    for start, stop, leaving, entering in pieces:
        total = signals.new_zeros(len(signals), len(leaving), dtype=torch.float64)
        first, last = -(-start // width), stop // width  # whole rows of the matrix
        if first < last:
            total += exact_products(signals[:, first:last], leaving[:, first:last]) * along(entering, 0, width)
        # The rows that are cut, or the one that is cut twice.
        edges = [(start, min(stop, first * width)), (max(start, last * width), stop)]
        for low, high in edges if first <= last else [(start, stop)]:
            if low < high:
                row = low // width
                through = signals[:, row].double().unsqueeze(1) * leaving[:, row].double()
                total += through * along(entering, low - row * width, high - row * width)
        found.append(total)
    return found


def lower_products(rows: Float[Tensor, "m d"], *, exact: bool) -> Float[Tensor, "m m"]:
    """Inner products of rows one with another, in float64; what is above the diagonal may be anything.

    Args:
        rows: one a row, which are `compiled_for`.
        exact: whether all is computed in float64, not just sums of a few kilobytes of a row.
    """
    return _sums(rows, rows, 8 if exact else _BYTES[rows.dtype], lower=True)


def compiled_for(*rows: Float[Tensor, "_ _"]) -> bool:
    """Whether the kernel can read these rows, and is worth it for the last: where MKL may use half of the vectors."""
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
    """The processor, where it has AVX-512."""
    host = processor()
    return None if host is None or host.vector < 64 else host


def _kernel(rows: Tensor, number: int, *, scaled: bool) -> RowProducts:
    host = _wide()
    assert host is not None  # noqa: S101  the caller has asked
    return row_products(host, rows.element_size(), number, scaled=scaled)


@dataclass(frozen=True)
class _Runs:
    """How the kernel goes through rows: see there."""

    runs: Int64[Tensor, "n 5"]
    strips: Int64[Tensor, "m 3"]


@lru_cache(maxsize=256)
def _runs(size: int, kernel: RowProducts) -> _Runs:
    """Whole rows, a strip at a time."""
    places = torch.arange(0, size, kernel.strip)
    widths, number = (size - places).clamp(max=kernel.strip), torch.arange(len(places))
    none = torch.zeros_like(places)
    vectors = (widths + kernel.lanes - 1) // kernel.lanes
    return _Runs(
        torch.stack([places, places, widths, none, none], dim=1), torch.stack([number, number + 1, vectors], dim=1)
    )


@lru_cache(maxsize=256)
def _outer_runs(start: int, stop: int, width: int, kernel: RowProducts) -> _Runs:
    """Flattened outer products over [start, stop): runs of inputs, each with the number of an output as its factor."""
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
    """Inner products by the kernel, which has no bounds of its own.

    Args:
        left: rows, or inputs of outer products.
        right: rows.
        number: bytes of a number in which is computed.
        lower: whether those above the diagonal may be left out.
        factors: signals of outer products.
        runs: of outer products.
    """
    if runs is None and left.shape[1] != right.shape[1]:
        raise ValueError(f"rows must be of one length, got {left.shape[1]} and {right.shape[1]} numbers")
    kernel = _kernel(left, number, scaled=factors is not None)
    runs = runs or _runs(left.shape[1], kernel)
    factors = left if factors is None else factors
    count, columns, threads = len(left), len(right), torch.get_num_threads()
    # Long rows in parts, by their length alone; only then by examples: a row is added up in one way whoever is there.
    parts = _edges(len(runs.strips), max(1, min(threads, len(runs.strips) // _STRIPS_A_THREAD)))
    tiles = -(-count // kernel.left)
    # Below the diagonal there is the more of a row the lower it is.
    shares = _edges(tiles, max(1, min(threads // (len(parts) - 1), tiles // _TILES_A_THREAD)), 0.5 if lower else 1.0)
    panels = _edges(-(-columns // kernel.right), -(-columns // _PANEL))
    sums = left.new_zeros(len(parts) - 1, tiles * kernel.left, panels[-1] * kernel.right, dtype=torch.float64)

    def work(task: int) -> None:
        part, share = divmod(task, len(shares) - 1)
        high, low = (tile * kernel.left for tile in shares[share : share + 2])
        for begin, end in pairwise(column * kernel.right for column in panels):
            # Of a square, rows above the panel have nothing below the diagonal.
            top = max(high, begin // kernel.left * kernel.left) if lower else high
            if top >= min(low, count):
                continue
            some, others, to = left[top:low], right[begin:end], sums[part, top:, begin:]
            room = left.new_empty((end - begin + kernel.left) * kernel.strip * kernel.number, dtype=torch.uint8)
            kernel.add(
                *(value for each in (some, others) for value in (each.data_ptr(), each.stride(0), len(each))),
                *(factors[top:].data_ptr(), factors.stride(0)),
                *(runs.runs.data_ptr(), runs.strips[parts[part] :].data_ptr(), parts[part + 1] - parts[part]),
                *(to.data_ptr(), to.stride(0), room.data_ptr(), top - begin if lower else columns),
            )

    flops = 2.0 * count * right.numel()
    at_once = max(1, min(threads, int(flops / _WORTH_A_THREAD)))
    in_threads(work, (len(parts) - 1) * (len(shares) - 1), at_once=at_once)
    return (sums[0] if len(sums) == 1 else sums.sum(dim=0))[:count, :columns]


def _edges(total: int, parts: int, power: float = 1.0) -> list[int]:
    """Where parts begin, and the last one ends: of even sizes, or of sizes whose first ones add up to a power."""
    return [round(total * (i / parts) ** power) for i in range(parts + 1)]
