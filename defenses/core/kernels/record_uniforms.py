"""Uniform numbers of records, as dropout draws them: splitmix64 of a record's stream, in a single pass.

PyTorch computes the hash in a dozen passes over 64-bit integers, which took half the time of a step with dropout after
every layer. The numbers are the same bit for bit.

Source: Steele, Lea & Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from jaxtyping import Float64, Int64
from llvmlite import ir
from torch import Tensor

from .kernel import Kernel, ReferenceResult, computed_once
from .machine_code import INT, LlvmValue, compiled, counted, in_threads, spread, write

GOLDEN = -0x61C8864680B583EB  # 2^64 / golden ratio, odd: the step between the inputs of a hash
FIRST, SECOND = -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15  # multipliers of splitmix64's finaliser
SHIFTS = (30, 27, 31)
BITS = 53  # of a number
_LANES, _LEAST = 8, 2**10  # numbers of a vector; numbers from which a call takes less time than PyTorch's
_PART = 2**16  # numbers that a thread takes at least


@dataclass(frozen=True)
class RecordUniforms(Kernel):
    """Code that draws uniform numbers in [0, 1), multiples of 2^-53, for each of several streams."""

    @staticmethod
    def usable(streams: Tensor, count: int) -> bool:
        """Returns whether streams are plain numbers on the CPU, and there are enough to draw; not under `vmap`."""
        functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]  missing in torch's stubs
        wrapped = functorch.is_functorch_wrapped_tensor(streams)
        plain = type(streams) is Tensor and streams.is_cpu and not wrapped and streams.is_contiguous()
        return plain and streams.numel() * count >= _LEAST

    @computed_once
    def code(self) -> Callable[..., None]:
        """Writes numbers.

        Arguments: the streams, their number, the numbers of each (neither may be 0), and the numbers.
        """
        pointer, size = ctypes.c_void_p, ctypes.c_uint64
        return compiled(_module(), "record_uniforms", pointer, size, size, pointer)

    def __call__(self, streams: Int64[Tensor, " n"], count: int) -> list[Float64[Tensor, "n count"]]:
        """Returns the first numbers of each stream.

        Args:
            streams: 64 bits for each record, that are `usable`.
            count: numbers of each.
        """
        numbers = torch.empty(len(streams), count, dtype=torch.float64)
        parts = min(torch.get_num_threads(), len(streams), max(1, numbers.numel() // _PART))
        each = -(-len(streams) // parts)
        begin, to = streams.data_ptr(), numbers.data_ptr()

        def draw(part: int) -> None:
            start = part * each
            size = min(each, len(streams) - start)
            if size > 0:
                self.code(begin + 8 * start, size, count, to + 8 * start * count)

        in_threads(draw, parts, at_once=parts)
        return [numbers]

    def reference(self, streams: Int64[Tensor, " n"], count: int) -> list[ReferenceResult]:
        """The same numbers by PyTorch, of which none may differ."""
        x = streams.unsqueeze(1) + torch.arange(1, count + 1) * GOLDEN
        for shift, factor in zip(SHIFTS, (FIRST, SECOND, 1), strict=True):
            x = (x ^ (x >> shift) & ((1 << (64 - shift)) - 1)) * factor
        upper = (x >> (64 - BITS)) & ((1 << BITS) - 1)
        return [ReferenceResult(upper.double() * 2.0**-BITS, 0.0)]

    def examples(self) -> Iterator[tuple[Any, ...]]:
        """Yields counts beside a vector's length, and streams of all signs."""
        generator = torch.Generator().manual_seed(0)
        for count in (1, 7, 8, 9, 64, 1001):
            streams = torch.randint(-(2**63), 2**63 - 1, (5,), generator=generator)
            yield torch.cat([streams, torch.tensor([0, -1, 2**63 - 1, -(2**63)])]), count


record_uniforms = cache(RecordUniforms)
"""Returns the kernel, which is compiled once."""


def _module() -> ir.Module:
    module, double = ir.Module("record_uniforms"), ir.DoubleType()
    kind = ir.FunctionType(ir.VoidType(), [INT.as_pointer(), INT, INT, double.as_pointer()])
    function = ir.Function(module, kind, "record_uniforms")
    streams, entries, count, numbers = function.args
    build: Any = ir.IRBuilder(function.append_basic_block())
    vector = ir.VectorType(INT, _LANES)
    steps = ir.Constant(vector, [_wrapped((lane + 1) * GOLDEN) for lane in range(_LANES)])
    whole = build.udiv(count, INT(_LANES))
    done = build.mul(whole, INT(_LANES))
    with counted(build, INT(0), entries) as entry:
        stream = build.load(build.gep(streams, [entry.number]))
        row = build.gep(numbers, [build.mul(entry.number, count)])
        with build.if_then(build.icmp_unsigned(">", whole, INT(0))):
            first = build.add(spread(build, stream, vector), steps)
            with counted(build, INT(0), whole, [first]) as long:
                place = build.gep(row, [build.mul(long.number, INT(_LANES))])
                write(build, _uniform(build, long.sums[0], ir.VectorType(double, _LANES)), place)
                following = ir.Constant(vector, [_wrapped(_LANES * GOLDEN)] * _LANES)
                long.sums = [build.add(long.sums[0], following)]
        with build.if_then(build.icmp_unsigned("<", done, count)), counted(build, done, count) as short:
            step = build.mul(build.add(short.number, INT(1)), INT(GOLDEN))
            write(build, _uniform(build, build.add(stream, step), double), build.gep(row, [short.number]))
    build.ret_void()
    return module


def _uniform(build: Any, x: LlvmValue, number: ir.Type) -> LlvmValue:
    """Hashes integers to uniform numbers."""

    def constant(value: int | float, of: Any) -> ir.Constant:
        return ir.Constant(of, [value] * of.count if isinstance(of, ir.VectorType) else value)

    for shift, factor in zip(SHIFTS, (FIRST, SECOND, None), strict=True):
        x = build.xor(x, build.lshr(x, constant(shift, x.type)))
        x = x if factor is None else build.mul(x, constant(factor, x.type))
    upper = build.uitofp(build.lshr(x, constant(64 - BITS, x.type)), number)
    return build.fmul(upper, constant(2.0**-BITS, number))


def _wrapped(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63
