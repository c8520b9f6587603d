"""Squared norms of a convolution's per-example weight gradients from inner products, compiled for the layer's sizes.

A gradient is a sum over positions t of output gradient s_t times patch x_t, so its squared norm is

    sum_tu <x_t, x_u> <s_t, s_u>,   <x_t, x_u> = sum_k <pixel_(t+k), pixel_(u+k)> over the kernel's offsets k.

For few positions and many channels, that is a tenth of the work of forming the gradient, but in products too small for
libraries. Here inner products of pixels and of output gradients are formed in registers, tile by tile, read in place,
and the matrices of both stay in the cache. Padding pixels are skipped: their entries in a matrix stay zero.

Products are computed in float64 also for float32 numbers: if positions cancel, rounding errors of long float32 sums
would remain, which for similar numbers are many times those of numbers with independent signs.

At stride s both pixels of a pair have the same remainders (y mod s, x mod s). Pixels of the same remainders form an
image, a "phase", on which the stride is one, so that a sum over k reads vectors at distances that are known when the
kernel is compiled.

Guarantee:
    An example's result is computed from its own numbers alone, by the same operations at any place in a batch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import torch
from llvmlite import ir
from torch import Tensor
from torch.nn import functional as F

from .convolution_rows import RowKernel
from .images import Images, over_images, readable_images
from .kernel import Kernel, ReferenceResult, computed_once
from .machine_code import INT, LlvmValue, VectorWriter, added_up, compiled, counted, processor, widened

# Points on a side of a tile; with few registers half as many on the other.
_TILE = 4
# Maximum size of the matrices, half of which is used; larger matrices leave a core's second cache.
_MOST_NUMBERS = 2**18
# Maximum number of a kernel's offsets, over which sums are unrolled.
_MOST_OFFSETS = 160
# Flops that take as long as a sum over a vector's lanes, and as a term of a sum along the kernel (Zen 5).
_PER_PAIR, _PER_OFFSET = 64, 4
# Numbers of the widest vector: rows of the matrices are read in whole vectors.
_WIDEST = 8
_TOLERANCE = 1e-5  # of the sum of the terms' sizes: smaller differences are rounding


@dataclass(frozen=True)
class _Points:
    """Pixels or derivatives whose inner products are formed.

    Attributes:
        places: (start of its channels, start of its row of the matrix, its column) of each, in whole tiles.
        first: for each tile, index of the first tile that it is multiplied with; the last one is the tile itself.
    """

    places: tuple[tuple[int, int, int], ...]
    first: tuple[int, ...]

    @classmethod
    def of(cls, places: Sequence[tuple[int, int, int]], lines: Sequence[int], reach: int) -> _Points:
        """Takes points and their lines; only points on lines less than `reach` apart are multiplied."""
        starts = range(0, len(places), _TILE)
        first = [next(i for i, line in enumerate(lines) if line > lines[start] - reach) // _TILE for start in starts]
        # A tile is filled up with its last point, whose products are then written twice.
        return cls((*places, *[places[-1]] * (-len(places) % _TILE)), tuple(first))

    @property
    def pairs(self) -> int:
        """Number of inner products that are formed."""
        return _TILE**2 * sum(tile + 1 - first for tile, first in enumerate(self.first))


@dataclass(frozen=True)
class ProductKernel(Kernel):
    """Kernel for a layer with the sizes of its row kernel, with one view."""

    sizes: RowKernel

    @property
    def fits(self) -> bool:
        """Returns whether the matrices stay in the cache, and the code is short."""
        high, wide = self.sizes.kernel
        return self.sizes.views == 1 and high * wide <= _MOST_OFFSETS and self.numbers <= _MOST_NUMBERS

    @property
    def numbers(self) -> int:
        """Size of the memory for the matrices, which has to be zero at first."""
        return self.behind_pixels + self.sizes.rows * self.sizes.columns * self.step

    @cached_property
    def flops(self) -> float:
        """Flops of an example, channels in whole vectors; other operations count as the flops that take as long."""
        host, s = processor(), self.sizes
        lanes = host.vector // 8 if host else 1
        pixels, signals = sum(points.pairs for points in self.pixels), self.derivatives.pairs
        entering, leaving = (-(-channels // lanes) * lanes for channels in (s.entering, s.leaving))
        along = _PER_OFFSET * signals * s.kernel[0] * s.kernel[1]
        return 2 * (pixels * entering + signals * leaving) + _PER_PAIR * (pixels + signals) + along

    usable = staticmethod(readable_images)

    @computed_once
    def code(self) -> Callable[..., None]:
        """Computes squared norms of rows without forming them.

        Arguments: inputs [n, height, width, entering], derivatives [n, rows, columns, leaving], and in float64 zeros
        [numbers] that are overwritten; first and last example; in float64 squared norms [n] and sums over t of |x_t|²
        |s_t|² [n].
        """
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        types = (pointer, pointer, pointer, size, size, pointer, pointer)
        return compiled(_ProductWriter(self).module, "products", *types)

    def __call__(self, inputs: Images, signals: Images) -> list[Tensor]:
        """Returns squared norms, and sums over positions of |x_t|² |s_t|², which their terms do not exceed."""
        self.sizes.refuse_unlike(inputs, signals)
        squares, sizes = signals.new_empty(2, len(signals), dtype=torch.float64)

        def run(*batch: int) -> None:
            self.code(*batch, squares.data_ptr(), sizes.data_ptr())

        over_images(run, (inputs, signals), len(signals), scratch=(self.numbers, torch.float64), flops=self.flops)
        return [squares, sizes]

    def reference(self, inputs: Images, signals: Images) -> list[ReferenceResult]:
        """Squared norms of rows, and sizes of all patches by a convolution with ones."""
        s, (top, bottom, left, right) = self.sizes, self.sizes.padding
        pixels = F.pad(inputs.double().square().sum(dim=1, keepdim=True), (left, right, top, bottom))
        patches = F.conv2d(pixels, pixels.new_ones(1, 1, *s.kernel), stride=s.stride, dilation=s.dilation)
        sizes = (patches[:, 0] * signals.double().square().sum(dim=1)).sum(dim=(1, 2))
        squares = s.reference_rows(inputs, signals).square().sum(dim=1)
        return [ReferenceResult(values, _TOLERANCE * sizes) for values in (squares, sizes)]

    def examples(self) -> Iterator[tuple[Tensor, ...]]:
        """Yields three examples of which the middle one is NaN."""
        for inputs, signals, _ in self.sizes.examples():
            yield inputs, signals

    @cached_property
    def phases(self) -> list[tuple[tuple[int, Sequence[int]], tuple[int, Sequence[int]]]]:
        """Remainders of y and x, each with the kernel's offsets there in units of the stride."""
        s, by_dimension = self.sizes, []
        for kernel, stride, dilation in zip(s.kernel, s.stride, s.dilation, strict=True):
            offsets: dict[int, list[int]] = {}
            for offset in range(0, kernel * dilation, dilation):
                offsets.setdefault(offset % stride, []).append(offset // stride)
            by_dimension.append(offsets.items())
        return list(product(*by_dimension))

    @cached_property
    def grid(self) -> tuple[int, int]:
        """Height and width of a phase."""
        s = self.sizes
        down, across = (max(max(phase[i][1]) for phase in self.phases) for i in (0, 1))
        return s.rows + down, s.columns + across

    @property
    def area(self) -> int:
        """Numbers of a row of a phase's matrix of pixels, which is also its number of rows."""
        return self.grid[0] * self.grid[1]

    @property
    def behind_pixels(self) -> int:
        """Start of the matrix of derivatives, after a vector for reads beyond the last row."""
        return len(self.phases) * self.area**2 + _WIDEST

    @property
    def step(self) -> int:
        """Numbers of a row of the matrix of derivatives, whose columns are those of a phase's matrix."""
        used = (self.sizes.rows - 1) * self.grid[1] + self.sizes.columns
        return -(-used // _WIDEST) * _WIDEST

    @cached_property
    def derivatives(self) -> _Points:
        """Points of the output gradient, a point per position."""
        s = self.sizes
        at = list(product(range(s.rows), range(s.columns)))
        places = [
            (t * s.leaving, self.behind_pixels + t * self.step, y * self.grid[1] + x) for t, (y, x) in enumerate(at)
        ]
        return _Points.of(places, [y for y, _ in at], s.rows)

    @cached_property
    def pixels(self) -> list[_Points]:
        """Points of each phase's input pixels that some position reads."""
        s, points = self.sizes, []
        top, _, left, _ = s.padding
        for number, ((down, lines), (right, columns)) in enumerate(self.phases):
            places, on = [], []
            for high in sorted({row + line for row in range(s.rows) for line in lines}):
                for wide in sorted({place + column for place in range(s.columns) for column in columns}):
                    y, x = down + s.stride[0] * high - top, right + s.stride[1] * wide - left
                    if 0 <= y < s.height and 0 <= x < s.width:
                        at = high * self.grid[1] + wide
                        places.append(((y * s.width + x) * s.entering, (number * self.area + at) * self.area, at))
                        on.append(high)
            if places:
                points.append(_Points.of(places, on, s.rows))
        return points


class _ProductWriter(VectorWriter):
    """Writes a kernel in LLVM's representation."""

    def __init__(self, kernel: ProductKernel) -> None:
        host = processor()
        assert host is not None  # noqa: S101  the caller has asked
        super().__init__("products", host, wide=True)
        self._kernel, self._sizes = kernel, kernel.sizes
        self._given = self._number if kernel.sizes.wide else ir.FloatType()
        self._others = _TILE if host.sums >= _TILE**2 else _TILE // 2
        entry, double = self._given.as_pointer(), self._number.as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [entry, entry, double, INT, INT, double, double])
        function = ir.Function(self.module, kind, "products")
        for argument in function.args:
            if isinstance(argument.type, ir.PointerType):
                argument.add_attribute("noalias")
        self._write(ir.IRBuilder(function.append_basic_block()), *function.args)

    def _write(self, build: Any, *arguments: LlvmValue) -> None:
        inputs, signals, matrices, first, last, squares, diagonals = arguments
        self._build, s = build, self._sizes
        with counted(build, first, last) as example:
            n = example.number
            image = build.gep(inputs, [build.mul(n, INT(s.height * s.width * s.entering))])
            for points in self._kernel.pixels:
                self._products(image, matrices, points, s.entering)
            derivatives = build.gep(signals, [build.mul(n, INT(s.rows * s.columns * s.leaving))])
            self._products(derivatives, matrices, self._kernel.derivatives, s.leaving)
            for value, to in zip(self._summed(matrices), (squares, diagonals), strict=True):
                build.store(value, build.gep(to, [n]))
        build.ret_void()

    def _products(self, source: LlvmValue, matrices: LlvmValue, points: _Points, channels: int) -> None:
        """Forms the inner products of points with those before them and, within a tile, with all."""
        build = self._build
        places = self._table([value for place in points.places for value in place])
        first = self._table(points.first)

        def place(point: LlvmValue, field: int) -> LlvmValue:
            return build.load(build.gep(places, [INT(0), build.add(build.mul(point, INT(3)), INT(field))]))

        with counted(build, INT(0), INT(len(points.first))) as tile:
            start = build.mul(tile.number, INT(_TILE))
            tile_indices = [build.add(start, INT(i)) for i in range(_TILE)]
            many = INT(_TILE // self._others)
            begin = build.mul(build.load(build.gep(first, [INT(0), tile.number])), many)
            rows = [build.gep(matrices, [place(index, 1)]) for index in tile_indices]
            left_points = [build.gep(source, [place(index, 0)]) for index in tile_indices]
            with counted(build, begin, build.mul(build.add(tile.number, INT(1)), many)) as later_tile:
                start = build.mul(later_tile.number, INT(self._others))
                others = [build.add(start, INT(i)) for i in range(self._others)]
                columns = [place(index, 2) for index in others]
                sums = self._tile(left_points, [build.gep(source, [place(index, 0)]) for index in others], channels)
                into = [build.gep(row, [column]) for row in rows for column in columns]
                for i in range(0, len(sums), self._lanes):
                    totals = self._totals(sums[i : i + self._lanes])
                    for lane in range(self._lanes):
                        build.store(build.extract_element(totals, ir.IntType(32)(lane)), into[i + lane])

    def _tile(self, left: Sequence[LlvmValue], right: Sequence[LlvmValue], channels: int) -> list[LlvmValue]:
        """Returns products of channels, added up lane by lane."""
        build, whole = self._build, channels // self._lanes
        sums: list[LlvmValue] = [ir.Constant(self._vector, [0.0] * self._lanes)] * (len(left) * len(right))

        def added(at: LlvmValue, lanes: int | None, sums: Sequence[LlvmValue]) -> list[LlvmValue]:
            left_values, right_values = (
                [self._read(build.gep(each, [at]), lanes) for each in side] for side in (left, right)
            )
            return [
                build.call(self._fma, [*pair, sum])
                for pair, sum in zip(product(left_values, right_values), sums, strict=True)
            ]

        if whole:
            with counted(build, INT(0), INT(whole), sums) as loop:
                loop.sums = added(build.mul(loop.number, INT(self._lanes)), None, loop.sums)
            sums = loop.sums
        if remainder := channels % self._lanes:
            sums = added(INT(whole * self._lanes), remainder, sums)
        return sums

    def _read(self, start: LlvmValue, active: int | None) -> LlvmValue:
        """Loads a vector of channels, in float64."""
        return widened(self._build, self._at(start, 0, active, number=self._given), self._vector)

    def _totals(self, vectors: Sequence[LlvmValue]) -> LlvmValue:
        """Returns a vector of the sums of as many vectors as it has lanes."""
        # After merging m vectors each, lane p m + s holds part p of vector s; parts 2 p and 2 p + 1 are added.
        build, merged, beside, lanes = self._build, 1, self._lanes, range(self._lanes)
        while len(vectors) > 1:
            low = [beside + lane - merged if lane & merged else lane for lane in lanes]
            high = [beside + lane if lane & merged else lane + merged for lane in lanes]
            masks = [
                ir.Constant(ir.VectorType(ir.IntType(32), self._lanes), chosen_lanes) for chosen_lanes in (low, high)
            ]
            vectors = [
                build.fadd(*(build.shuffle_vector(*pair, mask) for mask in masks))
                for pair in zip(vectors[::2], vectors[1::2], strict=True)
            ]
            merged *= 2
        return vectors[0]

    def _summed(self, matrices: LlvmValue) -> tuple[LlvmValue, LlvmValue]:
        """Sums products of both matrices' entries, over all pairs and over each position with itself."""
        build, k = self._build, self._kernel
        double, lanes = self._number, self._lanes
        zero = ir.Constant(self._vector, [0.0] * lanes)
        # Both pixels of a pair move by the same offset: that is along a diagonal.
        moves = [
            number * k.area**2 + (line * k.grid[1] + column) * (k.area + 1)
            for number, ((_, lines), (_, columns)) in enumerate(k.phases)
            for line, column in product(lines, columns)
        ]
        places = ir.Constant(ir.VectorType(INT, lanes), list(range(lanes)))
        with counted(build, INT(0), INT(k.sizes.rows), [zero, double(0.0)]) as y:
            with counted(build, INT(0), INT(k.sizes.columns), y.sums) as x:
                t = build.add(build.mul(y.number, INT(k.sizes.columns)), x.number)
                at = build.add(build.mul(y.number, INT(k.grid[1])), x.number)
                pixels = build.gep(matrices, [build.mul(at, INT(k.area))])
                signals = build.gep(matrices, [build.add(INT(k.behind_pixels), build.mul(t, INT(k.step)))])
                stop = build.add(build.sdiv(at, INT(lanes)), INT(1))
                with counted(build, INT(0), stop, [x.sums[0], zero]) as run:
                    start = build.mul(run.number, INT(lanes))
                    pixel_place = build.gep(pixels, [start])
                    parts = [self._at(pixel_place, move) for move in moves]
                    while len(parts) > 1:
                        pairs = zip(parts[::2], parts[1::2], strict=False)
                        parts = [build.fadd(*pair) for pair in pairs] + parts[len(parts) // 2 * 2 :]
                    products = build.fmul(parts[0], self._at(build.gep(signals, [start]), 0))
                    before = build.icmp_signed("<=", build.add(places, self._spread(start)), self._spread(at))
                    products = build.select(before, products, zero)
                    run.sums = [build.fadd(run.sums[0], products), products]
                own = build.extract_element(run.sums[1], build.srem(at, INT(lanes)))
                x.sums = [run.sums[0], build.fadd(x.sums[1], own)]
            y.sums = x.sums
        half, diagonal = added_up(build, y.sums[0]), y.sums[1]
        # A pair of two positions counts twice.
        return build.fsub(build.fmul(half, double(2.0)), diagonal), diagonal
