"""Squared norms of rows, or of what a mask leaves of them, in one pass: no masked copy is made of whole rows.

Guarantee:
    Sums are in float64, in an order that depends on the length of a row alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

from llvmlite import ir

from .machine_code import INT, LlvmValue, compiled, counted

_LANES, _BESIDE = 8, 4  # numbers of a vector of float64; sums, so that none waits for the last


@cache
def row_squares(*, wide: bool, masked: bool = False) -> Callable[..., None]:
    """A function that measures rows.

    Arguments: rows, numbers from one row to the next, where `masked` the mask [size] of zeros and ones, squares [rows]
    in float64, number of rows, at least one, and size.

    Args:
        wide: whether rows and mask are float64, not float32.
        masked: whether there is a mask.
    """
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    return compiled(_module(wide, masked), "row_squares", pointer, size, *[pointer] * (1 + masked), size, size)


def _module(wide: bool, masked: bool) -> ir.Module:
    module, double = ir.Module("row_squares"), ir.DoubleType()
    number = double if wide else ir.FloatType()
    vector, sums = ir.VectorType(number, _LANES), ir.VectorType(double, _LANES)
    fma = ir.Function(module, ir.FunctionType(sums, [sums] * 3), f"llvm.fma.v{_LANES}f64")
    single = ir.Function(module, ir.FunctionType(double, [double] * 3), "llvm.fma.f64")
    kind = [number.as_pointer(), INT, *[number.as_pointer()] * masked, double.as_pointer(), INT, INT]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), kind), "row_squares")
    rows, step, *mask, squares, count, size = function.args
    build: Any = ir.IRBuilder(function.append_basic_block())
    width = INT(_BESIDE * _LANES)
    whole = build.sdiv(size, width)
    done = build.mul(whole, width)

    def product(row: LlvmValue, place: LlvmValue, of: ir.Type) -> LlvmValue:
        pointers = (build.bitcast(build.gep(each, [place]), of.as_pointer()) for each in (row, *mask))
        values = [build.load(pointer) for pointer in pointers]
        for value in values:
            value.align = 8 if wide else 4
        found = build.fmul(*values) if masked else values[0]
        return found if wide else build.fpext(found, sums if of is vector else double)

    with counted(build, INT(0), count) as one:
        row, to = build.gep(rows, [build.mul(one.number, step)]), build.gep(squares, [one.number])
        build.store(double(0.0), to)
        with build.if_then(build.icmp_signed(">", whole, INT(0))):
            with counted(build, INT(0), whole, [ir.Constant(sums, [0.0] * _LANES)] * _BESIDE) as long:
                start = build.mul(long.number, width)
                values = [product(row, build.add(start, INT(i * _LANES)), vector) for i in range(_BESIDE)]
                long.sums = [build.call(fma, [v, v, total]) for v, total in zip(values, long.sums, strict=True)]
            total = build.fadd(build.fadd(*long.sums[:2]), build.fadd(*long.sums[2:]))
            parts = [build.extract_element(total, ir.IntType(32)(i)) for i in range(_LANES)]
            while len(parts) > 1:
                parts = [build.fadd(a, b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
            build.store(parts[0], to)
        with build.if_then(build.icmp_signed("<", done, size)):
            with counted(build, done, size, [build.load(to)]) as short:
                value = product(row, short.number, number)
                short.sums = [build.call(single, [value, value, short.sums[0]])]
            build.store(short.sums[0], to)
    build.ret_void()
    return module
