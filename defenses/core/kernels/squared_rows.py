"""Sums of squares of a row in float64, whole, under a mask or with weights."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from .machine_code import INT, LlvmValue, added_up, counted, fused, read, widened

_LANES, _BESIDE = 8, 4  # numbers of a vector of float64; independent sums, so that none waits for the previous
_BYTE = ir.IntType(8)


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

    def numbers(pointer: LlvmValue, place: LlvmValue, vectors: bool) -> LlvmValue:
        value = read(build, build.gep(pointer, [place]), vector if vectors else number)
        return widened(build, value, sums if vectors else double)

    def factors(place: LlvmValue, vectors: bool) -> tuple[LlvmValue, LlvmValue]:
        value = numbers(row, place, vectors)
        if weighted:
            return value, build.fmul(value, numbers(beside[0], place, vectors))
        if masked:
            marks = read(build, build.gep(beside[0], [place]), bytes_ if vectors else _BYTE)
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
        build.store(added_up(build, total), accumulator)
    with build.if_then(build.icmp_signed("<", done, size)):
        with counted(build, done, size, [build.load(accumulator)]) as short:
            pair = factors(short.number, vectors=False)
            short.sums = [build.call(fused(module, double), [*pair, short.sums[0]])]
        build.store(short.sums[0], accumulator)
    build.ret(build.load(accumulator))
    return function
