"""Weighted sums of rows of several matrices, and of outer products, each written in place, in a single call.

Guarantee:
    Sums are in float64, and rounded to the rows' dtype once: in float32, removing a row would change the rounding of
    all later additions, by more than a bound in total for chosen rows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from llvmlite import ir

from .machine_code import INT, LlvmValue, compiled, counted, fused, read, spread, widened, write
from .outer_tiles import outer_sum

MATRIX = 10
"""Number of columns of the table of matrices."""
_LANES, _BESIDE = 8, 8  # numbers of a vector of float64; rows that are read at a time
_COLUMNS = 8192  # that are added up at a time: their sums stay in the second cache


@cache
def weighted_rows(*, wide: bool) -> Callable[..., None]:
    """Compiles a function that computes weighted sums of rows.

    Its arguments are

    - a table of matrices, (address, numbers from a row to the next, size, address of the sum, and six zeros) each. For
      a convolution, the first three zeros are replaced by (height * width, entering, leaving): its rows have the order
      [height, width, entering, leaving], its sum the weight's order [leaving, entering, height, width]. For outer
      products, the last three zeros are replaced by a second matrix, (address, numbers from a row to the next, size),
      and the sum is [size of the second, size of the first], over outer products of its rows with those of the first;
    - number of matrices;
    - a factor for each row, in the rows' dtype;
    - number of rows of each matrix;
    - memory for as many numbers as the longest row of a convolution has;
    - memory for a float64 per row, and per number of the second matrix of outer products.

    Nothing may be empty.

    Args:
        wide: True for numbers of float64, False for float32.
    """
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    return compiled(_module(wide), "weighted_rows", pointer, size, pointer, size, pointer, pointer)


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
