"""Normal numbers from the stream cipher ChaCha20, added to a vector and rounded to a grid in a single pass.

Sixteen blocks of the cipher are computed side by side, which is 128 words of 64 bits; every two words give two numbers
by the Box-Muller transform in float64. The radius uses a uniform number of 88 bits, so that tails end at 11 standard
deviations; the angle uses 40 bits, whose steps are 300,000 times or more finer, at one standard deviation, than the
unit that sums are rounded to (`noise.py`). Every bit is used, because the cipher takes most of the time. Every
operation is exact or rounded according to IEEE 754, and multiplications and additions are fused only where the code
says so: a key gives the same numbers on every processor.

Sources: Bernstein, "ChaCha, a variant of Salsa20", 2008, with its counter and nonce of 64 bits each; Box & Muller, "A
Note on the Generation of Random Normal Deviates", 1958. Polynomials of logarithm, sine and cosine as in Sun's fdlibm
(1993), which are accurate to one unit in the last place.

Guarantee:
    The bits used are those of ChaCha20 under the key. No two groups of a draw share a block, and no two pairs of
    numbers share a bit.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch
from jaxtyping import Float, Int64
from llvmlite import ir
from torch import Tensor

from .kernel import Kernel, ReferenceResult, computed_once
from .machine_code import INT, LlvmValue, compiled, counted, in_threads, read, spread, widened, write

GROUP = 128
"""Numbers per group; each group has sixteen blocks of the cipher of its own."""

_PART = 1000 * GROUP  # draws that a thread makes at a time
_BLOCKS, _LANES = 16, 8
_SHARED = 24  # low bits of a pair's second word, which extend the radius; the others are the angle
_CONSTANTS = (0x61707865, 0x3320646E, 0x79622D32, 0x6B206574)  # "expand 32-byte k"
_QUARTERS = ((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15))  # columns, then diagonals
_DIAGONALS = ((0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14))
_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
_LOG = (
    6.666666666666735130e-01, 3.999999999940941908e-01, 2.857142874366239149e-01, 2.222219843214978396e-01,
    1.818357216161805012e-01, 1.531383769920937332e-01, 1.479819860511658591e-01,
)  # fmt: skip
_SINE = (
    -1.66666666666666324348e-01, 8.33333333332248946124e-03, -1.98412698298579493134e-04, 2.75573137070700676789e-06,
    -2.50507602534068634195e-08, 1.58969099521155010221e-10,
)  # fmt: skip
_COSINE = (
    4.16666666666666019037e-02, -1.38888888888741095749e-03, 2.48015872894767294178e-05, -2.75573143513906633035e-07,
    2.08757232129817482790e-09, -1.13596475577881948265e-11,
)  # fmt: skip


@dataclass(frozen=True)
class Normals(Kernel):
    """Code that adds noise in place.

    Attributes:
        rounded: True to round sums.
        wide: True for values of float64; noise is added to float32 values in float64, and the result rounded to
            float32.
    """

    rounded: bool
    wide: bool = True

    @staticmethod
    def usable(values: Tensor) -> bool:
        """Returns whether the values are in one piece, on the CPU; no other generator draws these numbers."""
        return values.is_cpu and _in_one_piece(values)

    @computed_once
    def code(self) -> Callable[..., None]:
        """Adds noise in place.

        Arguments: key [32 bytes], number of the draw, number of the first group of `GROUP`, the number of values (at
        least one; they may end within a group), the values, the noise's standard deviation and, if `rounded`, the power
        of two to whose multiples sums are then rounded.
        """
        pointer, size, number = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_double
        takes = (pointer, size, size, size, pointer, number, number)
        return compiled(_NormalWriter(self.rounded, self.wide).module, "normals", *takes)

    def __call__(
        self, values: Float[Tensor, " size"], key: bytes, draw: int, std: float, unit: float | None
    ) -> list[Tensor]:
        """Adds a draw to a vector in place, the same for any number of threads, and returns it.

        Args:
            values: a vector that is `usable`.
            key: 32 secret bytes.
            draw: number of the draw, unique under the key.
            std: standard deviation of the noise.
            unit: a power of two, or None for unrounded sums.
        """
        size, address, each = values.numel(), values.data_ptr(), values.element_size()
        starts = range(0, size, _PART)

        def change(number: int) -> None:
            start = starts[number]
            at = (start // GROUP, min(_PART, size - start), address + each * start)
            self.code(key, draw, *at, std, 1.0 if unit is None else unit)

        if starts:
            in_threads(change, len(starts), at_once=min(torch.get_num_threads(), len(starts)))
        return [values]

    def reference(
        self, values: Float[Tensor, " size"], key: bytes, draw: int, std: float, unit: float | None
    ) -> list[ReferenceResult]:
        """The same draw by PyTorch's logarithm, sine and cosine."""
        groups = torch.arange(-(-len(values) // GROUP), device=values.device)
        drawn = reference_normals(key, groups, draw)[: len(values)] * std
        noisy = values.double() + drawn
        noisy = noisy if unit is None else (noisy / unit).round() * unit
        # Near zero the error is one of the last digits too.
        error = (1e-12 * drawn.abs()).clamp(max=5e-14 * std) + 2.0**-52 * noisy.abs()
        return [ReferenceResult(noisy.to(values.dtype).double(), error)]

    def examples(self) -> Iterator[tuple[Any, ...]]:
        """Yields sizes beside that of a group, numbers of the draw beyond 32 bits, and zeros."""
        dtype, unit = torch.float64 if self.wide else torch.float32, 2.0**-18 if self.rounded else None
        for number, size in enumerate((1, 7, GROUP - 1, GROUP, GROUP + 1, 3 * GROUP - 8, 3000)):
            key, draw = bytes(range(number, 32 + number)), (2**63, 5, 2**33 + 1)[number % 3]
            yield torch.zeros(size, dtype=dtype), key, draw, 1.0, unit
            yield torch.linspace(-9, 9, size, dtype=torch.float64).to(dtype), key, draw, 1.7, unit


class CudaNormals(Normals):
    """The same numbers on a CUDA device, bit for bit, by a kernel that Triton compiles."""

    @staticmethod
    def usable(values: Tensor) -> bool:
        """Returns whether the values are in one piece, on a CUDA device."""
        return values.is_cuda and _in_one_piece(values)

    @computed_once
    def code(self) -> Callable[..., None]:
        """Adds noise in place: takes the arguments of a call."""
        return import_module("leakbench.defenses.core.kernels.cuda_normals").add_noise

    def __call__(
        self, values: Float[Tensor, " size"], key: bytes, draw: int, std: float, unit: float | None
    ) -> list[Tensor]:
        """Adds a draw to a vector in place, and returns it."""
        self.code(values, key, draw, std, unit)
        return [values]

    def reference(
        self, values: Float[Tensor, " size"], key: bytes, draw: int, std: float, unit: float | None
    ) -> list[ReferenceResult]:
        """The CPU's numbers, from which none may differ."""
        on_cpu = normals(rounded=unit is not None, wide=self.wide)
        (noisy,) = on_cpu(values.cpu().clone(), key, draw, std, unit)
        return [ReferenceResult(noisy.double().to(values.device), 0.0)]

    def examples(self) -> Iterator[tuple[Any, ...]]:
        """Yields a vector on the current device."""
        *_, (values, *draw) = super().examples()
        yield (values.cuda(), *draw)


normals = cache(Normals)
"""Returns the kernel of these attributes, which is compiled once."""


def reference_normals(key: bytes, groups: Int64[Tensor, " groups"], draw: int) -> Float[Tensor, " numbers"]:
    """Returns the standard normal numbers of some groups of a draw, in float64."""
    blocks = reference_blocks(key, groups.unsqueeze(1) * _BLOCKS + torch.arange(_BLOCKS).to(groups), draw)
    # A word of 64 bits is the same word of two neighbouring blocks: its low half is the first's.
    high, shared = blocks.view(16, -1, _LANES, 2).unflatten(0, (8, 2)).unbind(1)
    upper = high[..., 1].double() * 2.0**32 + high[..., 0].double()
    uniform = (shared[..., 0] & 2**_SHARED - 1).double() * 2.0**-88 + (upper * 2.0**-64 + 2.0**-89)
    turns = (shared[..., 1] << 8 | shared[..., 0] >> _SHARED).double() * 2.0**-40
    quarters = (4 * turns).round()
    circle = torch.polar((-2 * uniform.log()).sqrt(), 2 * math.pi * (turns - quarters / 4))
    circle = circle * torch.tensor([1, 1j, -1, -1j], dtype=torch.complex128).to(circle)[quarters.long() % 4]
    return torch.stack([circle.real, circle.imag], dim=1).movedim(2, 0).flatten()


def reference_blocks(key: bytes, counters: Int64[Tensor, "groups 16"], draw: int) -> Int64[Tensor, "16 groups 16"]:
    """Returns the words of a block of ChaCha20 for each counter, in int64, whose sums are cut to 32 bits."""
    mask, none = 2**32 - 1, torch.zeros_like(counters)
    secret = [none + int.from_bytes(key[i : i + 4], "little") for i in range(0, 32, 4)]
    places = [counters & mask, counters >> 32, none + (draw & mask), none + (draw >> 32)]
    start = torch.stack([*(none + constant for constant in _CONSTANTS), *secret, *places])
    state = [*start]
    for a, b, c, d in (*_QUARTERS, *_DIAGONALS) * 10:
        for x, y, z, bits in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            state[x] = (state[x] + state[y]) & mask
            word = state[z] ^ state[x]
            state[z] = (word << bits | word >> (32 - bits)) & mask
    return (torch.stack(state) + start) & mask


def _in_one_piece(values: Tensor) -> bool:
    return values.is_contiguous() and not values.requires_grad


class _NormalWriter:
    """Writes the kernel in LLVM's representation."""

    def __init__(self, rounded: bool, wide: bool) -> None:
        self.module = ir.Module("normals")
        self._word, self._block = ir.IntType(32), ir.VectorType(ir.IntType(32), _BLOCKS)
        self._long, self._number = ir.VectorType(INT, _LANES), ir.VectorType(ir.DoubleType(), _LANES)
        self._functions = {
            name: ir.Function(self.module, ir.FunctionType(self._number, [self._number] * takes), f"llvm.{name}.v8f64")
            for name, takes in (("fma", 3), ("sqrt", 1), ("rint", 1))
        }
        double, word = ir.DoubleType(), self._word
        entry = double if wide else ir.FloatType()
        kind = ir.FunctionType(ir.VoidType(), [word.as_pointer(), INT, INT, INT, entry.as_pointer(), double, double])
        function = ir.Function(self.module, kind, "normals")
        key, draw, first, count, values, std, unit = function.args
        build: Any = ir.IRBuilder(function.append_basic_block())
        self._build = build
        stds, units = spread(build, std, self._number), spread(build, unit, self._number)
        inverse = build.fdiv(self._constant(1.0), units)
        keys = [spread(build, build.load(build.gep(key, [INT(i)])), self._block) for i in range(8)]
        nonce = [spread(build, build.trunc(part, word), self._block) for part in (draw, build.lshr(draw, INT(32)))]
        last = build.alloca(entry, size=INT(GROUP))  # memory to complete the last group, if it has fewer numbers
        groups = build.udiv(build.add(count, INT(GROUP - 1)), INT(GROUP))
        with counted(build, INT(0), groups) as group:
            words = self._cipher(keys, build.add(first, group.number), nonce)
            begin = build.mul(group.number, INT(GROUP))
            destination, remaining = build.gep(values, [begin]), build.sub(count, begin)
            short = build.icmp_unsigned("<", remaining, INT(GROUP))
            with build.if_then(short):
                with counted(build, INT(0), INT(GROUP)) as each:
                    build.store(ir.Constant(entry, 0.0), build.gep(last, [each.number]))
                self._copied(destination, last, remaining)
            at = build.select(short, last, destination)
            for number in range(GROUP // (2 * _LANES)):
                pair = self._pair(*(build.bitcast(words[2 * number + i], self._long) for i in range(2)))
                for half, drawn in enumerate(pair):
                    place = build.gep(at, [INT((2 * number + half) * _LANES)])
                    before = widened(build, read(build, place, ir.VectorType(entry, _LANES)), self._number)
                    # Not fused: other devices multiply and add in two operations.
                    noisy = build.fadd(before, build.fmul(drawn, stds))
                    if rounded:
                        noisy = build.fmul(self._call("rint", build.fmul(noisy, inverse)), units)
                    noisy = noisy if wide else build.fptrunc(noisy, ir.VectorType(entry, _LANES))
                    write(build, noisy, place)
            with build.if_then(short):
                self._copied(last, destination, remaining)
        build.ret_void()

    def _copied(self, start: LlvmValue, to: LlvmValue, count: LlvmValue) -> None:
        build = self._build
        with counted(build, INT(0), count) as each:
            build.store(build.load(build.gep(start, [each.number])), build.gep(to, [each.number]))

    def _cipher(self, keys: Sequence[LlvmValue], group: LlvmValue, nonce: Sequence[LlvmValue]) -> list[LlvmValue]:
        """Returns sixteen blocks of ChaCha20, as a vector for each word of a block, with a block per lane."""
        build, rounds = self._build, 20
        counters = build.add(
            spread(build, build.mul(group, INT(_BLOCKS)), ir.VectorType(INT, _BLOCKS)),
            ir.Constant(ir.VectorType(INT, _BLOCKS), list(range(_BLOCKS))),
        )
        high = build.lshr(counters, ir.Constant(ir.VectorType(INT, _BLOCKS), [32] * _BLOCKS))
        start = [
            *(ir.Constant(self._block, [constant] * _BLOCKS) for constant in _CONSTANTS),
            *keys,
            build.trunc(counters, self._block),
            build.trunc(high, self._block),
            *nonce,
        ]
        state = list(start)
        for _ in range(rounds // 2):
            for quarter in (*_QUARTERS, *_DIAGONALS):
                a, b, c, d = quarter
                for x, y, z, bits in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
                    state[x] = build.add(state[x], state[y])
                    state[z] = self._turned(build.xor(state[z], state[x]), bits)
        return [build.add(value, begun) for value, begun in zip(state, start, strict=True)]

    def _turned(self, value: LlvmValue, bits: int) -> LlvmValue:
        build = self._build
        left, right = (ir.Constant(self._block, [count] * _BLOCKS) for count in (bits, 32 - bits))
        return build.or_(build.shl(value, left), build.lshr(value, right))

    def _pair(self, high: LlvmValue, shared: LlvmValue) -> tuple[LlvmValue, LlvmValue]:
        """Returns two vectors of normal numbers from two vectors of uniform words."""
        build, last = self._build, 2**_SHARED - 1
        upper = build.uitofp(high, self._number)
        lower = build.sitofp(build.and_(shared, self._whole(last)), self._number)
        # The midpoint of its interval of length 2^-88: never 0, which has no logarithm.
        end = self._fused(upper, 2.0**-64, self._constant(2.0 ** -(65 + _SHARED)))
        uniform = self._fused(lower, 2.0 ** -(64 + _SHARED), end)
        radius = self._call("sqrt", build.fmul(self._logarithm(uniform), self._constant(-2.0)))
        cosine, sine = self._circle(build.and_(shared, self._whole(2**64 - 1 - last)))
        return build.fmul(radius, cosine), build.fmul(radius, sine)

    def _logarithm(self, value: LlvmValue) -> LlvmValue:
        """Logarithm of a positive number that is not subnormal: e ln 2 + ln m with m between the roots of 1/2 and 2."""
        build, bits = self._build, self._build.bitcast(value, self._long)
        # 0x3fe6a09e667f3bcd are the bits of the root of 1/2: larger mantissas count towards the next exponent.
        shifted = build.sub(bits, self._whole(0x3FE6A09E667F3BCD))
        exponent = build.ashr(shifted, self._whole(52))
        mantissa = build.bitcast(build.sub(bits, build.shl(exponent, self._whole(52))), self._number)
        f = build.fsub(mantissa, self._constant(1.0))
        s = build.fdiv(f, build.fadd(f, self._constant(2.0)))
        z, half = build.fmul(s, s), build.fmul(build.fmul(f, f), self._constant(0.5))
        r = build.fmul(z, self._polynomial(z, _LOG))
        e = build.sitofp(exponent, self._number)
        # e ln 2 - ((half - (s (half + r) + e ln2_low)) - f), with ln 2 in two parts, the first of which is short.
        inner = self._fused(e, _LN2_LOW, build.fmul(s, build.fadd(half, r)))
        return self._fused(e, _LN2_HIGH, build.fsub(f, build.fsub(half, inner)))

    def _circle(self, word: LlvmValue) -> tuple[LlvmValue, LlvmValue]:
        """Cosine and sine of 2 pi word / 2^64, from its remainder to the nearest quarter turn."""
        build = self._build
        turns = build.lshr(build.add(word, self._whole(1 << 61)), self._whole(62))
        fraction = build.sub(word, build.shl(turns, self._whole(62)))
        y = build.fmul(build.sitofp(fraction, self._number), self._constant(2 * math.pi * 2.0**-64))
        z = build.fmul(y, y)
        sine = self._call("fma", build.fmul(z, y), self._polynomial(z, _SINE), y)
        series = build.fmul(build.fmul(z, z), self._polynomial(z, _COSINE))
        cosine = build.fadd(self._fused(z, -0.5, self._constant(1.0)), series)
        odd = build.trunc(turns, ir.VectorType(ir.IntType(1), _LANES))
        cosine_up_to_sign, sine_up_to_sign = build.select(odd, sine, cosine), build.select(odd, cosine, sine)
        # Quarter turns 1 and 2 have a negative cosine, 2 and 3 a negative sine: the sign is the top bit.
        first = build.shl(build.and_(build.add(turns, self._whole(1)), self._whole(2)), self._whole(62))
        second = build.shl(build.and_(turns, self._whole(2)), self._whole(62))
        return self._signed(cosine_up_to_sign, first), self._signed(sine_up_to_sign, second)

    def _signed(self, value: LlvmValue, sign: LlvmValue) -> LlvmValue:
        build = self._build
        return build.bitcast(build.xor(build.bitcast(value, self._long), sign), self._number)

    def _polynomial(self, at: LlvmValue, coefficients: Sequence[float]) -> LlvmValue:
        total: LlvmValue = self._constant(coefficients[-1])
        for coefficient in reversed(coefficients[:-1]):
            total = self._call("fma", total, at, self._constant(coefficient))
        return total

    def _fused(self, value: LlvmValue, factor: float, addend: LlvmValue) -> LlvmValue:
        return self._call("fma", value, self._constant(factor), addend)

    def _call(self, name: str, *values: LlvmValue) -> LlvmValue:
        return self._build.call(self._functions[name], values)

    def _constant(self, value: float) -> LlvmValue:
        return ir.Constant(self._number, [value] * _LANES)

    def _whole(self, value: int) -> LlvmValue:
        return ir.Constant(self._long, [value] * _LANES)
