"""Weighted sums of rows of several matrices, and of outer products, each written in place, in a single call.

Guarantee:
    Sums are in float64, and rounded to the rows' dtype once: in float32, removing a row would change the rounding of
    all later additions, by more than a bound in total for chosen rows.
"""

from __future__ import annotations

import ctypes
import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from jaxtyping import Float
from llvmlite import ir
from torch import Tensor

from .kernel import Kernel, ReferenceResult, computed_once, readable, synthetic_rows
from .machine_code import INT, LlvmValue, compiled, counted, fused, read, spread, widened, write
from .outer_tiles import outer_sum

MATRIX = 10
"""Number of columns of the table of matrices."""
_LANES, _BESIDE = 8, 8  # numbers of a vector of float64; rows that are read at a time
_COLUMNS = 8192  # that are added up at a time: their sums stay in the second cache
# Size of a sum, from which on PyTorch's sums on several threads are faster.
_WORTH_A_THREAD = 2**22
# Number of products, up to which outer products are added up in float64 by the kernel: MKL's float32 sums are twice as
# fast, but scaling the rows and calling MKL takes 50 us within a step, when its code has left the cache.
_MOST_PRODUCTS = 2**20
# The same if the second factor is narrow and does not fill the vectors of the kernel.
_MOST_NARROW, _NARROW = 2**18, 16
# Size of a convolution's weight, up to which its order is restored in the cache.
_MOST_IN_ORDER = 2**16

WeightOrder = tuple[int, int, int]
"""(height * width, entering, leaving) of a convolution whose rows have their own order; zeros for other rows."""
PLAIN: WeightOrder = (0, 0, 0)
Matrix = tuple[Tensor, Tensor | WeightOrder]
"""Rows with their order, or the second and the first factor of outer products, in rows."""


@dataclass(frozen=True)
class SumKernel(Kernel):
    """Code for numbers of float64 (wide) or float32.

    A call fills a `SumTable` from a list of matrices; layers fill one themselves, without the list.
    """

    wide: bool
    usable = staticmethod(readable)

    @computed_once
    def code(self) -> Callable[..., None]:
        """Computes weighted sums of rows.

        Its arguments are

        - a table of matrices, (address, numbers from a row to the next, size, address of the sum, and six zeros) each.
          For a convolution, the first three zeros are replaced by (height * width, entering, leaving): its rows have
          the order [height, width, entering, leaving], its sum the weight's order [leaving, entering, height, width].
          For outer products, the last three zeros are replaced by a second matrix, (address, numbers from a row to the
          next, size), and the sum is [size of the second, size of the first], over outer products of its rows with
          those of the first;
        - number of matrices;
        - a factor for each row, in the rows' dtype;
        - number of rows of each matrix;
        - memory for as many numbers as the longest row of a convolution has;
        - memory for a float64 per row, and per number of the second matrix of outer products.

        Nothing may be empty.
        """
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        return compiled(_module(self.wide), "weighted_rows", pointer, size, pointer, size, pointer, pointer)

    def __call__(self, factors: Tensor, *matrices: Matrix) -> list[Tensor]:
        """Returns the sum of each matrix."""
        sizes = [rows.shape[1] * (second.shape[1] if isinstance(second, Tensor) else 1) for rows, second in matrices]
        flat = factors.new_empty(sum(sizes))
        table = SumTable(factors, flat)
        for (rows, second), start in zip(matrices, accumulate([0, *sizes]), strict=False):
            if not (table.outer(second, rows, start) if isinstance(second, Tensor) else table.add(rows, start, second)):
                raise ValueError(f"matrices must be those of a `SumTable`, got {tuple(rows.shape)} of {rows.dtype}")
        table.run()
        return [*flat.split(sizes)]

    def reference(self, factors: Tensor, *matrices: Matrix) -> list[ReferenceResult]:
        """Sums in float64, which are rounded to the rows' dtype once."""
        results = []
        for rows, second in matrices:
            terms = factors.double().unsqueeze(1) * rows.double()
            if isinstance(second, Tensor):
                terms = (second.double().unsqueeze(2) * terms.unsqueeze(1)).flatten(1)
            elif second[0]:
                terms = terms.unflatten(1, second).permute(0, 3, 2, 1).flatten(1)
            total = terms.sum(dim=0)
            rounding = 0.0 if self.wide else 2.0**-24
            results.append(ReferenceResult(total, rounding * total.abs() + 1e-14 * terms.abs().sum(dim=0)))
        return results

    def examples(self) -> Iterator[tuple[Any, ...]]:
        """Yields counts and sizes beside those of vectors, rows with NaN between them, and sums that cancel."""
        rows = synthetic_rows(wide=self.wide)
        for count in (1, 2, 7, 8, 9, 16, 64, 257):
            matrices: list[Matrix] = [(rows(count, size), PLAIN) for size in (1, 3, 15, 16, 17, 40, 100, 1030)]
            shapes = [(1, 1, 1), (8, 3, 5), (64, 1, 16), (1, 9, 7), (9, 33, 2)]
            matrices += [(rows(count, math.prod(order)), order) for order in shapes]
            matrices += [(rows(count, b), rows(count, a)) for a in (1, 2, 7, 8, 11, 33) for b in (1, 7, 16, 41)]
            yield (rows(1, count)[0], *matrices)


@cache
def weighted_rows(*, wide: bool) -> SumKernel:
    """Returns the kernel for float64 (wide) or float32."""
    return SumKernel(wide)


class SumTable:
    """Table of matrices whose rows are added up, each sum into its place."""

    def __init__(self, factors: Float[Tensor, " rows"], flat: Float[Tensor, " dim"]) -> None:
        """Starts empty.

        Args:
            factors: factors of the rows.
            flat: vector to which the sums are written.
        """
        self._factors, self._to, self._bytes = factors, flat.data_ptr(), flat.element_size()
        plain = all(SumKernel.usable(each) and each.is_contiguous() for each in (factors, flat))
        self._dtype = factors.dtype if plain and factors.dtype == flat.dtype and factors.numel() else None
        self._lines: list[int] = []
        self._longest, self._widest = 0, 0

    def add(self, values: Float[Tensor, "rows size"], start: int, order: WeightOrder = PLAIN) -> bool:
        """Adds a matrix; returns False if compiled code cannot add it up, or PyTorch is faster.

        Args:
            values: rows of the examples.
            start: beginning of their part in the vector of sums.
            order: (height * width, entering, leaving) of a convolution whose rows have their own order.
        """
        size = values.shape[1]
        if values.dtype != self._dtype or not (size and SumKernel.usable(values)):
            return False
        if (values.numel() >= _WORTH_A_THREAD and torch.get_num_threads() > 1) or (order[0] and size > _MOST_IN_ORDER):
            return False
        self._lines += (values.data_ptr(), values.stride(0), size, self._to + start * self._bytes, *order, 0, 0, 0)
        if order[0]:
            self._longest = max(self._longest, size)
        return True

    def outer(self, leading: Float[Tensor, "rows a"], values: Float[Tensor, "rows b"], start: int) -> bool:
        """Adds outer products [a, b] of the rows of two matrices; returns False if PyTorch has to add them up.

        Args:
            leading: rows of the examples.
            values: likewise.
            start: beginning of their part in the vector of sums.
        """
        products, both = leading.numel() * values.shape[1], (leading, values)
        most = _MOST_NARROW if values.shape[1] < _NARROW else _MOST_PRODUCTS
        if not 0 < products <= most or not all(v.dtype == self._dtype and SumKernel.usable(v) for v in both):
            return False
        self._lines += (values.data_ptr(), values.stride(0), values.shape[1], self._to + start * self._bytes, 0, 0, 0)
        self._lines += (leading.data_ptr(), leading.stride(0), leading.shape[1])
        self._widest = max(self._widest, leading.numel())
        return True

    def run(self) -> None:
        """Writes the sums."""
        if self._lines:
            lines = array("q", self._lines)
            memory = self._factors.new_empty(self._longest) if self._longest else None
            weights = array("d", (0.0,)) * (len(self._factors) + self._widest)
            weighted_rows(wide=self._dtype == torch.float64).code(
                lines.buffer_info()[0],
                len(lines) // MATRIX,
                self._factors.data_ptr(),
                len(self._factors),
                0 if memory is None else memory.data_ptr(),
                weights.buffer_info()[0],
            )


def _module(wide: bool) -> ir.Module:
    module, double = ir.Module("weighted_rows"), ir.DoubleType()
    number = double if wide else ir.FloatType()
    add = {count: _addition(module, number, count) for count in (1, _BESIDE)}
    outer = outer_sum(module, number)
    numbers, table = number.as_pointer(), INT.as_pointer()
    kind = [table, INT, numbers, INT, numbers, double.as_pointer()]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), kind), "weighted_rows")
    matrices, count, factors, rows, memory, weights = function.args
    build: Any = ir.IRBuilder(function.append_basic_block())
    sums = build.alloca(double, size=INT(_COLUMNS))
    whole = build.sdiv(rows, INT(_BESIDE))
    done = build.mul(whole, INT(_BESIDE))

    def exact(place: LlvmValue) -> LlvmValue:
        return widened(build, build.load(place), double)

    with counted(build, INT(0), rows) as row:
        build.store(exact(build.gep(factors, [row.number])), build.gep(weights, [row.number]))
    with counted(build, INT(0), count) as matrix:
        line = build.mul(matrix.number, INT(MATRIX))
        address, step, size, to, *order, others, stride, leading = (
            build.load(build.gep(matrices, [build.add(line, INT(column))])) for column in range(MATRIX)
        )
        first, place = build.inttoptr(address, numbers), build.inttoptr(to, numbers)
        with build.if_then(build.icmp_signed("!=", others, INT(0))):
            part_rows, products = build.inttoptr(others, numbers), build.gep(weights, [rows])
            with counted(build, INT(0), rows) as row, counted(build, INT(0), leading) as column:
                value = exact(build.gep(part_rows, [build.add(build.mul(row.number, stride), column.number)]))
                value = build.fmul(value, build.load(build.gep(weights, [row.number])))  # exact for two float32
                build.store(value, build.gep(products, [build.add(build.mul(row.number, leading), column.number)]))
            build.call(outer, [first, step, size, products, leading, rows, place])
        plain = build.icmp_signed("==", order[0], INT(0))
        into = build.select(plain, place, memory)
        blocks = build.sdiv(build.add(size, INT(_COLUMNS - 1)), INT(_COLUMNS))
        with build.if_then(build.icmp_signed("==", others, INT(0))), counted(build, INT(0), blocks) as block:
            begin = build.mul(block.number, INT(_COLUMNS))
            remaining = build.sub(size, begin)
            width = build.select(build.icmp_signed("<", remaining, INT(_COLUMNS)), remaining, INT(_COLUMNS))
            with counted(build, INT(0), width) as each:
                build.store(double(0.0), build.gep(sums, [each.number]))
            for start, stop, beside in ((INT(0), whole, _BESIDE), (done, rows, 1)):
                with build.if_then(build.icmp_signed("<", start, stop)), counted(build, start, stop) as group:
                    first_row = build.mul(group.number, INT(beside))
                    row = build.gep(first, [build.add(build.mul(first_row, step), begin)])
                    build.call(add[beside], [row, step, build.gep(weights, [first_row]), sums, width])
            with counted(build, INT(0), width) as each:
                value = build.load(build.gep(sums, [each.number]))
                value = value if wide else build.fptrunc(value, number)
                build.store(value, build.gep(into, [build.add(begin, each.number)]))
        with build.if_then(build.not_(plain)):
            _write_in_weight_order(build, memory, place, order)
    build.ret_void()
    return module


def _write_in_weight_order(build: Any, memory: LlvmValue, place: LlvmValue, order: Sequence[LlvmValue]) -> None:
    """Writes a convolution's sum from the order of its rows, [positions, entering, leaving], to that of its weight."""
    positions, entering, leaving = order
    with (
        counted(build, INT(0), leaving) as out,
        counted(build, INT(0), entering) as inner,
        counted(build, INT(0), positions) as position,
    ):
        row = build.add(build.mul(position.number, entering), inner.number)
        value = build.load(build.gep(memory, [build.add(build.mul(row, leaving), out.number)]))
        weight = build.add(build.mul(out.number, entering), inner.number)
        build.store(value, build.gep(place, [build.add(build.mul(weight, positions), position.number)]))


def _addition(module: ir.Module, number: ir.Type, count: int) -> ir.Function:
    """Adds a function to a module that adds some rows to a sum in float64: rows, step, weights, sum, size."""
    double, numbers = ir.DoubleType(), number.as_pointer()
    kind = [numbers, INT, double.as_pointer(), double.as_pointer(), INT]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), kind), f"added_{count}")
    function.linkage = "internal"
    rows, step, weights, sums, size = function.args
    build: Any = ir.IRBuilder(function.append_basic_block())

    starts = [build.gep(rows, [build.mul(step, INT(i))]) for i in range(count)]
    singles = [build.load(build.gep(weights, [INT(i)])) for i in range(count)]
    vector = ir.VectorType(double, _LANES)
    spread_weights = [spread(build, each, vector) for each in singles]
    whole = build.sdiv(size, INT(_LANES))
    done = build.mul(whole, INT(_LANES))

    def added(place: LlvmValue, given: ir.Type, of: ir.Type, weights: Sequence[LlvmValue]) -> None:
        to = build.gep(sums, [place])
        total = read(build, to, of)
        for start, weight in zip(starts, weights, strict=True):
            value = widened(build, read(build, build.gep(start, [place]), given), of)
            total = build.call(fused(module, of), [value, weight, total])
        write(build, total, to)

    with build.if_then(build.icmp_signed("<", INT(0), whole)), counted(build, INT(0), whole) as long:
        added(build.mul(long.number, INT(_LANES)), ir.VectorType(number, _LANES), vector, spread_weights)
    with build.if_then(build.icmp_signed("<", done, size)), counted(build, done, size) as remaining:
        added(remaining.number, number, double, singles)
    build.ret_void()
    return function
