"""Factors that bound a batch's gradients, from the norms of their parts, in a single call.

PyTorch needs fifteen operations on one number per example, each of which takes longer to launch than to run: on a small
network they take as long as the forward pass.

Guarantee:
    A factor depends on its example alone. Norms are computed in float64, in an order of summation that depends on the
    length of a row alone, and factors by the formulas of `plan/bound.py`.
    An example whose norm is uncertain, or whose factor is not a normal number, is marked, and its results carry no
    guarantee. Under clipping, an example that is within the bound despite the largest error of its norm is certain too:
    its factor is 1.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from llvmlite import ir

from .machine_code import INT, Counted, LlvmValue, added_up, compiled, counted, fused, read, widened

SIDE, PART = 5, 3
"""Number of columns of the table of sides, and of the table of parts."""
_LANES, _BESIDE = 8, 4  # numbers of a vector of float64; independent sums, so that none waits for the previous
_BYTE = ir.IntType(8)
_LEAST_SCALED = 1e-60
"""Least squared norm of a scaled row: of its numbers, only those below 1e-8 of the norm are then subnormal (1e-38)."""
_CERTAIN = 1e6
"""A squared norm is trusted if it is at least this many times the largest amount that underflow may have removed."""
KINDS = ("clip", "normalize", "adaptive_weight")
"""Kinds of bounds, by number."""
SMALL = 1e-20
"""Least squared norm that is trusted; the largest is its inverse."""
_NORMAL = {True: (2.0**-1022, 1.7976931348623157e308), False: (2.0**-126, 3.4028234663852886e38)}
"""Least and largest normal number of float64 (wide) and of float32."""


@cache
def bound_factors(*, wide: bool) -> Callable[..., None]:
    """Compiles a function that computes factors.

    A gradient's parts are rows, or outer products of two rows, whose squared norms are products of theirs. Under a mask
    M the squared norm of s xᵀ is the sum over i of x_i² times w_i, with weights w = Mᵀ (s∘s), computed by a product
    with the mask. Its arguments are

    - a table of sides, (address, numbers from a row to the next, size, address of a mask of bytes, or of weights, or
      0, numbers from a row of weights to the next or 0) each; for size -1 the address is that of measured squared norms
      in float64;
    - number of sides;
    - a table of parts, (side, other side or -1, counted) each. `counted` is -1 for the part itself, -2 if the part must
      only be finite, and otherwise the number of the side with its masked values;
    - number of parts;
    - number of examples;
    - number in `KINDS`, norm and regulariser of the bound;
    - memory for as many float64 as there are sides;
    - factors [examples] in the rows' dtype, an output;
    - squared norms [examples] in float64, an output;
    - certainty of each example, a byte of 0 or 1 [examples], an output;
    - number of uncertain examples, an int64, an output.

    Nothing may be empty.

    Args:
        wide: True for rows of float64, False for float32.
    """
    pointer, size, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
    takes = (pointer, size, pointer, size, size, size, real, real, pointer, pointer, pointer, pointer, pointer)
    return compiled(_module(wide), "bound_factors", *takes)


def _module(wide: bool) -> ir.Module:
    module, double = ir.Module("bound_factors"), ir.DoubleType()
    number = double if wide else ir.FloatType()
    squared_rows = [_squared_row(module, wide=wide, masked=masked) for masked in (False, True)]
    squared_rows.append(_squared_row(module, wide=wide, weighted=True))
    root = module.declare_intrinsic("llvm.sqrt", [double])
    table, reals, numbers, mask = INT.as_pointer(), double.as_pointer(), number.as_pointer(), ir.IntType(8).as_pointer()
    takes = [table, INT, table, INT, INT, INT, double, double, reals, numbers, reals, mask, table]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), takes), "bound_factors")
    sides, side_count, parts, part_count, examples, kind, norm, regulariser, squares, *returned = function.args
    factors, norms, marks_of, doubtful = returned
    build: Any = ir.IRBuilder(function.append_basic_block())
    with counted(build, INT(0), examples, [INT(0)]) as example:
        with counted(build, INT(0), side_count) as side:
            columns = [_entry(build, sides, side.number, SIDE, column) for column in range(SIDE)]
            _store_square(build, squared_rows, columns, example.number, build.gep(squares, [side.number]))
        with counted(build, INT(0), part_count, [double(0.0)] * 3 + [double(1 / SMALL)]) as part:
            _add_part(build, part, sides, parts, squares, wide)
        square = part.sums[0]
        build.store(square, build.gep(norms, [example.number]))
        factor = _factor(build, build.call(root, [square]), kind, norm, regulariser)
        factor = factor if wide else build.fptrunc(factor, number)
        scale = factor if wide else build.fpext(factor, double)
        build.store(factor, build.gep(factors, [example.number]))
        certain = _certain(build, part.sums, scale, kind, norm, wide)
        build.store(build.zext(certain, ir.IntType(8)), build.gep(marks_of, [example.number]))
        example.sums = [build.add(example.sums[0], build.select(certain, INT(0), INT(1)))]
    build.store(example.sums[0], doubtful)
    build.ret_void()
    return module


def _squared_row(module: ir.Module, *, wide: bool, masked: bool = False, weighted: bool = False) -> ir.Function:
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


def _entry(build: Any, table: LlvmValue, row: LlvmValue, width: int, column: int) -> LlvmValue:
    return build.load(build.gep(table, [build.add(build.mul(row, INT(width)), INT(column))]))


def _store_square(
    build: Any, squared_rows: Sequence[ir.Function], columns: Sequence[LlvmValue], example: LlvmValue, place: LlvmValue
) -> None:
    """Stores a side's squared norm of an example: as measured, or of its row, whole, under a mask or with weights.

    Args:
        build: the builder.
        squared_rows: functions for whole, masked and weighted rows.
        columns: the side's row of the table.
        example: number of the example.
        place: address of the result.
    """
    whole_row, masked_row, weighted_row = squared_rows
    numbers, mask = whole_row.args[0].type, masked_row.args[1].type
    address, step, size, marks, apart = columns
    with build.if_else(build.icmp_signed("<", size, INT(0))) as (measured, rows):
        with measured:
            known = build.inttoptr(address, place.type)
            build.store(build.load(build.gep(known, [example])), place)
        with rows:
            row = build.gep(build.inttoptr(address, numbers), [build.mul(example, step)])
            with build.if_else(build.icmp_signed("==", marks, INT(0))) as (whole, kept):
                with whole:
                    build.store(build.call(whole_row, [row, size]), place)
                with kept, build.if_else(build.icmp_signed("==", apart, INT(0))) as (bytes_, weights):
                    with bytes_:
                        build.store(build.call(masked_row, [row, build.inttoptr(marks, mask), size]), place)
                    with weights:
                        at = build.gep(build.inttoptr(marks, numbers), [build.mul(example, apart)])
                        build.store(build.call(weighted_row, [row, at, size]), place)


def _add_part(build: Any, part: Counted, sides: LlvmValue, parts: LlvmValue, squares: LlvmValue, wide: bool) -> None:
    """Adds a part to an example's sums.

    The sums are the squared norm, counted and of all numbers; the largest amount that underflow may have removed; and
    the least squared norm of a second row.
    """
    double = ir.DoubleType()
    zero, one, least = double(0.0), double(1.0), double(_NORMAL[wide][0])
    first, second, counts = (_entry(build, parts, part.number, PART, column) for column in range(PART))

    def measured_of(number: LlvmValue, otherwise: LlvmValue) -> LlvmValue:
        present = build.icmp_signed(">=", number, INT(0))
        squared_norm = build.load(build.gep(squares, [build.select(present, number, first)]))
        return build.select(present, squared_norm, otherwise)

    sum_, all_, vanished, least_side = part.sums
    product, masked = (build.icmp_signed(">=", number, INT(0)) for number in (second, counts))
    entering, leaving = measured_of(first, zero), measured_of(second, one)
    value = build.fmul(entering, leaving)
    itself = build.select(build.icmp_signed("==", counts, INT(-1)), value, zero)
    # A square that underflows is lost, whatever it is multiplied by. The losses of a product sum to at most the
    # format's least number times this:
    width, out = (
        build.sitofp(_entry(build, sides, build.select(product, side, first), SIDE, 2), double)
        for side in (first, second)
    )
    lost = build.fadd(build.fmul(out, entering), build.fmul(width, build.fadd(leaving, one)))
    # In float64 no square of a float32 vanishes; squares of signals under a mask are in the rows' own format.
    is_product = product if wide else build.and_(product, masked)
    has_length = build.and_(product, build.fcmp_ordered(">", leaving, zero))
    part.sums = [
        build.fadd(sum_, measured_of(counts, itself)),
        build.fadd(all_, value),
        build.fadd(vanished, build.select(is_product, build.fmul(lost, least), zero)),
        build.select(build.and_(has_length, build.fcmp_ordered("<", leaving, least_side)), leaving, least_side),
    ]


def _factor(build: Any, length: LlvmValue, kind: LlvmValue, norm: LlvmValue, regulariser: LlvmValue) -> LlvmValue:
    """Returns the factor of a gradient of some length, in float64; the reason is in `Bound.factors`."""
    longer = build.select(build.fcmp_ordered(">", length, norm), length, norm)
    beside = build.fadd(length, regulariser)
    divisor = build.fadd(length, build.fdiv(regulariser, beside))
    for place, each in enumerate((longer, beside)):
        divisor = build.select(build.icmp_signed("==", kind, INT(place)), each, divisor)
    return build.fdiv(norm, divisor)


def _certain(
    build: Any, sums: Sequence[LlvmValue], scale: LlvmValue, kind: LlvmValue, norm: LlvmValue, wide: bool
) -> LlvmValue:
    """Returns whether an example's norm, or its being within a clip norm, and its factor are certain."""
    double = ir.DoubleType()
    square, everything, vanished, least_side = sums
    long = build.fadd(build.fmul(build.fadd(square, vanished), double(1 + 1e-4)), double(SMALL))
    short = build.fcmp_ordered("<", long, build.fmul(norm, norm))
    short = build.and_(short, build.icmp_signed("==", kind, INT(0)))
    known = build.fcmp_ordered(">=", square, build.fmul(vanished, double(_CERTAIN)))
    known = build.and_(known, build.fcmp_ordered(">=", square, double(SMALL)))
    # The factor scales the second row of an outer product, whose numbers must not become subnormal.
    shrunk = build.fmul(build.fmul(scale, scale), least_side)
    whole, above = build.fcmp_ordered(">=", scale, double(1.0)), build.fcmp_ordered(">=", shrunk, double(_LEAST_SCALED))
    certain = build.and_(build.or_(known, short), build.or_(whole, above))
    for value, low, high in ((square, 0.0, 1 / SMALL), (everything, 0.0, 1 / SMALL), (scale, *_NORMAL[wide])):
        for sign, limit in ((">=", low), ("<=", high)):  # false for NaN
            certain = build.and_(certain, build.fcmp_ordered(sign, value, double(limit)))
    return certain
