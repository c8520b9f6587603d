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
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from llvmlite import ir
from torch import Tensor

from .kernel import Kernel, ReferenceResult, computed_once, readable, synthetic_rows
from .machine_code import INT, Counted, LlvmValue, compiled, counted
from .squared_rows import squared_row

SIDE, PART = 5, 3
"""Number of columns of the table of sides, and of the table of parts."""
_LEAST_SCALED = 1e-60
"""Least squared norm of a scaled row: of its numbers, only those below 1e-8 of the norm are then subnormal (1e-38)."""
_CERTAIN = 1e6
"""A squared norm is trusted if it is at least this many times the largest amount that underflow may have removed."""
KINDS = ("clip", "normalize", "adaptive_weight")
"""Kinds of bounds, by number."""
SMALL = 1e-20
"""Least squared norm that is trusted; the largest is its inverse."""
GradientPart = tuple[Tensor, Tensor | None, Tensor | None]
"""Rows, or inputs and signals of outer products, with the mask of the coordinates that count, if there is one."""
_NORMAL = {True: (2.0**-1022, 1.7976931348623157e308), False: (2.0**-126, 3.4028234663852886e38)}
"""Least and largest normal number of float64 (wide) and of float32."""


class BoundFactors(NamedTuple):
    """Factors that bound a batch's gradients.

    Attributes:
        factors: factors of the gradients, in their dtype.
        squares: squared norms, float64.
        certain: mask of the examples for which both are valid; None if they are for all.
    """

    factors: Float[Tensor, " rows"]
    squares: Float[Tensor, " rows"]
    certain: Bool[Tensor, " rows"] | None


class NormTable:
    """Table of the parts that the norms of a batch's gradients consist of."""

    def __init__(self, examples: int, like: Tensor) -> None:
        """Starts empty.

        Args:
            examples: number of examples.
            like: tensor of the gradients' dtype, on their device.
        """
        self._examples, self._like = examples, like
        self._sides: list[int] = []
        self._parts: list[int] = []
        self._numbers: dict[tuple[int, ...], int] = {}
        self._alive: list[Tensor] = []

    def add(self, *sides: int | None, counts: bool = True, under: int | None = -1) -> bool:
        """Adds rows, or outer products of two rows, as a part of the gradients.

        Args:
            sides: index of a side, or of two sides; None for a side that compiled code cannot read.
            counts: True if the part's norm is needed, False if the part must only be finite.
            under: index of the side with the part's masked values; -1 for no mask.

        Returns:
            True if all sides are available.
        """
        first, second = sides if len(sides) == 2 else (*sides, -1)
        if first is None or second is None or under is None:
            return False
        self._parts += (first, second, under if counts else -2)
        return True

    def rows(self, values: Float[Tensor, "rows size"], mask: Bool[Tensor, " size"] | None = None) -> int | None:
        """Adds a side (rows, or masked rows) and returns its index; None if compiled code cannot read the rows.

        Args:
            values: rows of the examples.
            mask: mask of the rows' numbers, in their order.
        """
        marks = 0
        if values.dtype != self._like.dtype or not FactorKernel.usable(values):
            return None
        if mask is not None:
            if not (mask.is_cpu and mask.is_contiguous()):
                return None
            self._alive.append(mask)
            marks = mask.data_ptr()
        return self._side(values.data_ptr(), values.stride(0), values.shape[1], marks, 0)

    def weighted(self, values: Float[Tensor, "rows size"], weights: Float[Tensor, "rows size"]) -> int | None:
        """Adds a side (rows whose squares are weighted) and returns its index; None if compiled code cannot read them.

        Args:
            values: rows of the examples.
            weights: weights of the squares.
        """
        both = (values, weights)
        if any(each.dtype != self._like.dtype or not FactorKernel.usable(each) or not each.shape[1] for each in both):
            return None
        self._alive.append(weights)
        place = (values.data_ptr(), values.stride(0), values.shape[1])
        return self._side(*place, weights.data_ptr(), weights.stride(0))

    def squares(self, measured: Float[Tensor, " rows"]) -> int | None:
        """Adds a side (known squared norms, float64) and returns its index; None if compiled code cannot read them."""
        if measured.dtype != torch.float64 or not (FactorKernel.usable(measured) and measured.is_contiguous()):
            return None
        self._alive.append(measured)
        return self._side(measured.data_ptr(), 0, -1, 0, 0)

    def factors(self, kind: str = "normalize", norm: float = 1.0, regulariser: float = 1.0) -> BoundFactors | None:
        """Returns the factors that bound the gradients; None without parts or examples.

        If squared norms alone are needed, the bound is not "clip", under which an example that is shorter than the clip
        norm is certain although its norm is not.

        Args:
            kind: a bound's kind, in `KINDS`.
            norm: the bound's norm.
            regulariser: the bound's regulariser.
        """
        if not (self._parts and self._examples):
            return None
        factors, squares = (self._like.new_empty(self._examples, dtype=of) for of in (None, torch.float64))
        sides, parts, doubtful = array("q", self._sides), array("q", self._parts), array("q", (0,))
        certain = self._like.new_empty(self._examples, dtype=torch.bool)
        memory = array("d", (0.0,)) * len(self._numbers)
        bound_factors(wide=self._like.dtype == torch.float64).code(
            sides.buffer_info()[0],
            len(self._numbers),
            parts.buffer_info()[0],
            len(parts) // PART,
            self._examples,
            KINDS.index(kind),
            norm,
            regulariser,
            memory.buffer_info()[0],
            factors.data_ptr(),
            squares.data_ptr(),
            certain.data_ptr(),
            doubtful.buffer_info()[0],
        )
        return BoundFactors(factors, squares, certain if doubtful[0] else None)

    def _side(self, *line: int) -> int:
        # Equal sides are entered once: a linear layer's output gradients are the rows of its bias too.
        if line not in self._numbers:
            self._numbers[line] = len(self._numbers)
            self._sides += line
        return self._numbers[line]


@dataclass(frozen=True)
class FactorKernel(Kernel):
    """Code for rows of float64 (wide) or float32.

    A call fills a `NormTable` from a list of parts; layers fill one themselves, without the list.
    """

    wide: bool
    usable = staticmethod(readable)

    @computed_once
    def code(self) -> Callable[..., None]:
        """Computes factors.

        A gradient's parts are rows, or outer products of two rows, whose squared norms are products of theirs. Under a
        mask M the squared norm of s xᵀ is the sum over i of x_i² times w_i, with weights w = Mᵀ (s∘s), computed by a
        product with the mask. Its arguments are

        - a table of sides, (address, numbers from a row to the next, size, address of a mask of bytes, or of weights,
          or 0, numbers from a row of weights to the next or 0) each; for size -1 the address is that of measured
          squared norms in float64;
        - number of sides;
        - a table of parts, (side, other side or -1, counted) each. `counted` is -1 for the part itself, -2 if the part
          must only be finite, and otherwise the number of the side with its masked values;
        - number of parts;
        - number of examples;
        - number in `KINDS`, norm and regulariser of the bound;
        - memory for as many float64 as there are sides;
        - factors [examples] in the rows' dtype, an output;
        - squared norms [examples] in float64, an output;
        - certainty of each example, a byte of 0 or 1 [examples], an output;
        - number of uncertain examples, an int64, an output.

        Nothing may be empty.
        """
        pointer, size, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
        takes = (pointer, size, pointer, size, size, size, real, real, pointer, pointer, pointer, pointer, pointer)
        return compiled(_module(self.wide), "bound_factors", *takes)

    def __call__(self, kind: str, norm: float, regulariser: float, *parts: GradientPart) -> list[Tensor]:
        """Returns the factors, squared norms and certainties of gradients of these parts."""
        table, entered = NormTable(len(parts[0][0]), parts[0][0]), True
        for rows, signals, mask in parts:
            if signals is None:
                entered &= table.add(table.rows(rows), under=-1 if mask is None else table.rows(rows, mask))
            else:
                weights = None if mask is None else signals.square() @ mask.view(signals.shape[1], -1).to(signals)
                under = -1 if weights is None else table.weighted(rows, weights)
                entered &= table.add(table.rows(rows), table.rows(signals), under=under)
        bounded = table.factors(kind, norm, regulariser)
        if bounded is None or not entered:
            raise ValueError(f"parts must be rows of a dtype that are usable, got {[part[0].dtype for part in parts]}")
        factors, squares, certain = bounded
        return [factors, squares, torch.ones_like(squares, dtype=torch.bool) if certain is None else certain]

    def reference(self, kind: str, norm: float, regulariser: float, *parts: GradientPart) -> list[ReferenceResult]:
        """Norms of whole gradients in float64; an example whose squared norm is out of range is not certain."""
        square, everything = torch.zeros(2, len(parts[0][0]), dtype=torch.float64, device=parts[0][0].device)
        for rows, signals, mask in parts:
            wide = rows.double()
            wide = wide if signals is None else (signals.double().unsqueeze(2) * wide.unsqueeze(1)).flatten(1)
            square = square + (wide if mask is None else wide * mask).square().sum(dim=1)
            everything = everything + wide.square().sum(dim=1)
        length = square.sqrt()
        divisors = (length.clamp(min=norm), length + regulariser, length + regulariser / (length + regulariser))
        certain = (everything <= 1 / SMALL) & ((square >= SMALL) | (kind == KINDS[0]) & (length < norm / 2))
        results = (norm / divisors[KINDS.index(kind)], square)
        rounding = 1e-13 if self.wide else 1e-6
        valid = [torch.where(certain, result, torch.nan) for result in results]
        return [*(ReferenceResult(each, rounding * each) for each in valid), ReferenceResult(certain.double(), 0.0)]

    def examples(self) -> Iterator[tuple[Any, ...]]:
        """Yields sizes beside those of vectors; examples that are NaN, infinite, too long and too short for a norm."""
        rows = synthetic_rows(wide=self.wide)
        scales = torch.tensor([[1.0], [torch.nan], [0.1], [1e12], [3.0], [torch.inf], [1e-14], [2.0]])
        for size in (1, 7, 31, 32, 33, 64, 100, 8195):
            whole, signals, inputs = rows(8, size), rows(8, 5), rows(8, size)
            whole *= scales
            inputs *= scales
            mask, weight_mask = rows(1, size)[0] < 0.3, rows(1, 5 * size)[0] < 0.3
            for kind, norm, regulariser in (("clip", 0.5, 0.0), ("clip", 30.0, 0.0), ("normalize", 2.0, 0.01)):
                yield kind, norm, regulariser, (whole, None, None), (inputs, signals, None)
            for masks in ((None, weight_mask), (mask, None), (mask, weight_mask)):
                yield "adaptive_weight", 1.5, 0.1, (whole, None, masks[0]), (inputs, signals, masks[1])


@cache
def bound_factors(*, wide: bool) -> FactorKernel:
    """Returns the kernel for float64 (wide) or float32."""
    return FactorKernel(wide)


def _module(wide: bool) -> ir.Module:
    module, double = ir.Module("bound_factors"), ir.DoubleType()
    number = double if wide else ir.FloatType()
    squared_rows = [squared_row(module, wide=wide, masked=masked) for masked in (False, True)]
    squared_rows.append(squared_row(module, wide=wide, weighted=True))
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
