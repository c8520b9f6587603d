"""Squared norms of rows, or of masked rows, in a single pass without a masked copy.

Guarantee:
    Sums are in float64, in an order that depends on the length of a row alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

from llvmlite import ir

from .machine_code import INT, LlvmValue, compiled, counted, fused

_LANES, _BESIDE = 8, 4  # numbers of a vector of float64; independent sums, so that none waits for the previous
_BYTE = ir.IntType(8)


@cache
def row_squares(*, wide: bool, masked: bool = False) -> Callable[..., None]:
    """Compiles a function that computes squared norms of rows.

    Arguments: rows, numbers from a row to the next, if `masked` the mask [size] of bytes that are 0 or 1, squares
    [rows] in float64, number of rows, at least one, and size.

    Args:
        wide: True for rows of float64, False for float32.
        masked: True for a mask.
    """
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    return compiled(_module(wide, masked), "row_squares", pointer, size, *[pointer] * (1 + masked), size, size)


def _module(wide: bool, masked: bool) -> ir.Module:
    module, double = ir.Module("row_squares"), ir.DoubleType()
    one_row = squared_row(module, wide=wide, masked=masked)
    place, *marks = one_row.function_type.args[:-1]
    kind = [place, INT, *marks, double.as_pointer(), INT, INT]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), kind), "row_squares")
    rows, step, *mask, squares, count, size = function.args
    build: Any = ir.IRBuilder(function.append_basic_block())
    with counted(build, INT(0), count) as index:
        row = build.gep(rows, [build.mul(index.number, step)])
        build.store(build.call(one_row, [row, *mask, size]), build.gep(squares, [index.number]))
    build.ret_void()
    return module


def squared_row(module: ir.Module, *, wide: bool, masked: bool = False, weighted: bool = False) -> ir.Function:
    """Adds a function (row, mask or weights if any, size) to a module, which returns the sum of (weighted) squares.

    Args:
        module: to which the function is added.
        wide: True for a row and weights of float64, False for float32.
        masked: True for a mask.
        weighted: True for weights in place of a mask.
    """
    double = ir.DoubleType()
    number = double if wide else ir.FloatType()
    vector, sums, bytes_ = (ir.VectorType(each, _LANES) for each in (number, double, _BYTE))
    kind = [number.as_pointer(), *[_BYTE.as_pointer()] * masked, *[number.as_pointer()] * weighted, INT]
    name = f"squared_{'masked' if masked else 'weighted' if weighted else 'whole'}_row"
    function = ir.Function(module, ir.FunctionType(double, kind), name)
    function.linkage = "internal"
    row, *beside, size = function.args
    build: Any = ir.IRBuilder(function.append_basic_block())
    width = INT(_BESIDE * _LANES)
    whole = build.sdiv(size, width)
    done, accumulator = build.mul(whole, width), build.alloca(double)
    build.store(double(0.0), accumulator)

    def read(pointer: LlvmValue, place: LlvmValue, of: ir.Type, align: int) -> LlvmValue:
        value = build.load(build.bitcast(build.gep(pointer, [place]), of.as_pointer()))
        value.align = align
        return value

    def numbers(pointer: LlvmValue, place: LlvmValue, vectors: bool) -> LlvmValue:
        value = read(pointer, place, vector if vectors else number, 8 if wide else 4)
        return value if wide else build.fpext(value, sums if vectors else double)

    def factors(place: LlvmValue, vectors: bool) -> tuple[LlvmValue, LlvmValue]:
        value = numbers(row, place, vectors)
        if weighted:
            return value, build.fmul(value, numbers(beside[0], place, vectors))
        if masked:
            marks = read(beside[0], place, bytes_ if vectors else _BYTE, 1)
            # A product with 0 or 1, not a selection: non-finite values must show wherever they are.
            value = build.fmul(value, build.uitofp(marks, value.type))
        return value, value

    with build.if_then(build.icmp_signed(">", whole, INT(0))):
        with counted(build, INT(0), whole, [ir.Constant(sums, [0.0] * _LANES)] * _BESIDE) as long:
            start = build.mul(long.number, width)
            pairs = [factors(build.add(start, INT(i * _LANES)), vectors=True) for i in range(_BESIDE)]
            long.sums = [
                build.call(fused(module, sums), [*pair, total]) for pair, total in zip(pairs, long.sums, strict=True)
            ]
        total = build.fadd(build.fadd(*long.sums[:2]), build.fadd(*long.sums[2:]))
        parts = [build.extract_element(total, ir.IntType(32)(i)) for i in range(_LANES)]
        while len(parts) > 1:
            parts = [build.fadd(a, b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
        build.store(parts[0], accumulator)
    with build.if_then(build.icmp_signed("<", done, size)):
        with counted(build, done, size, [build.load(accumulator)]) as short:
            pair = factors(short.number, vectors=False)
            short.sums = [build.call(fused(module, double), [*pair, short.sums[0]])]
        build.store(short.sums[0], accumulator)
    build.ret(build.load(accumulator))
    return function
