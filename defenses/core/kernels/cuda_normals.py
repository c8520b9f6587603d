# type: ignore  # Triton, which comes with PyTorch's CUDA builds alone, compiles these functions by its own types
"""Normal numbers from ChaCha20 on a CUDA device, added to a vector and rounded to a grid: the CPU's, bit for bit.

The words are those of the same blocks of the cipher, and every operation is the CPU's (`normals.py`), rounded according
to IEEE 754. A key therefore gives one stream on every device, and a step neither draws on the CPU nor copies the draws.

Traps: compilers for GPUs fuse a multiplication and an addition wherever they can, so the kernel must be compiled with
`enable_fp_fusion=False`, which leaves only `fma` fused. Triton takes a Python float, as an argument or as a constant of
`fma`, for float32: arguments have types, and constants are made by `tl.full`.

Layout: the low half of a 64-bit word is a word of an even block, the high half the same word of the block that follows.
A thread computes two neighbouring blocks, which are eight pairs of 64-bit words and give sixteen numbers, eight places
apart; eight threads make a group of 128 numbers.

Source: Bernstein, "ChaCha, a variant of Salsa20", 2008. The Box-Muller transform and its polynomials: `normals.py`.
"""

from __future__ import annotations

import math
import struct

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from . import normals

THREADS = 128
"""Threads of a program; each draws sixteen numbers."""

_LANES = tl.constexpr(8)  # threads in a group
_PAIRS = tl.constexpr(8)  # pairs of numbers a thread
_GROUP = tl.constexpr(normals.GROUP)
# The CPU's constants, so that no digit can differ.
_LOG, _SINE, _COSINE = (tl.constexpr(table) for table in (normals._LOG, normals._SINE, normals._COSINE))
_LN2_HIGH, _LN2_LOW = tl.constexpr(normals._LN2_HIGH), tl.constexpr(normals._LN2_LOW)
_C0, _C1, _C2, _C3 = (tl.constexpr(word) for word in normals._CONSTANTS)
_SHARED = tl.constexpr(normals._SHARED)
_TURN = tl.constexpr(2 * math.pi * 2.0**-64)
_HALF_ROOT_BITS = tl.constexpr(0x3FE6A09E667F3BCD)  # the square root of 1/2
_SIGN = tl.constexpr(-(2**63))
_WHOLE, _WHOLE_BITS = tl.constexpr(2.0**52), tl.constexpr(0x4330000000000000)  # from here on all are integers


@triton.jit
def _turned(word, bits: tl.constexpr):
    return (word << bits) | (word >> (32 - bits))


@triton.jit
def _quarter(a, b, c, d):
    a += b
    d = _turned(d ^ a, 16)
    c += d
    b = _turned(b ^ c, 12)
    a += b
    d = _turned(d ^ a, 8)
    c += d
    b = _turned(b ^ c, 7)
    return a, b, c, d


@triton.jit
def _block(key, draw, counter):
    """Sixteen words of ChaCha20 for each 64-bit counter; the nonce is the number of the draw."""
    low, high, none = counter.to(tl.uint32), (counter >> 32).to(tl.uint32), tl.zeros(counter.shape, tl.uint32)
    draw_low, draw_high = draw.to(tl.uint32), (draw >> 32).to(tl.uint32)
    x0, x1, x2, x3 = none + _C0, none + _C1, none + _C2, none + _C3
    x4, x5, x6, x7 = none + key[0], none + key[1], none + key[2], none + key[3]
    x8, x9, x10, x11 = none + key[4], none + key[5], none + key[6], none + key[7]
    x12, x13, x14, x15 = low, high, none + draw_low, none + draw_high
    for _ in range(10):  # a round of columns and one of diagonals
        x0, x4, x8, x12 = _quarter(x0, x4, x8, x12)
        x1, x5, x9, x13 = _quarter(x1, x5, x9, x13)
        x2, x6, x10, x14 = _quarter(x2, x6, x10, x14)
        x3, x7, x11, x15 = _quarter(x3, x7, x11, x15)
        x0, x5, x10, x15 = _quarter(x0, x5, x10, x15)
        x1, x6, x11, x12 = _quarter(x1, x6, x11, x12)
        x2, x7, x8, x13 = _quarter(x2, x7, x8, x13)
        x3, x4, x9, x14 = _quarter(x3, x4, x9, x14)
    return (
        x0 + _C0, x1 + _C1, x2 + _C2, x3 + _C3, x4 + key[0], x5 + key[1], x6 + key[2], x7 + key[3],
        x8 + key[4], x9 + key[5], x10 + key[6], x11 + key[7], x12 + low, x13 + high, x14 + draw_low, x15 + draw_high,
    )  # fmt: skip


@triton.jit
def _fused(value, factor: tl.constexpr, addend):
    return tl.fma(value, tl.full(value.shape, factor, tl.float64), addend)


@triton.jit
def _polynomial(at, coefficients: tl.constexpr, DEGREE: tl.constexpr):
    total = tl.full(at.shape, coefficients[DEGREE], tl.float64)
    for i in tl.static_range(1, DEGREE + 1):
        total = tl.fma(total, at, tl.full(at.shape, coefficients[DEGREE - i], tl.float64))
    return total


@triton.jit
def _logarithm(value):
    """Logarithm of a positive normal number: e ln 2 + ln m, with m between the square roots of 1/2 and 2."""
    bits = value.to(tl.int64, bitcast=True)
    exponent = (bits - _HALF_ROOT_BITS) >> 52
    f = (bits - (exponent << 52)).to(tl.float64, bitcast=True) - 1.0
    s = f / (f + 2.0)
    z, half = s * s, (f * f) * 0.5
    r = z * _polynomial(z, _LOG, 6)
    e = exponent.to(tl.float64)
    inner = _fused(e, _LN2_LOW, s * (half + r))
    return _fused(e, _LN2_HIGH, f - (half - inner))


@triton.jit
def _signed(value, sign):
    return (value.to(tl.int64, bitcast=True) ^ sign.to(tl.int64, bitcast=True)).to(tl.float64, bitcast=True)


@triton.jit
def _circle(word):
    """Cosine and sine of 2 pi word / 2^64, from its remainder to the nearest quarter turn."""
    turns = (word + 2**61) >> 62
    remainder = (word - (turns << 62)).to(tl.int64, bitcast=True)
    y = remainder.to(tl.float64) * _TURN
    z = y * y
    sine = tl.fma(z * y, _polynomial(z, _SINE, 5), y)
    cosine = _fused(z, -0.5, tl.full(z.shape, 1.0, tl.float64)) + (z * z) * _polynomial(z, _COSINE, 5)
    odd = (turns & 1) != 0
    # Quarter turns 1 and 2 have a negative cosine, 2 and 3 a negative sine. The sign is set by its bit: 0 - 0 loses it.
    first, second = ((turns + 1) & 2) << 62, (turns & 2) << 62
    return _signed(tl.where(odd, sine, cosine), first), _signed(tl.where(odd, cosine, sine), second)


@triton.jit
def _pair(high, shared):
    """Two normal numbers by the Box-Muller transform: a radius from 88 bits, an angle from 40."""
    upper, lower = high.to(tl.float64), (shared & (2**_SHARED - 1)).to(tl.float64)
    # The middle of an interval of 2^-88: zero has no logarithm.
    middle = tl.full(upper.shape, 2.0 ** -(65 + _SHARED), tl.float64)
    uniform = _fused(lower, 2.0 ** -(64 + _SHARED), _fused(upper, 2.0**-64, middle))
    radius = tl.sqrt(_logarithm(uniform) * -2.0)
    cosine, sine = _circle((shared >> _SHARED) << _SHARED)
    return radius * cosine, radius * sine


@triton.jit
def _nearest(value):
    """The nearest integer, the even one in a tie, with the sign of `value`: C's `rint`."""
    sign = value.to(tl.int64, bitcast=True) & _SIGN
    whole = (sign | _WHOLE_BITS).to(tl.float64, bitcast=True)
    near = ((value + whole) - whole).to(tl.int64, bitcast=True) | sign
    return tl.where(tl.abs(value) < _WHOLE, near.to(tl.float64, bitcast=True), value)


@triton.jit
def _joined(low, high):
    return low.to(tl.uint64) | (high.to(tl.uint64) << 32)


@triton.jit
def _noisy(before, drawn, std, unit, inverse, ROUNDED: tl.constexpr):
    noisy = before.to(tl.float64) + drawn * std
    if ROUNDED:
        noisy = _nearest(noisy * inverse) * unit
    return noisy.to(before.dtype)


# Not specialised, because the kernel would be compiled again for keys with a word that is 1 or divisible by 16.
@triton.jit(
    do_not_specialize=("size", "draw", "k0", "k1", "k2", "k3", "k4", "k5", "k6", "k7"),
    do_not_specialize_on_alignment=("values",),
)
def _add(
    values, size: tl.int64, draw: tl.uint64, k0: tl.uint32, k1: tl.uint32, k2: tl.uint32, k3: tl.uint32,
    k4: tl.uint32, k5: tl.uint32, k6: tl.uint32, k7: tl.uint32, std: tl.float64, unit: tl.float64, inverse: tl.float64,
    ROUNDED: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """Sixteen numbers a thread; `inverse` is 1 / unit, which is exact."""
    thread = tl.program_id(0).to(tl.int64) * THREADS + tl.arange(0, THREADS)
    # The casts are for Triton's interpreter, which takes an argument's type from its value.
    first_half = (k0.to(tl.uint32), k1.to(tl.uint32), k2.to(tl.uint32), k3.to(tl.uint32))
    key = first_half + (k4.to(tl.uint32), k5.to(tl.uint32), k6.to(tl.uint32), k7.to(tl.uint32))  # noqa: RUF005
    draw, counter = draw.to(tl.uint64), (2 * thread).to(tl.uint64)
    even, odd = _block(key, draw, counter), _block(key, draw, counter + 1)
    begin = thread // _LANES * _GROUP + thread % _LANES
    for number in tl.static_range(_PAIRS):
        first, second = begin + 2 * number * _LANES, begin + (2 * number + 1) * _LANES
        at_first, at_second = tl.load(values + first, first < size), tl.load(values + second, second < size)
        high, shared = _joined(even[2 * number], odd[2 * number]), _joined(even[2 * number + 1], odd[2 * number + 1])
        cosine, sine = _pair(high, shared)
        tl.store(values + first, _noisy(at_first, cosine, std, unit, inverse, ROUNDED), first < size)
        tl.store(values + second, _noisy(at_second, sine, std, unit, inverse, ROUNDED), second < size)


OPTIONS = {"num_warps": THREADS // 32, "enable_fp_fusion": False}
"""Options that the kernel must be compiled with."""


def add_noise(values: Float[Tensor, " size"], key: bytes, draw: int, std: float, unit: float | None) -> None:
    """Adds a draw to a vector in place, and rounds the sums to multiples of a unit.

    Args:
        values: contiguous, on a CUDA device, float64 or float32; float32 values are added to in float64, and the result
            is rounded to float32.
        key: 32 secret bytes.
        draw: number of the draw, unique under the key.
        std: standard deviation of the noise.
        unit: a power of two, or None for unrounded sums.
    """
    size = values.numel()
    if not size:
        return
    grid = (triton.cdiv(triton.cdiv(size, normals.GROUP) * _LANES.value, THREADS),)
    words, grain = struct.unpack("<8I", key), 1.0 if unit is None else unit
    with torch.cuda.device_of(values):
        _add[grid](
            values, size, draw, *words, std, grain, 1.0 / grain, ROUNDED=unit is not None, THREADS=THREADS, **OPTIONS
        )  # fmt: skip
