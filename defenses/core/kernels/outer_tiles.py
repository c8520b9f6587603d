"""Sums of outer products in float64, a tile of the sum in the processor's registers at a time."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from .machine_code import INT, LlvmValue, Processor, counted, fused, processor, read, spread, widened, write

_BESIDE = 2  # vectors in a line of a tile, which share each weight that is loaded
_OTHERS = Processor(vector=16, sums=8)  # assumed for a processor without fused multiply-add


def outer_sum(module: ir.Module, number: ir.Type) -> ir.Function:
    """Adds a function (values, step, size, weights, leading, rows, sums) to a module, which writes the sum of all rows.

    `values` has `size` numbers in a row, and `step` from a row to the next; `weights` has `leading` float64 numbers in
    a row. Sums, [leading, size], are rounded to the numbers' type once. Nothing may be empty.

    Args:
        module: to which the function is added.
        number: type of values and sums.
    """
    host = processor() or _OTHERS
    double, numbers = ir.DoubleType(), number.as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [numbers, INT, INT, double.as_pointer(), INT, INT, numbers])
    function = ir.Function(module, kind, "outer_sum")
    function.linkage = "internal"
    values, step, size, weights, leading, rows, sums = function.args
    build: Any = ir.IRBuilder(function.append_basic_block())
    lanes, highest = host.vector // 8, max(height for height in (2, 4, 8) if height * _BESIDE <= host.sums)
    width = INT(_BESIDE * lanes)
    done: LlvmValue = INT(0)
    for height in sorted({1, 2, highest}, reverse=True):
        vectors, single = _tile(module, number, height, _BESIDE, lanes), _tile(module, number, height, 1, 1)
        count = build.sdiv(build.sub(leading, done), INT(height))
        with build.if_then(build.icmp_signed("<", INT(0), count)), counted(build, INT(0), count) as tile_row:
            line = build.add(done, build.mul(tile_row.number, INT(height)))
            first, place = build.gep(weights, [line]), build.gep(sums, [build.mul(line, size)])

            def write(tile: ir.Function, at: LlvmValue, first: LlvmValue = first, place: LlvmValue = place) -> None:
                tile_values, tile_place = (build.gep(start, [at]) for start in (values, place))
                build.call(tile, [tile_values, step, first, leading, rows, tile_place, size])

            with build.if_else(build.icmp_signed("<", size, width)) as (short, long):
                with short, counted(build, INT(0), size) as column:
                    write(single, column.number)
                with long:
                    with counted(build, INT(0), build.sdiv(size, width)) as column:
                        write(vectors, build.mul(column.number, width))
                    with build.if_then(build.icmp_signed("<", INT(0), build.srem(size, width))):
                        # Overlaps the previous vectors and writes the same sums again.
                        write(vectors, build.sub(size, width))
        done = build.add(done, build.mul(count, INT(height)))
    build.ret_void()
    return function


def _tile(module: ir.Module, number: ir.Type, height: int, beside: int, lanes: int) -> ir.Function:
    """Adds a function (values, step, weights, leading, rows, sums, size) that sums up lines of vectors: one tile."""
    double, numbers = ir.DoubleType(), number.as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [numbers, INT, double.as_pointer(), INT, INT, numbers, INT])
    function = ir.Function(module, kind, f"tile_{height}_{beside * lanes}")
    function.linkage = "internal"
    values, step, weights, leading, rows, sums, size = function.args
    build: Any = ir.IRBuilder(function.append_basic_block())
    wide: Any = double if lanes == 1 else ir.VectorType(double, lanes)
    narrow = number if lanes == 1 else ir.VectorType(number, lanes)
    begin = [ir.Constant(wide, 0.0 if lanes == 1 else None)] * (height * beside)
    with counted(build, INT(0), rows, begin) as row:
        row_values = build.gep(values, [build.mul(row.number, step)])
        weight = build.gep(weights, [build.mul(row.number, leading)])
        vectors = []
        for i in range(beside):
            value = read(build, build.gep(row_values, [INT(i * lanes)]), narrow)
            vectors.append(widened(build, value, wide))
        for line in range(height):
            each = build.load(build.gep(weight, [INT(line)]))
            each = each if lanes == 1 else spread(build, each, wide)
            for i, vector in enumerate(vectors):
                at = line * beside + i
                row.sums[at] = build.call(fused(module, wide), [vector, each, row.sums[at]])
    for line in range(height):
        to = build.gep(sums, [build.mul(INT(line), size)])
        for i in range(beside):
            total = row.sums[line * beside + i]
            total = total if number == double else build.fptrunc(total, narrow)
            write(build, total, build.gep(to, [INT(i * lanes)]))
    build.ret_void()
    return function
