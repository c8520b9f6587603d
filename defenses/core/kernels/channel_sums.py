"""Sums over positions of a channels-last tensor, and of its products with another, image by image in a single pass.

PyTorch takes a pass for the products, which it materialises, and a pass for each sum. The tensors are derivatives by a
group norm's output and its inputs: the two sums determine the gradients of its weight and bias.

Guarantee:
    Sums are in float64, of an image's own numbers, in an order that depends on the number of positions alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from llvmlite import ir

from .machine_code import INT, LlvmValue, compiled, counted

_LANES = 8
_SIDE = 2 * _LANES  # channels that are added side by side: a line of the cache in float32
_TURNS = 2  # independent sums of each, so that none waits for the previous
_SHORT = ir.IntType(32)


@cache
def channel_sums(*, wide: bool) -> Callable[..., None]:
    """Compiles a function that computes sums over positions.

    Arguments: derivatives s and inputs x [images, positions, channels]; memory for two float64 a channel; mean and 1 /
    standard deviation [images, groups]; outputs for the weight's gradients [images, channels], which are (sum s x -
    mean sum s) / standard deviation, and the bias's, sum s; and the numbers of images, positions, channels and groups,
    none of them 0.

    Args:
        wide: True for tensors of float64, False for float32.
    """
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    return compiled(_module(wide), "channel_sums", *[pointer] * 7, *[size] * 4)


def _module(wide: bool) -> ir.Module:
    module, double = ir.Module("channel_sums"), ir.DoubleType()
    number_type = double if wide else ir.FloatType()
    vector, sums, lanes = (ir.VectorType(of, _LANES) for of in (number_type, double, ir.IntType(1)))

    def declared(name: str, gives: ir.Type, *takes: ir.Type) -> ir.Function:
        return ir.Function(module, ir.FunctionType(gives, takes), f"llvm.{name}")

    fma = declared(f"fma.v{_LANES}f64", sums, sums, sums, sums)
    kind = f"v{_LANES}f{64 if wide else 32}"
    load = declared(f"masked.load.{kind}.p0", vector, vector.as_pointer(), _SHORT, lanes, vector)
    store = declared(f"masked.store.v{_LANES}f64.p0", ir.VoidType(), sums, sums.as_pointer(), _SHORT, lanes)
    takes = [*[number_type.as_pointer()] * 2, double.as_pointer(), *[number_type.as_pointer()] * 4, *[INT] * 4]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), takes), "channel_sums")
    first, second, plain, means, scales, weights, biases, images, positions, channels, norms = function.args
    build: Any = ir.IRBuilder(function.append_basic_block())
    products, each = build.gep(plain, [channels]), build.sdiv(channels, norms)
    zero, none = (ir.Constant(of, [0.0] * _LANES) for of in (sums, vector))
    whole = build.sdiv(positions, INT(_TURNS))
    done = build.mul(whole, INT(_TURNS))

    def spread(value: LlvmValue) -> LlvmValue:
        of = ir.VectorType(INT, _LANES)
        first_lane = build.insert_element(ir.Constant(of, ir.Undefined), value, _SHORT(0))
        return build.shuffle_vector(first_lane, first_lane, ir.Constant(ir.VectorType(_SHORT, _LANES), None))

    def added(place: LlvmValue, mask: LlvmValue, totals: Sequence[LlvmValue]) -> list[LlvmValue]:
        """Adds the numbers of a position to the sums of the first tensor and of the products."""
        values = []
        for tensor in (first, second):
            at = build.bitcast(build.gep(tensor, [place]), vector.as_pointer())
            value = build.call(load, [at, _SHORT(8 if wide else 4), mask, none])
            values.append(value if wide else build.fpext(value, sums))
        return [build.fadd(totals[0], values[0]), build.call(fma, [*values, totals[1]])]

    slots = [build.alloca(sums) for _ in range(4)]  # for both vectors, both sums
    groups = build.sdiv(build.add(channels, INT(_SIDE - 1)), INT(_SIDE))
    with counted(build, INT(0), images) as image:
        with counted(build, INT(0), groups) as group:
            starts = [build.add(build.mul(group.number, INT(_SIDE)), INT(start)) for start in (0, _LANES)]
            lane = ir.Constant(ir.VectorType(INT, _LANES), list(range(_LANES)))
            masks = [build.icmp_signed("<", build.add(spread(start), lane), spread(channels)) for start in starts]
            image_start = build.mul(image.number, build.mul(positions, channels))

            def all_added(
                position: LlvmValue, totals: Sequence[LlvmValue], origin: LlvmValue = image_start
            ) -> list[Any]:
                line = build.add(origin, build.mul(position, channels))
                pairs = zip(starts, masks, (totals[:2], totals[2:]), strict=True)
                return [total for start, mask, two in pairs for total in added(build.add(line, start), mask, two)]

            for slot in slots:
                build.store(zero, slot)
            with build.if_then(build.icmp_signed(">", whole, INT(0))):
                with counted(build, INT(0), whole, [zero] * (4 * _TURNS)) as long:
                    at = build.mul(long.number, INT(_TURNS))
                    turns = [all_added(build.add(at, INT(i)), long.sums[4 * i : 4 * i + 4]) for i in range(_TURNS)]
                    long.sums = [total for totals in turns for total in totals]
                for number, slot in enumerate(slots):
                    build.store(build.fadd(*long.sums[number::4]), slot)
            with build.if_then(build.icmp_signed("<", done, positions)):
                with counted(build, done, positions, [build.load(slot) for slot in slots]) as short:
                    short.sums = all_added(short.number, short.sums)
                for total, slot in zip(short.sums, slots, strict=True):
                    build.store(total, slot)
            for number, slot in enumerate(slots):
                to = build.gep((plain, products)[number % 2], [starts[number // 2]])
                at = build.bitcast(to, sums.as_pointer())
                build.call(store, [build.load(slot), at, _SHORT(8), masks[number // 2]])
        with counted(build, INT(0), norms) as norm:
            own = build.add(build.mul(image.number, norms), norm.number)
            mean, scale = (build.load(build.gep(of, [own])) for of in (means, scales))
            mean, scale = (value if wide else build.fpext(value, double) for value in (mean, scale))
            with counted(build, INT(0), each) as offset:
                channel = build.add(build.mul(norm.number, each), offset.number)
                alone, both = (build.load(build.gep(of, [channel])) for of in (plain, products))
                weight = build.fmul(build.fsub(both, build.fmul(mean, alone)), scale)
                place = build.add(build.mul(image.number, channels), channel)
                for value, to in ((weight, weights), (alone, biases)):
                    build.store(value if wide else build.fptrunc(value, number_type), build.gep(to, [place]))
    build.ret_void()
    return module
