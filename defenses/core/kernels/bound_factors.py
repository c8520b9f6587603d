"""Factors that bound a batch's gradients, from the norms of their parts, in one call.

PyTorch takes fifteen operations on as many numbers as there are examples, each of which takes longer to begin than to
do: on a small network they take as long as the pass forward.

Guarantee:
    A factor depends on its example alone. Norms are computed in float64 and factors by the formulas of `plan/bound.py`.
    An example whose norm is not certain, or whose factor is no normal number, is named, and nothing is said of it. One
    that is clipped is certain, too, where it is short of the bound whatever its norm is: its factor is 1.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

from llvmlite import ir

from .machine_code import INT, compiled, counted
from .row_squares import squared_row

SIDE, PART = 5, 3
"""Numbers of the tables' rows."""
_LEAST_SCALED = 1e-60
"""The squared norm of a scaled row, from which on float32 holds it: below 1e-38 its numbers have fewer digits."""
_CERTAIN = 1e6
"""How many times what may have vanished a squared norm is at least, where it is believed."""
KINDS = ("clip", "normalize", "adaptive_weight")
"""What bounds, by number."""
SMALL = 1e-20
"""Squared norms between this and its inverse are certain."""


@cache
def bound_factors(*, wide: bool) -> Callable[..., None]:
    """A function that computes factors.

    A gradient's parts are rows, or outer products of two rows, whose squared norms are products of theirs. Under a mask
    M that of s xᵀ is the sum over i of x_i² times w_i, with weights w = Mᵀ (s∘s), which a product with the mask gives.
    It is called with

    - a table of sides, (address, numbers from one row to the next, size, address of a mask of bytes, or of weights, or
      0, numbers from one row of weights to the next or 0) each; of size -1 the address is that of squared norms in
      float64 that somebody has measured;
    - how many sides there are;
    - a table of parts, (side, other side or -1, what counts) each. What counts is -1 where it is the part itself, -2
      where the part must only be finite, and else the number of the side that has what a mask leaves of it;
    - how many parts there are;
    - how many examples there are;
    - number in `KINDS`, norm and regulariser of the bound;
    - memory for as many float64 as there are sides;
    - factors [examples] in the rows' dtype, which are written;
    - squared norms [examples] in float64, which are written;
    - whether each example is certain, a byte of 0 or 1 [examples], which is written;
    - how many are not, an int64, which is written.

    Nothing may be empty.

    Args:
        wide: whether rows are float64, not float32.
    """
    pointer, size, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
    takes = (pointer, size, pointer, size, size, size, real, real, pointer, pointer, pointer, pointer, pointer)
    return compiled(_module(wide), "bound_factors", *takes)


def _module(wide: bool) -> ir.Module:
    module, double = ir.Module("bound_factors"), ir.DoubleType()
    number = double if wide else ir.FloatType()
    whole_row, masked_row = (squared_row(module, wide=wide, masked=masked) for masked in (False, True))
    weighted_row = squared_row(module, wide=wide, weighted=True)
    least, most = (2.0**-1022, 1.7976931348623157e308) if wide else (2.0**-126, 3.4028234663852886e38)
    root = module.declare_intrinsic("llvm.sqrt", [double])
    table, reals, numbers, mask = INT.as_pointer(), double.as_pointer(), number.as_pointer(), ir.IntType(8).as_pointer()
    takes = [table, INT, table, INT, INT, INT, double, double, reals, numbers, reals, mask, table]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), takes), "bound_factors")
    sides, side_count, parts, part_count, examples, kind, norm, regulariser, squares, *found = function.args
    factors, norms, marks_of, doubtful = found
    build: Any = ir.IRBuilder(function.append_basic_block())
    zero, one = double(0.0), double(1.0)

    def entry(of: Any, row: Any, width: int, column: int) -> Any:
        return build.load(build.gep(of, [build.add(build.mul(row, INT(width)), INT(column))]))

    with counted(build, INT(0), examples, [INT(0)]) as example:
        with counted(build, INT(0), side_count) as side:
            address, step, size, marks, apart = (entry(sides, side.number, SIDE, column) for column in range(SIDE))
            place = build.gep(squares, [side.number])
            with build.if_else(build.icmp_signed("<", size, INT(0))) as (measured, rows):
                with measured:
                    known = build.inttoptr(address, reals)
                    build.store(build.load(build.gep(known, [example.number])), place)
                with rows:
                    row = build.gep(build.inttoptr(address, numbers), [build.mul(example.number, step)])
                    with build.if_else(build.icmp_signed("==", marks, INT(0))) as (whole, kept):
                        with whole:
                            build.store(build.call(whole_row, [row, size]), place)
                        with kept, build.if_else(build.icmp_signed("==", apart, INT(0))) as (bytes_, weights):
                            with bytes_:
                                found = build.call(masked_row, [row, build.inttoptr(marks, mask), size])
                                build.store(found, place)
                            with weights:
                                at = build.gep(build.inttoptr(marks, numbers), [build.mul(example.number, apart)])
                                build.store(build.call(weighted_row, [row, at, size]), place)
        with counted(build, INT(0), part_count, [zero] * 3 + [double(1 / SMALL)]) as part:
            first, other, counts = (entry(parts, part.number, PART, column) for column in range(PART))

            def measured_of(number: Any, otherwise: Any) -> Any:
                there = build.icmp_signed(">=", number, INT(0))
                found = build.load(build.gep(squares, [build.select(there, number, first)]))
                return build.select(there, found, otherwise)

            sum_, all_, vanished, least_side = part.sums
            product, masked = (build.icmp_signed(">=", number, INT(0)) for number in (other, counts))
            entering, leaving = measured_of(first, zero), measured_of(other, one)
            value = build.fmul(entering, leaving)
            itself = build.select(build.icmp_signed("==", counts, INT(-1)), value, zero)
            # A square that a format does not hold vanishes, whatever it is multiplied by. All that vanish of a product
            # are at most the format's least number times this:
            width, out = (
                build.sitofp(entry(sides, build.select(product, side, first), SIDE, 2), double)
                for side in (first, other)
            )
            lost = build.fadd(build.fmul(out, entering), build.fmul(width, build.fadd(leaving, one)))
            # In float64 no square of a float32 vanishes; those of signals under a mask are in the rows' own format.
            some = product if wide else build.and_(product, masked)
            part.sums = [
                build.fadd(sum_, measured_of(counts, itself)),
                build.fadd(all_, value),
                build.fadd(vanished, build.select(some, build.fmul(lost, double(least)), zero)),
                build.select(
                    build.and_(
                        build.and_(product, build.fcmp_ordered(">", leaving, zero)),
                        build.fcmp_ordered("<", leaving, least_side),
                    ),
                    leaving,
                    least_side,
                ),
            ]
        square, everything, vanished, least_side = part.sums
        build.store(square, build.gep(norms, [example.number]))
        length = build.call(root, [square])
        # As `Bound.factors` has them, which says why.
        longer = build.select(build.fcmp_ordered(">", length, norm), length, norm)
        beside = build.fadd(length, regulariser)
        divisors = (longer, beside, build.fadd(length, build.fdiv(regulariser, beside)))
        divisor = divisors[2]
        for place, each in enumerate(divisors[:2]):
            divisor = build.select(build.icmp_signed("==", kind, INT(place)), each, divisor)
        factor = build.fdiv(norm, divisor)
        factor = factor if wide else build.fptrunc(factor, number)
        scale = factor if wide else build.fpext(factor, double)
        build.store(factor, build.gep(factors, [example.number]))
        long = build.fadd(build.fmul(build.fadd(square, vanished), double(1 + 1e-4)), double(SMALL))
        short = build.fcmp_ordered("<", long, build.fmul(norm, norm))
        short = build.and_(short, build.icmp_signed("==", kind, INT(0)))
        known = build.fcmp_ordered(">=", square, build.fmul(vanished, double(_CERTAIN)))
        known = build.and_(known, build.fcmp_ordered(">=", square, double(SMALL)))
        limits = (
            (square, 0.0, 1 / SMALL),
            (everything, 0.0, 1 / SMALL),
            (scale, least, most),
        )
        # Of an outer product the second row is scaled: in what is left of it rounding must not show.
        shrunk = build.fmul(build.fmul(scale, scale), least_side)
        scaled = build.or_(
            build.fcmp_ordered(">=", scale, one), build.fcmp_ordered(">=", shrunk, double(_LEAST_SCALED))
        )
        certain = build.and_(build.or_(known, short), scaled)
        for value, low, high in limits:  # false for NaN
            for sign, limit in ((">=", low), ("<=", high)):
                certain = build.and_(certain, build.fcmp_ordered(sign, value, double(limit)))
        build.store(build.zext(certain, ir.IntType(8)), build.gep(marks_of, [example.number]))
        example.sums = [build.add(example.sums[0], build.select(certain, INT(0), INT(1)))]
    build.store(example.sums[0], doubtful)
    build.ret_void()
    return module
