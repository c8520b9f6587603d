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
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from llvmlite import ir

from .machine_code import INT, LlvmValue, Processor, compiled, counted, fused, read, spread, widened, write

_STRIP_BYTES = 4096  # of a row at a time: tiles of both factors then fit a first cache
_LINE = 64  # bytes of a cache line
_RIGHT = 4  # rows of the right factor in a tile


@dataclass(frozen=True)
class RowProducts:
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
    def left(self) -> int:
        """Rows of the left factor in a tile: results come in multiples of it."""
        return self.host.sums // _RIGHT

    @property
    def right(self) -> int:
        """Rows of the right factor in a tile: results come in multiples of it."""
        return _RIGHT

    @cached_property
    def add(self) -> Callable[..., None]:
        """Adds products of all left rows with all right rows to a matrix.

        Rows are split into runs of consecutive numbers, which have a place of their own in left and right rows; as many
        runs as fill `strip` numbers, each padded to whole vectors, make a strip.

        Its arguments are

        - left rows, numbers from a row to the next, number of rows; then the same of right rows;
        - for outer products, factors that the runs of a left row are multiplied by, and numbers from a row's factors to
          the next row's;
        - a table of runs [n, 5]: place in left rows, place in right rows, length, index of the factor, place in the
          strip;
        - a table of strips [n, 3], (first run, end of runs, vectors) each, and the number of strips;
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


@lru_cache
def row_products(host: Processor, entry_size: int, number: int, *, scaled: bool = False) -> RowProducts:
    """Returns the kernel of a format, compiled once."""
    return RowProducts(host, entry_size, number, scaled)


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
            with counted(build, INT(0), self._parts(left[2], s.left)) as high:
                first = build.mul(high.number, INT(s.left))
                place, _, width, *_ = self._entries(runs, start, 5)
                tile, tile_step, in_place = tile_room, INT(s.strip), ir.IntType(1)(0)
                if s.given == s.number and not s.scaled:
                    # Whole vectors of a whole tile are multiplied in place.
                    whole = build.icmp_signed("<=", build.add(first, INT(s.left)), left[2])
                    in_place = build.and_(whole, build.icmp_signed("==", width, build.mul(vectors, INT(s.lanes))))
                    tile = build.select(in_place, self._row(high_rows, first, place), tile_room)
                    tile_step = build.select(in_place, left[1], tile_step)
                with build.if_then(build.not_(in_place)), counted(build, start, end) as run:
                    source, _, length, of, to = self._entries(runs, run.number, 5)
                    for i in range(s.left):
                        number = self._least(build.add(first, INT(i)), high_rows.last)
                        factor = build.gep(factors, [build.add(build.mul(number, factors_step), of)])
                        into = build.gep(tile_room, [build.add(to, INT(i * s.strip))])
                        row = self._row(high_rows, number, source)
                        self._pack(row, build.load(factor) if s.scaled else None, length, into)
                following = build.add(first, INT(s.left))
                stop = self._least(tiles, self._parts(build.add(following, behind), _RIGHT))
                ahead = [self._row(high_rows, build.add(following, INT(i)), place) for i in range(s.left)]
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
        with counted(build, INT(0), vectors, [zero] * (s.left * _RIGHT)) as loop:
            place = build.mul(loop.number, INT(self._lanes))
            factors = [self._load(right, INT(s.strip), place, i) for i in range(_RIGHT)]
            values = (self._load(left, left_step, place, i) for i in range(s.left))
            products = [(value, factor) for value in values for factor in factors]
            loop.sums = [build.call(self._fma, [*pair, sum]) for pair, sum in zip(products, loop.sums, strict=True)]
        four = ir.VectorType(ir.DoubleType(), _RIGHT)
        for i in range(s.left):
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
