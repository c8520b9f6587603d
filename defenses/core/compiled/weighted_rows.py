"""Weighted sums of rows of several matrices, each written where it belongs, in one call.

Guarantee:
    Eight rows are added up before their sum is added to that of the others, in an order that depends on their number
    alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from llvmlite import ir

from .machine_code import INT, LlvmValue, compiled, counted, fused

MATRIX = 7
"""Numbers of the table's rows."""
_LANES, _BESIDE = 16, 8  # numbers of a vector; rows that are read at a time


@cache
def weighted_rows(*, wide: bool) -> Callable[..., None]:
    """A function that adds up.

    It is called with

    - a table of matrices, (address, numbers from one row to the next, size, address of the sum, and 0, 0, 0) each. In
      place of the zeros may stand (height * width, entering, leaving) of a convolution, whose rows have the weight's
      numbers [height, width, entering, leaving], and the sum those of the weight [leaving, entering, height, width];
    - how many matrices there are;
    - a factor for each row, in the rows' dtype;
    - how many rows each matrix has;
    - memory for as many numbers as the longest row of a convolution has.

    Nothing may be empty.

    Args:
        wide: whether numbers are float64, not float32.
    """
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    return compiled(_module(wide), "weighted_rows", pointer, size, pointer, size, pointer)


def _module(wide: bool) -> ir.Module:
    module = ir.Module("weighted_rows")
    number = ir.DoubleType() if wide else ir.FloatType()
    add = {count: _addition(module, number, count) for count in (1, _BESIDE)}
    numbers, table = number.as_pointer(), INT.as_pointer()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [table, INT, numbers, INT, numbers]), "weighted_rows")
    matrices, count, factors, rows, memory = function.args
    build: Any = ir.IRBuilder(function.append_basic_block())
    with counted(build, INT(0), count) as matrix:
        line = build.mul(matrix.number, INT(MATRIX))
        address, step, size, to, *order = (
            build.load(build.gep(matrices, [build.add(line, INT(column))])) for column in range(MATRIX)
        )
        first, sums = build.inttoptr(address, numbers), build.inttoptr(to, numbers)
        plain = build.icmp_signed("==", order[0], INT(0))
        into = build.select(plain, sums, memory)
        with counted(build, INT(0), size) as each:
            build.store(number(0.0), build.gep(into, [each.number]))
        whole = build.sdiv(rows, INT(_BESIDE))
        done = build.mul(whole, INT(_BESIDE))
        for start, stop, beside in ((INT(0), whole, _BESIDE), (done, rows, 1)):
            with build.if_then(build.icmp_signed("<", start, stop)), counted(build, start, stop) as some:
                one = build.mul(some.number, INT(beside))
                place = build.gep(first, [build.mul(one, step)])
                build.call(add[beside], [place, step, build.gep(factors, [one]), into, size])
        with build.if_then(build.not_(plain)):
            positions, entering, leaving = order
            with (
                counted(build, INT(0), leaving) as out,
                counted(build, INT(0), entering) as inner,
                counted(build, INT(0), positions) as position,
            ):
                row = build.add(build.mul(position.number, entering), inner.number)
                value = build.load(build.gep(memory, [build.add(build.mul(row, leaving), out.number)]))
                weight = build.add(build.mul(out.number, entering), inner.number)
                build.store(value, build.gep(sums, [build.add(build.mul(weight, positions), position.number)]))
    build.ret_void()
    return module


def _addition(module: ir.Module, number: ir.Type, count: int) -> ir.Function:
    """A function that adds some rows to a sum: rows, step, factors, sum, size."""
    numbers, vector = number.as_pointer(), ir.VectorType(number, _LANES)
    kind = [numbers, INT, numbers, numbers, INT]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), kind), f"added_{count}")
    function.linkage = "internal"
    rows, step, factors, sums, size = function.args
    build: Any = ir.IRBuilder(function.append_basic_block())
    starts = [build.gep(rows, [build.mul(step, INT(i))]) for i in range(count)]
    singles = [build.load(build.gep(factors, [INT(i)])) for i in range(count)]
    none, short = ir.Constant(vector, ir.Undefined), ir.IntType(32)
    lanes = ir.Constant(ir.VectorType(short, _LANES), None)
    spread = [build.shuffle_vector(build.insert_element(none, f, short(0)), none, lanes) for f in singles]
    whole = build.sdiv(size, INT(_LANES))
    done = build.mul(whole, INT(_LANES))

    def added(place: LlvmValue, of: ir.Type, weights: Sequence[LlvmValue]) -> None:
        def at(pointer: LlvmValue) -> LlvmValue:
            return build.bitcast(build.gep(pointer, [place]), of.as_pointer())

        def read(pointer: LlvmValue) -> LlvmValue:
            value = build.load(at(pointer))
            value.align = 4
            return value

        found = build.fmul(read(starts[0]), weights[0])
        for start, weight in zip(starts[1:], weights[1:], strict=True):
            found = build.call(fused(module, of), [read(start), weight, found])
        build.store(build.fadd(read(sums), found), at(sums)).align = 4

    with build.if_then(build.icmp_signed("<", INT(0), whole)), counted(build, INT(0), whole) as long:
        added(build.mul(long.number, INT(_LANES)), vector, spread)
    with build.if_then(build.icmp_signed("<", done, size)), counted(build, done, size) as rest:
        added(rest.number, number, singles)
    build.ret_void()
    return function
