"""Per-example gradients of a convolution's weight, compiled for the layer's sizes.

A gradient is a sum over positions of patch times output gradient: a matrix product, a factor of which consists of
overlapping patches. Libraries copy the patches, or run a grouped convolution with an example per group, which copies
inputs and results into and out of that layout. Here a tile of the gradient stays in registers during the loop over
positions. The numbers of a patch are read in place, at offsets from the position that are known when the kernel is
compiled, and multiply vectors of the output gradient's channels (`convolution_tiles.py`). That takes as long as the
vendor's kernel for the sum over the batch, or less (Zen 5: 240 of 256 Gflop/s).

Source: register tiling after Goto & van de Geijn, "Anatomy of High-Performance Matrix Multiplication", ACM TOMS 2008.

Guarantee:
    An example's row and its norm are computed from its own numbers alone, by the same operations at any place in a
    batch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from llvmlite import ir
from torch import Tensor
from torch.nn import functional as F
from torch.nn.grad import conv2d_weight

from .convolution_tiles import Patch, PatchTile, even, tiles_of, vectors_beside
from .images import Images, over_images, readable_images
from .kernel import Kernel, ReferenceResult, computed_once
from .machine_code import (
    INT,
    LlvmValue,
    Processor,
    VectorWriter,
    added_up,
    compiled,
    counted,
    fused,
    processor,
    widened,
)

# Positions whose products are added sequentially: in float32 such a sum is right to 1e-6 of its terms' lengths.
_MOST_IN_A_ROW = 512
_BYTE = ir.IntType(8)
_TOLERANCE = 1e-5  # of a row's length: smaller differences are rounding


@dataclass(frozen=True)
class RowKernel(Kernel):
    """The kernel for a layer of these sizes.

    Attributes:
        height, width: size of the input, before padding.
        entering, leaving: channels.
        kernel: height and width.
        stride: of the kernel.
        dilation: of the kernel.
        padding: (top, bottom, left, right), zeros.
        rows, columns: size of the output.
        views: images of an example, whose gradients are added up.
        wide: True for numbers of float64, False for float32.
    """

    height: int
    width: int
    entering: int
    leaving: int
    kernel: tuple[int, int]
    stride: tuple[int, int]
    dilation: tuple[int, int]
    padding: tuple[int, int, int, int]
    rows: int
    columns: int
    views: int
    wide: bool

    def __post_init__(self) -> None:
        top, bottom, left, right = self.padding
        sizes = (self.height + top + bottom, self.width + left + right)
        for size, count, kernel, stride, dilation in zip(
            sizes, (self.rows, self.columns), self.kernel, self.stride, self.dilation, strict=True
        ):
            # Compiled code has no bounds checks of its own.
            if count < 1 or (count - 1) * stride + (kernel - 1) * dilation + 1 > size:
                raise ValueError(f"rows and columns must be those of the layer's output, got {self}")

    @property
    def size(self) -> int:
        """Numbers of a row, [height, width, entering, leaving]."""
        return self.kernel[0] * self.kernel[1] * self.entering * self.leaving

    @property
    def images(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """Sizes of an input and of a derivative."""
        return (self.entering, self.height, self.width), (self.leaving, self.rows, self.columns)

    @property
    def line(self) -> int:
        """Numbers of a line of a padded input."""
        _, _, left, right = self.padding
        return (self.width + left + right) * self.entering

    @property
    def lanes(self) -> int:
        """Numbers of a vector."""
        return _host().vector // (8 if self.wide else 4)

    @property
    def vectors(self) -> int:
        """Vectors of output channels that each number of a patch multiplies."""
        return -(-self.leaving // self.lanes)

    @cached_property
    def tiles(self) -> list[PatchTile]:
        """Tiles of the patch."""
        patch = Patch(self.kernel, self.dilation, self.entering, self.line)
        return tiles_of(patch, _host().sums // vectors_beside(self.vectors))

    @property
    def products(self) -> int:
        """Multiplications at each position, including idle lanes."""
        return self.lanes * self.vectors * self.kernel[0] * self.kernel[1] * self.entering

    @property
    def padded(self) -> int:
        """Numbers of a padded input; 0 without padding."""
        top, bottom, _, _ = self.padding
        return (self.height + top + bottom) * self.line if any(self.padding) else 0

    @property
    def exact(self) -> bool:
        """True if a row is written once; False if it is the sum of several views or blocks of positions."""
        return self.views == 1 and self._block == (self.rows, self.columns)

    @property
    def _block(self) -> tuple[int, int]:
        """Rows and columns of the output whose products are added sequentially."""
        columns = even(self.columns, _MOST_IN_A_ROW)
        return (even(self.rows, _MOST_IN_A_ROW // columns) if columns == self.columns else 1), columns

    usable = staticmethod(readable_images)

    @computed_once
    def code(self) -> Callable[..., None]:
        """Writes rows and their squared norms.

        Arguments: inputs [n, height, width, entering], derivatives [n, rows, columns, leaving], zeros [padded] that are
        overwritten, first and last example, out [n, size], numbers from a row of `out` to the next (0 if rows are not
        kept), squares [n] in float64.
        """
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        types = (pointer, pointer, pointer, size, size, pointer, size, pointer)
        return compiled(_RowWriter(self).module, "rows", *types)

    def __call__(self, inputs: Images, signals: Images, out: Float[Tensor, "rows size"] | None = None) -> list[Tensor]:
        """Returns squared norms of the rows, in float64, and the rows if `out` is given, where they are written."""
        self.refuse_unlike(inputs, signals)
        squares = signals.new_empty(len(signals) // self.views, dtype=torch.float64)
        place = (len(squares), self.size)
        if out is not None and (out.shape != place or out.stride(1) != 1 or out.dtype != signals.dtype):
            raise ValueError(
                f"out must have rows in one piece, {place} of dtype {signals.dtype}, got {tuple(out.shape)} with "
                f"strides {out.stride()}, {out.dtype}"
            )

        def run(*batch: int) -> None:
            rows, step = (signals.new_empty(1, self.size), 0) if out is None else (out, out.stride(0))
            self.code(*batch, rows.data_ptr(), step, squares.data_ptr())

        flops = 2.0 * self.size * self.views * self.rows * self.columns
        over_images(run, (inputs, signals), len(squares), scratch=(self.padded, signals.dtype), flops=flops)
        return [squares] if out is None else [squares, out]

    def reference(self, inputs: Images, signals: Images, out: Tensor | None = None) -> list[ReferenceResult]:
        """PyTorch's own gradient of the weight, example by example."""
        rows = self.reference_rows(inputs, signals)
        squares = rows.square().sum(dim=1)
        results = [ReferenceResult(squares, 2 * _TOLERANCE * squares)]
        if out is not None:
            results.append(ReferenceResult(rows, _TOLERANCE * squares.sqrt().unsqueeze(1)))
        return results

    def reference_rows(self, inputs: Images, signals: Images) -> Float[Tensor, "rows size"]:
        """Returns the rows in float64, computed by PyTorch."""
        top, bottom, left, right = self.padding
        shape = (self.leaving, self.entering, *self.kernel)
        settings: Any = (self.stride, 0, self.dilation)  # typed as a number for both dimensions, but pairs are accepted
        rows = []
        for x, s in zip(inputs.double().split(self.views), signals.double().split(self.views), strict=True):
            row = conv2d_weight(F.pad(x, (left, right, top, bottom)), shape, s, *settings)
            rows.append(row.permute(2, 3, 1, 0).flatten())
        return torch.stack(rows)

    def examples(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yields inputs, signals and memory for rows of three examples, of which the middle one is NaN."""
        generator, dtype = torch.Generator().manual_seed(0), torch.float64 if self.wide else torch.float32
        inputs, signals = (torch.randn(3 * self.views, *size, generator=generator, dtype=dtype) for size in self.images)
        for values in (inputs, signals):
            values[self.views : 2 * self.views] = torch.nan
        yield inputs, signals, signals.new_empty(3, self.size)

    def refuse_unlike(self, inputs: Images, signals: Images) -> None:
        """Refuses tensors that the code would read past the end of."""
        dtype = torch.float64 if self.wide else torch.float32
        if (
            (inputs.shape[1:], signals.shape[1:]) != self.images
            or len(inputs) != len(signals)
            or len(signals) % self.views
        ):
            raise ValueError(
                f"inputs and signals must be images of sizes {self.images}, {self.views} for each example, "
                f"got {tuple(inputs.shape)}, {tuple(signals.shape)}"
            )
        if not inputs.dtype == signals.dtype == dtype or not self.usable(inputs, signals):
            raise ValueError(f"inputs and signals must be {dtype} on the CPU, got {inputs.dtype}, {signals.dtype}")


def _host() -> Processor:
    host = processor()
    assert host is not None  # noqa: S101  the caller has asked
    return host


class _RowWriter(VectorWriter):
    """Writes a kernel in LLVM's representation."""

    def __init__(self, sizes: RowKernel) -> None:
        super().__init__("rows", _host(), wide=sizes.wide)
        self._sizes = s = sizes
        pointer, double = self._number.as_pointer(), ir.DoubleType().as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer, pointer, pointer, INT, INT, pointer, INT, double])
        function = ir.Function(self.module, kind, "rows")
        for argument in function.args:
            if isinstance(argument.type, ir.PointerType):
                argument.add_attribute("noalias")
        inputs, signals, zeros, first, last, out, step, squares = function.args
        build: Any = ir.IRBuilder(function.append_basic_block())
        self._build = build
        with counted(build, first, last) as example:
            n = example.number
            row = build.gep(out, [build.mul(n, step)])
            if not s.exact:
                self._clear(row)
            with counted(build, INT(0), INT(s.views)) as view:
                image = build.add(build.mul(n, INT(s.views)), view.number)
                self._image(inputs, signals, row, zeros, image)
            build.store(self._square(row), build.gep(squares, [n]))
        build.ret_void()

    def _image(
        self,
        inputs: LlvmValue,
        signals: LlvmValue,
        row: LlvmValue,
        zeros: LlvmValue,
        n: LlvmValue,
    ) -> None:
        """Writes an image's gradient to a row, or adds it to those of other views."""
        s, build = self._sizes, self._build
        source = build.gep(inputs, [build.mul(n, INT(s.height * s.width * s.entering))])
        pixels = self._padded(source, zeros) if s.padded else source
        derivatives = build.gep(signals, [build.mul(n, INT(s.rows * s.columns * s.leaving))])
        high, wide = s._block
        spans = [(INT(-(-s.rows // high)), high, s.rows), (INT(-(-s.columns // wide)), wide, s.columns)]
        with counted(build, INT(0), spans[0][0]) as down, counted(build, INT(0), spans[1][0]) as across:
            edges = []
            for loop, (_, size, total) in zip((down, across), spans, strict=True):
                start = build.mul(loop.number, INT(size))
                end = build.add(start, INT(size))
                edges.append((start, build.select(build.icmp_signed("<", end, INT(total)), end, INT(total))))
            self._block(pixels, derivatives, row, edges)

    def _block(
        self,
        pixels: LlvmValue,
        derivatives: LlvmValue,
        row: LlvmValue,
        edges: Sequence[tuple[LlvmValue, LlvmValue]],
    ) -> None:
        """Writes all tiles over a block of positions; tiles of the same shape share their code."""
        build, alike = self._build, dict[tuple[int, ...], list[PatchTile]]()
        for tile in self._sizes.tiles:
            alike.setdefault(tile.offsets, []).append(tile)
        for offsets, tiles in alike.items():
            pairs = [value for tile in tiles for value in (tile.first * self._sizes.leaving, tile.place)]
            table = self._table(pairs)
            with counted(build, INT(0), INT(len(tiles))) as tile:
                at = build.mul(tile.number, INT(2))
                first, place = (build.load(build.gep(table, [INT(0), build.add(at, INT(i))])) for i in (0, 1))
                into, pixel = build.gep(row, [first]), build.gep(pixels, [place])
                self._columns(pixel, derivatives, into, offsets, edges)

    def _columns(
        self,
        pixels: LlvmValue,
        derivatives: LlvmValue,
        into: LlvmValue,
        offsets: Sequence[int],
        edges: Sequence[tuple[LlvmValue, LlvmValue]],
    ) -> None:
        """Writes tiles of all channels, in a loop: unrolled, 2048 of them would take LLVM seconds."""
        build, s = self._build, self._sizes
        width = vectors_beside(s.vectors) * s.lanes
        full, remainder = divmod(s.leaving, width)
        for start, stop, size in ((0, full, width), (full, full + 1, remainder)):
            if start < stop and size:
                with counted(build, INT(start), INT(stop)) as block:
                    channel = build.mul(block.number, INT(width))
                    to, of = (build.gep(each, [channel]) for each in (into, derivatives))
                    self._tile(pixels, of, to, offsets, range(0, size, s.lanes), edges)

    def _tile(
        self,
        pixels: LlvmValue,
        derivatives: LlvmValue,
        into: LlvmValue,
        offsets: Sequence[int],
        starts: range,
        edges: Sequence[tuple[LlvmValue, LlvmValue]],
    ) -> None:
        """Sums over positions; each pair of a patch's number and a vector of channels has a register of its own."""
        s, build = self._sizes, self._build
        zero = ir.Constant(self._vector, [0.0] * self._lanes)
        with counted(build, *edges[0], [zero] * (len(offsets) * len(starts))) as y:
            line = build.gep(pixels, [build.mul(y.number, INT(s.stride[0] * s.line))])
            signals = build.gep(derivatives, [build.mul(y.number, INT(s.columns * s.leaving))])
            with counted(build, *edges[1], y.sums) as x:
                pixel = build.gep(line, [build.mul(x.number, INT(s.stride[1] * s.entering))])
                channels = build.gep(signals, [build.mul(x.number, INT(s.leaving))])
                factors = [self._at(channels, start, starts.stop - start) for start in starts]
                values = (self._spread(build.load(build.gep(pixel, [INT(offset)]))) for offset in offsets)
                products = [(value, each) for value in values for each in factors]
                x.sums = [build.call(self._fma, [*pair, sum]) for pair, sum in zip(products, x.sums, strict=True)]
            y.sums = x.sums
        for number in range(len(offsets)):
            to = build.gep(into, [INT(number * s.leaving)])
            for start, value in zip(starts, y.sums[number * len(starts) :], strict=False):
                channels, active = build.gep(to, [INT(start)]), starts.stop - start
                total = value if s.exact else build.fadd(value, self._at(channels, 0, active))
                self._put(total, channels, active)

    def _padded(self, source: LlvmValue, zeros: LlvmValue) -> LlvmValue:
        """Copies the image into zero padding."""
        s, build = self._sizes, self._build
        top, _, left, _ = s.padding
        line = s.width * s.entering
        with counted(build, INT(0), INT(s.height)) as y:
            start = build.add(build.mul(y.number, INT(s.line)), INT(top * s.line + left * s.entering))
            self._copy(build.gep(zeros, [start]), build.gep(source, [build.mul(y.number, INT(line))]), line)
        return zeros

    def _copy(self, to: LlvmValue, source: LlvmValue, numbers: int) -> None:
        byte = _BYTE.as_pointer()
        copy = self.module.declare_intrinsic("llvm.memcpy", [byte, byte, INT])
        pointers = [self._build.bitcast(value, byte) for value in (to, source)]
        self._build.call(copy, [*pointers, INT(numbers * self._bytes), ir.IntType(1)(0)])

    def _clear(self, row: LlvmValue) -> None:
        clear = self.module.declare_intrinsic("llvm.memset", [_BYTE.as_pointer(), INT])
        size = INT(self._sizes.size * self._bytes)
        self._build.call(clear, [self._build.bitcast(row, _BYTE.as_pointer()), _BYTE(0), size, ir.IntType(1)(0)])

    def _square(self, row: LlvmValue) -> LlvmValue:
        """Squared norm of a row in float64, in which no square of a float32 is lost."""
        build, size, lanes = self._build, self._sizes.size, self._lanes
        wide = ir.VectorType(ir.DoubleType(), lanes)

        def grown(total: LlvmValue, start: LlvmValue, offset: int, active: int | None) -> LlvmValue:
            value = widened(build, self._at(build.gep(row, [start]), offset, active), wide)
            return build.call(fused(self.module, wide), [value, value, total])

        sums = [ir.Constant(wide, [0.0] * lanes)] * 4  # four, so that none waits for the previous
        whole = size // (4 * lanes)
        if whole:
            with counted(build, INT(0), INT(whole), sums) as loop:
                start = build.mul(loop.number, INT(4 * lanes))
                loop.sums = [grown(total, start, i * lanes, None) for i, total in enumerate(loop.sums)]
            sums = loop.sums
        for offset in range(whole * 4 * lanes, size, lanes):
            sums[0] = grown(sums[0], INT(0), offset, size - offset)
        a, b, c, d = sums
        return added_up(build, build.fadd(build.fadd(a, b), build.fadd(c, d)))
