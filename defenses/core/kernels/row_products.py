"""Inner products of rows with rows, both read in place: sums in registers, of numbers that stay in the cache.

The kernel computes a matrix product of few long rows. Libraries rearrange the factors for a loop over the entries of
the result; here rows are multiplied vector by vector, in their memory order, a tile of vector sums stays in registers,
and the lanes of each are added up at the end. On AMD, where MKL uses half of AVX-512, that takes half of its time (Zen
5, a batch of 256 with 100 directions). Left rows may also be outer products, which are formed in the cache.

Source: register tiling and packing after Goto & van de Geijn, "Anatomy of High-Performance Matrix Multiplication", ACM
TOMS 2008.

Guarantee:
    A product is computed from its two rows alone, by the same operations wherever they are in their matrices. Products
    over 4 KiB of a row (`strip`) are summed in the format of the product, and those sums are added in float64.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Float
from llvmlite import ir
from torch import Tensor

from .kernel import Kernel, ReferenceResult, computed_once, synthetic_rows
from .machine_code import (
    INT,
    LlvmValue,
    Processor,
    compiled,
    counted,
    fused,
    in_threads,
    processor,
    read,
    spread,
    widened,
    write,
)
from .row_runs import runs_over

_STRIP_BYTES = 4096  # of a row at a time: tiles of both factors then fit a first cache
_LINE = 64  # bytes of a cache line
_RIGHT = 4  # rows of the right factor in a tile
# Size of the right factor from which the kernel saves more time than its call costs. The size of the left factor must
# not matter, because then a row's products would depend on the number of rows.
_WORTH_IT = 2**13
_PANEL = 128  # right rows at a time, a strip of which stays in the second-level cache
_WORTH_A_THREAD = 1e8  # flops from which another thread saves more than it costs
_STRIPS_A_THREAD = 4
_TILES_A_THREAD = 4


@dataclass(frozen=True)
class RowProducts(Kernel):
    """A kernel for inner products of rows.

    Attributes:
        host: the processor whose vectors are used.
        given: bytes of a number of the rows: 4 or 8.
        number: bytes of a number in products and sums: 8 for exact products of float32.
        scaled: True if left rows are outer products.
    """

    host: Processor
    given: int
    number: int
    scaled: bool

    @property
    def lanes(self) -> int:
        """Numbers of a vector."""
        return self.host.vector // self.number

    @property
    def strip(self) -> int:
        """Numbers of a row at a time."""
        return _STRIP_BYTES // self.number

    @property
    def tile(self) -> int:
        """Rows of the left factor in a tile: results come in multiples of it."""
        return self.host.sums // _RIGHT

    @staticmethod
    def usable(*rows: Float[Tensor, "_ _"]) -> bool:
        """Returns whether the code can read these rows (needs AVX-512), and saves time for the last as right factor."""
        return (
            _wide() is not None
            and rows[-1].numel() >= _WORTH_IT
            and len(rows[-1]) > 1
            and all(
                type(each) is Tensor
                and each.device.type == "cpu"
                and each.dtype == rows[-1].dtype
                and each.dtype in (torch.float32, torch.float64)
                and (each.stride(1) == 1 or each.shape[1] == 1)
                and each.numel() > 0
                and not (torch.is_grad_enabled() and each.requires_grad)
                for each in rows
            )
        )

    @computed_once
    def code(self) -> Callable[..., None]:
        """Adds products of all left rows with all right rows to a matrix.

        Its arguments are

        - left rows, numbers from a row to the next, number of rows; then the same of right rows;
        - for outer products, factors that the runs of a left row are multiplied by, and numbers from a row's factors to
          the next row's;
        - a table of runs and a table of strips (`row_runs.py`), and the number of strips;
        - sums in float64 [left, right], both padded to multiples of a tile, and numbers from a row of sums to the next;
        - memory of `strip` numbers for each right row, padded to a tile, and for each row of a left tile;
        - the index of the first left row minus that of the first right row, in the square matrix that they are taken
          from, if entries above its diagonal may be left out (at least 1 - the rows of a left tile); else the number of
          right rows.

        No count may be 0.
        """
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        rows = (pointer, size, size)
        argument_types = (pointer, size, pointer, pointer, size, pointer, size, pointer, size)
        return compiled(_Writer(self).module, "products", *rows, *rows, *argument_types)

    def __call__(
        self,
        left: Float[Tensor, "n d"],
        right: Float[Tensor, "k span"],
        factors: Float[Tensor, "n m"] | None = None,
        start: int = 0,
        lower: bool = False,
    ) -> list[Float[Tensor, "n k"]]:
        """Returns inner products in float64.

        Args:
            left: rows, or inputs of outer products.
            right: rows.
            factors: signals of outer products.
            start: first coordinate of a flattened outer product that the right rows have.
            lower: whether entries above the diagonal may be left out.
        """
        if factors is None and left.shape[1] != right.shape[1]:
            raise ValueError(f"rows must be of one length, got {left.shape[1]} and {right.shape[1]} numbers")
        factors, width, stop = left if factors is None else factors, left.shape[1], start + right.shape[1]
        if len(factors) != len(left) or not 0 <= start <= stop <= factors.shape[1] * width:
            raise ValueError(
                f"signals and inputs must be of the same rows, and directions lie within their products, got "
                f"{tuple(factors.shape)}, {tuple(left.shape)}, directions of {right.shape[1]} numbers from {start} on"
            )
        runs, strips = runs_over(start, stop, width, self.strip, self.lanes)
        count, columns, threads = len(left), len(right), torch.get_num_threads()
        # Rows are split at places that depend on their length alone, so that the sum of a row does not depend on the
        # batch; examples are split only if threads remain.
        parts = _edges(len(strips), max(1, min(threads, len(strips) // _STRIPS_A_THREAD)))
        tiles = -(-count // self.tile)
        # Lower rows have more entries below the diagonal.
        shares = _edges(
            tiles, max(1, min(threads // (len(parts) - 1), tiles // _TILES_A_THREAD)), 0.5 if lower else 1.0
        )
        panels = _edges(-(-columns // _RIGHT), -(-columns // _PANEL))
        sums = left.new_zeros(len(parts) - 1, tiles * self.tile, panels[-1] * _RIGHT, dtype=torch.float64)

        def work(task: int) -> None:
            part, share = divmod(task, len(shares) - 1)
            high, low = (tile * self.tile for tile in shares[share : share + 2])
            for begin, end in pairwise(column * _RIGHT for column in panels):
                # In a square, rows above the panel have no entries below the diagonal.
                top = max(high, begin // self.tile * self.tile) if lower else high
                if top >= min(low, count):
                    continue
                left_rows, right_rows, part_sums = left[top:low], right[begin:end], sums[part, top:, begin:]
                room = left.new_empty((end - begin + self.tile) * self.strip * self.number, dtype=torch.uint8)
                self.code(
                    *(
                        value
                        for each in (left_rows, right_rows)
                        for value in (each.data_ptr(), each.stride(0), len(each))
                    ),
                    *(factors[top:].data_ptr(), factors.stride(0)),
                    *(runs.data_ptr(), strips[parts[part] :].data_ptr(), parts[part + 1] - parts[part]),
                    *(part_sums.data_ptr(), part_sums.stride(0), room.data_ptr(), top - begin if lower else columns),
                )

        flops = 2.0 * count * right.numel()
        at_once = max(1, min(threads, int(flops / _WORTH_A_THREAD)))
        in_threads(work, (len(parts) - 1) * (len(shares) - 1), at_once=at_once)
        return [(sums[0] if len(sums) == 1 else sums.sum(dim=0))[:count, :columns]]

    def reference(
        self, left: Tensor, right: Tensor, factors: Tensor | None = None, start: int = 0, lower: bool = False
    ) -> list[ReferenceResult]:
        """Products of whole rows in float64; NaN above the diagonal, where the kernel may leave out entries."""
        rows, right = left.double(), right.double()
        if factors is not None:
            rows = (factors.double().unsqueeze(2) * rows.unsqueeze(1)).flatten(1)[:, start : start + right.shape[1]]
        products, sizes = rows @ right.T, rows.norm(dim=1).unsqueeze(1) * right.norm(dim=1)
        above = torch.ones_like(products, dtype=torch.bool).triu(1) & lower
        return [ReferenceResult(products.masked_fill(above, torch.nan), (1e-14 if self.number == 8 else 1e-6) * sizes)]

    def examples(self) -> Iterator[tuple[Any, ...]]:
        """Yields counts and sizes beside those of tiles and vectors, with NaN between rows and in one of them."""
        rows = synthetic_rows(wide=self.given == 8)
        for count, columns, size in ((1, 1, 1), (7, 3, 5), (6, 4, 64), (13, 9, 1025), (12, 130, 1024), (40, 20, 3000)):
            left, right = rows(count, size), rows(columns, size)
            left[-1, size // 2] = torch.nan
            if not self.scaled:
                yield left, right
                yield right, right, None, 0, True
                continue
            for start in (0, size - 1):
                yield left, rows(columns, 3 * size - 2 * start), rows(count, 3), start


def row_products(rows: Tensor, *, exact: bool = False, scaled: bool = False) -> RowProducts:
    """Returns the kernel for rows that are `usable`.

    Args:
        rows: tensor of their dtype.
        exact: whether all arithmetic is in float64; otherwise a few kilobytes of a row are summed in its own dtype, and
            these sums added in float64.
        scaled: whether left rows are outer products.
    """
    host, entry_size = _wide(), rows.element_size()
    assert host is not None  # noqa: S101  the rows are usable
    return _row_products(host, entry_size, 8 if exact else entry_size, scaled)


_row_products = lru_cache(RowProducts)  # each is compiled once


@cache
def _wide() -> Processor | None:
    """The processor, if it has AVX-512."""
    host = processor()
    return None if host is None or host.vector < 64 else host


def _edges(total: int, parts: int, power: float = 1.0) -> list[int]:
    """Boundaries of parts of equal size, or of parts whose cumulative size grows with a power."""
    return [round(total * (i / parts) ** power) for i in range(parts + 1)]


@dataclass(frozen=True)
class _Rows:
    """A factor in memory: its start, numbers from a row to the next, index of its last row."""

    start: LlvmValue
    step: LlvmValue
    last: LlvmValue


class _Writer:
    """Writes a kernel in LLVM's representation."""

    def __init__(self, sizes: RowProducts) -> None:
        self._sizes = sizes
        formats = {4: ir.FloatType(), 8: ir.DoubleType()}
        self._given, self._number = formats[sizes.given], formats[sizes.number]
        self._lanes = sizes.lanes
        self._vector = ir.VectorType(self._number, self._lanes)
        self.module = ir.Module("row_products")
        self._fma = fused(self.module, self._vector)
        self._byte = ir.IntType(8).as_pointer()
        hint = ir.FunctionType(ir.VoidType(), [self._byte, *[ir.IntType(32)] * 3])
        self._prefetch = ir.Function(self.module, hint, "llvm.prefetch.p0")
        self._write()

    def _write(self) -> None:
        s, entry, number = self._sizes, self._given.as_pointer(), self._number.as_pointer()
        table, rows = INT.as_pointer(), [entry, INT, INT]
        kind = [*rows, *rows, entry, INT, table, table, INT, ir.DoubleType().as_pointer(), INT, number, INT]
        function = ir.Function(self.module, ir.FunctionType(ir.VoidType(), kind), "products")
        left, right, (factors, factors_step, runs) = function.args[:3], function.args[3:6], function.args[6:9]
        strips, strip_count, sums, step, room, behind = function.args[9:]
        sums.add_attribute("noalias")
        room.add_attribute("noalias")
        build: Any = ir.IRBuilder(function.append_basic_block())
        self._build = build
        high_rows, wide_rows = (_Rows(start, step, build.sub(count, INT(1))) for start, step, count in (left, right))
        tiles = self._parts(right[2], _RIGHT)
        tile_room = build.gep(room, [build.mul(tiles, INT(_RIGHT * s.strip))])
        with counted(build, INT(0), strip_count) as strip:
            start, end, vectors = self._entries(strips, strip.number, 3)
            with counted(build, start, end) as run:
                _, place, width, _, to = self._entries(runs, run.number, 5)
                with counted(build, INT(0), build.mul(tiles, INT(_RIGHT))) as row:
                    into = build.gep(room, [build.add(build.mul(row.number, INT(s.strip)), to)])
                    self._pack(self._row(wide_rows, row.number, place), None, width, into)
            with counted(build, INT(0), self._parts(left[2], s.tile)) as high:
                first = build.mul(high.number, INT(s.tile))
                place, _, width, *_ = self._entries(runs, start, 5)
                tile, tile_step, in_place = tile_room, INT(s.strip), ir.IntType(1)(0)
                if s.given == s.number and not s.scaled:
                    # Whole vectors of a whole tile are multiplied in place.
                    whole = build.icmp_signed("<=", build.add(first, INT(s.tile)), left[2])
                    in_place = build.and_(whole, build.icmp_signed("==", width, build.mul(vectors, INT(s.lanes))))
                    tile = build.select(in_place, self._row(high_rows, first, place), tile_room)
                    tile_step = build.select(in_place, left[1], tile_step)
                with build.if_then(build.not_(in_place)), counted(build, start, end) as run:
                    source, _, length, of, to = self._entries(runs, run.number, 5)
                    for i in range(s.tile):
                        number = self._least(build.add(first, INT(i)), high_rows.last)
                        factor = build.gep(factors, [build.add(build.mul(number, factors_step), of)])
                        into = build.gep(tile_room, [build.add(to, INT(i * s.strip))])
                        row = self._row(high_rows, number, source)
                        self._pack(row, build.load(factor) if s.scaled else None, length, into)
                following = build.add(first, INT(s.tile))
                stop = self._least(tiles, self._parts(build.add(following, behind), _RIGHT))
                ahead = [self._row(high_rows, build.add(following, INT(i)), place) for i in range(s.tile)]
                with counted(build, INT(0), stop) as wide:
                    self._fetch(ahead, width, wide.number, stop)
                    column = build.mul(wide.number, INT(_RIGHT))
                    to = build.gep(sums, [build.add(build.mul(first, step), column)])
                    self._tile(tile, tile_step, build.gep(room, [build.mul(column, INT(s.strip))]), vectors, to, step)
        build.ret_void()

    def _row(self, rows: _Rows, number: LlvmValue, place: LlvmValue) -> LlvmValue:
        """Returns a place in a row; beyond the last row, in the last row again, for results that are not used."""
        start = self._build.mul(self._least(number, rows.last), rows.step)
        return self._build.gep(rows.start, [self._build.add(start, place)])

    def _pack(self, row: LlvmValue, factor: LlvmValue | None, width: LlvmValue, to: LlvmValue) -> None:
        """Packs a run of a row times its factor, in the format of the products, zero-padded to whole vectors."""
        build = self._build
        whole = build.sdiv(width, INT(self._lanes))
        done = build.mul(whole, INT(self._lanes))
        scale = ir.Constant(self._number, 1.0) if factor is None else widened(build, factor, self._number)
        scales = spread(build, scale, self._vector)
        with build.if_then(build.icmp_signed(">", whole, INT(0))), counted(build, INT(0), whole) as long:
            place = build.mul(long.number, INT(self._lanes))
            values = read(build, build.gep(row, [place]), ir.VectorType(self._given, self._lanes))
            write(build, build.fmul(widened(build, values, self._vector), scales), build.gep(to, [place]))
        with build.if_then(build.icmp_signed("<", done, width)):
            write(build, ir.Constant(self._vector, [0.0] * self._lanes), build.gep(to, [done]))
            with counted(build, done, width) as short:
                value = widened(build, build.load(build.gep(row, [short.number])), self._number)
                build.store(build.fmul(value, scale), build.gep(to, [short.number]))

    def _fetch(self, rows: list[LlvmValue], width: LlvmValue, part: LlvmValue, parts: LlvmValue) -> None:
        """Prefetches a part of the next rows' run, which the processor does not predict: it begins on another page."""
        build = self._build
        lines = self._parts(build.mul(width, INT(self._sizes.given)), _LINE)
        each = build.sdiv(build.add(lines, build.sub(parts, INT(1))), parts)
        start = build.mul(part, each)
        stop = self._least(lines, build.add(start, each))
        with build.if_then(build.icmp_signed("<", start, stop)), counted(build, start, stop) as line:
            place = build.mul(line.number, INT(_LINE // self._sizes.given))
            hints = [ir.IntType(32)(value) for value in (0, 2, 1)]  # for reading, into the second cache, data
            for row in rows:
                build.call(self._prefetch, [build.bitcast(build.gep(row, [place]), self._byte), *hints])

    def _tile(
        self,
        left: LlvmValue,
        left_step: LlvmValue,
        right: LlvmValue,
        vectors: LlvmValue,
        to: LlvmValue,
        step: LlvmValue,
    ) -> None:
        """Adds the products of a tile's rows to their sums."""
        s, build = self._sizes, self._build
        zero = ir.Constant(self._vector, [0.0] * self._lanes)
        with counted(build, INT(0), vectors, [zero] * (s.tile * _RIGHT)) as loop:
            place = build.mul(loop.number, INT(self._lanes))
            factors = [self._load(right, INT(s.strip), place, i) for i in range(_RIGHT)]
            values = (self._load(left, left_step, place, i) for i in range(s.tile))
            products = [(value, factor) for value in values for factor in factors]
            loop.sums = [build.call(self._fma, [*pair, sum]) for pair, sum in zip(products, loop.sums, strict=True)]
        four = ir.VectorType(ir.DoubleType(), _RIGHT)
        for i in range(s.tile):
            row_sums = widened(build, self._added_up(loop.sums[i * _RIGHT : (i + 1) * _RIGHT]), four)
            place = build.gep(to, [build.mul(step, INT(i))])
            write(build, build.fadd(read(build, place, four), row_sums), place)

    def _added_up(self, sums: list[LlvmValue]) -> LlvmValue:
        """Returns a vector of four vectors' totals: adjacent lanes, and then halves, are added for all at once."""
        lanes = self._lanes
        even = [[i, lanes + i] for i in range(0, lanes, 2)]
        low, high = self._merged(sums[0], sums[1], even, 1), self._merged(sums[2], sums[3], even, 1)
        if lanes == 2:
            return self._shuffled(low, high, list(range(_RIGHT)))
        total = self._merged(low, high, [[i, i + 1, lanes + i, lanes + i + 1] for i in range(0, lanes, 4)], 2)
        while lanes > _RIGHT:
            lanes //= 2
            low, high = (self._shuffled(total, total, list(range(i, i + lanes))) for i in (0, lanes))
            total = self._build.fadd(low, high)
        return total

    def _merged(self, a: LlvmValue, b: LlvmValue, places: list[list[int]], apart: int) -> LlvmValue:
        """Adds the numbers of two vectors at these places to those `apart` places behind."""
        flat = [place for each in places for place in each]
        return self._build.fadd(self._shuffled(a, b, flat), self._shuffled(a, b, [place + apart for place in flat]))

    def _shuffled(self, a: LlvmValue, b: LlvmValue, places: list[int]) -> LlvmValue:
        return self._build.shuffle_vector(a, b, ir.Constant(ir.VectorType(ir.IntType(32), len(places)), places))

    def _entries(self, table: LlvmValue, row: LlvmValue, columns: int) -> list[LlvmValue]:
        """Loads a row of a table of integers."""
        start = self._build.mul(row, INT(columns))
        places = [self._build.add(start, INT(i)) for i in range(columns)]
        return [self._build.load(self._build.gep(table, [place])) for place in places]

    def _load(self, rows: LlvmValue, step: LlvmValue, place: LlvmValue, row: int) -> LlvmValue:
        build = self._build
        return read(build, build.gep(rows, [build.add(place, build.mul(step, INT(row)))]), self._vector)

    def _parts(self, count: LlvmValue, of: int) -> LlvmValue:
        return self._build.sdiv(self._build.add(count, INT(of - 1)), INT(of))

    def _least(self, a: LlvmValue, b: LlvmValue) -> LlvmValue:
        return self._build.select(self._build.icmp_signed("<", a, b), a, b)
