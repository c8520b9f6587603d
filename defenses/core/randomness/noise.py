"""Sources of Gaussian noise, and its addition on a public grid. Only the engine draws from a source.

The spacing of floating-point numbers depends on their magnitude. If noise is added to a sum in the model's own float32,
the last bits reveal the sum at any noise scale: Mironov, "On Significance of the Least Significant Bits for
Differential Privacy", CCS 2012; Jin, McMurtry, Rubinstein & Ohrimenko, "Are We There Yet? Timing and Floating-Point
Attacks on Differential Privacy Systems", S&P 2022. `attacks/float_grid.py` is such an attack. Every source therefore
rounds the noisy sum to a multiple of a unit that depends on the noise's standard deviation alone, and only this
multiple is rounded to float32.

Guarantee:
    Each draw is independent of the data and of every other draw. Released: multiples of a public unit.
    `secure`: sums of integers plus discrete Gaussian noise, exactly (`discrete_gaussian.py`, `exact_sums.py`). Assumes
    that the bits of the operating system are independent and fair.
    `os` and `seeded`: noise drawn and added in float64, then rounded to the unit, with 2^18 or more units in a standard
    deviation. Assumes that the stream of the cipher ChaCha20 cannot be distinguished from fair bits, and that a float64
    Gaussian may stand for a real-valued Gaussian: within five standard deviations a unit contains 2^31 floats or more,
    each pair of draws uses 128 random bits, and tails end at 11 standard deviations. The sums before the noise are not
    exact: they have the rounding error of float32. `os` has a key of 256 bits from the operating system; the key of
    `seeded` is hashed from an integer, which must be secret and hard to guess for the guarantee to hold.
"""

from __future__ import annotations

import hashlib
import math
import os
import warnings
from functools import cache
from importlib.util import find_spec
from threading import Lock
from typing import Literal, NoReturn, Protocol, SupportsIndex, runtime_checkable

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ..kernels.normals import CudaNormals, Normals, normals
from . import discrete_gaussian

NoiseSource = Literal["seeded", "os", "secure"]

SMALLEST_STD, LARGEST_STD = 2.0**-100, 2.0**100
"""Limits of the noise on a sum, beyond which a float32 release would be zero or infinite."""

EXACT_SCALE = 2.0**30
"""Units in a standard deviation of exact noise, enough that rounding contributions to whole units is harmless."""

_FINE = 18  # bits: the unit of float64 noise is between 2^-19 and 2^-18 of its standard deviation
_KEY_BYTES, _STATE_WORDS = 32, 5  # of a ChaCha20 key; of a saved stream (key and number of draws)


_forks = 0  # fork depth of this process, which identifies it among its ancestors; process ids are reused


def _forked() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


@runtime_checkable
class Noise(Protocol):
    """Source of independent Gaussian draws.

    Attributes:
        kind: name of the source in records.
        exact: whether sums must be integers, in units, so that the addition does not round.
    """

    kind: NoiseSource
    exact: bool

    def unit(self, std: float) -> float:
        """Unit of which releases are multiples: a function of the standard deviation alone."""
        ...

    def add(self, sums: Float[Tensor, " size"] | Int64[Tensor, " size"], std: float) -> Float[Tensor, " size"]:
        """Adds noise, and returns multiples of the unit: float64, or the dtype of float32 sums (`CipherNoise`).

        Args:
            sums: float64, or int64 in units; for `CipherNoise` float32 too. They may be overwritten.
            std: standard deviation of the noise, in the units of float64 sums.
        """
        ...

    def state(self) -> Tensor | None:
        """State from which the stream can be continued; secret."""
        ...

    def load(self, state: Tensor | None) -> None:
        """Resumes the stream at a state."""
        ...


class CipherNoise:
    """Float64 noise from the stream cipher ChaCha20, the same on every device and for any number of threads."""

    exact = False

    def __init__(self, key: bytes, kind: NoiseSource) -> None:
        """Takes the stream's key, 32 secret bytes."""
        if len(key) != _KEY_BYTES:
            raise ValueError(f"the key of noise must have {_KEY_BYTES} bytes, got {len(key)}")
        self.kind: NoiseSource = kind
        self._key, self._draws, self._drawing, self._process = key, 0, Lock(), _forks

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuses copies and pickles: two copies would add the same noise, which cancels between their releases.

        Raises:
            TypeError: always.
        """
        raise TypeError("noise must not be copied, because copies draw the same; keep its `state()`, or make another")

    def handed_over(self) -> CipherNoise:
        """Returns the rest of the stream, for a run that may rewind it; this object continues with a new stream."""
        with self._drawing:
            successor = CipherNoise(self._key, self.kind)
            successor._draws, successor._process = self._draws, self._process
            self._rekey(b"noise/next/")
        return successor

    def leave(self, name: str) -> None:
        """Continues with another stream, whose key follows from this one's, its number of draws, and a name."""
        with self._drawing:
            # The number of draws, because copies of a stream may leave it at several places under the same name.
            self._rekey(f"noise/{name}/{self._draws}/".encode())

    def _rekey(self, prefix: bytes) -> None:
        self._key, self._draws = hashlib.sha256(prefix + self._key).digest(), 0

    def unit(self, std: float) -> float:
        """Unit of float64 noise, a power of two."""
        return 2.0 ** (math.frexp(_checked(std))[1] - 1 - _FINE)

    def add(self, sums: Float[Tensor, " size"] | Int64[Tensor, " size"], std: float) -> Float[Tensor, " size"]:
        """Adds noise in float64 and rounds to the nearest unit; float32 sums are then rounded to float32."""
        unit = self.unit(std)
        _refuse_tables(sums)
        if sums.dtype not in (torch.float64, torch.float32):
            raise ValueError(f"sums must be float64 or float32 for noise of kind '{self.kind}', got {sums.dtype}")
        if Normals.usable(sums):
            normals(rounded=True, wide=sums.dtype == torch.float64)(sums, *self._next_draw(), std, unit)
            return sums
        if CudaNormals.usable(sums) and (on_device := _device_kernel(sums.device, sums.dtype)) is not None:
            on_device(sums, *self._next_draw(), std, unit)
            return sums
        # Drawn on the CPU for every device, so that a seed gives the same stream on all of them.
        draw = torch.zeros(len(sums), dtype=torch.float64)
        normals(rounded=False)(draw, *self._next_draw(), 1.0, None)
        noisy = sums.double() + draw.to(sums.device) * std
        return noisy.div(unit).round().mul(unit).to(sums.dtype)

    def _next_draw(self) -> tuple[bytes, int]:
        """Returns the key and the number of a draw that no other call gets."""
        if self._process != _forks:
            raise ValueError(
                f"noise must be drawn by the process that made it, got its fork {os.getpid()}: parent and fork would "
                "draw the same numbers, which cancel between their releases; make noise after the fork"
            )
        # Locked, so that no two draws, and no draw after `handed_over`, use the same part of the stream.
        with self._drawing:
            stream = self._key, self._draws
            self._draws += 1
        return stream

    def state(self) -> Tensor | None:
        """Returns the key and the number of draws."""
        with self._drawing:
            words = self._key + self._draws.to_bytes(8, "little")
        return torch.frombuffer(bytearray(words), dtype=torch.int64)

    def load(self, state: Tensor | None) -> None:
        """Restores the key and the number of draws."""
        if state is None:
            raise ValueError(
                f"noise of kind '{self.kind}' must go on from a saved state, got none: it had another source"
            )
        if state.shape != (_STATE_WORDS,):
            raise ValueError(
                f"noise of kind '{self.kind}' must go on from a state of {_STATE_WORDS} words, got {state.numel()}: "
                "it was drawn by another generator; start the run again"
            )
        words = state.contiguous().view(torch.uint8).numpy().tobytes()
        with self._drawing:
            self._key, self._draws = words[:_KEY_BYTES], int.from_bytes(words[_KEY_BYTES:], "little")
            self._process = _forks  # loading a state makes this process the owner of the stream


@cache
def _device_kernel(device: torch.device, dtype: torch.dtype) -> CudaNormals | None:
    """Returns the kernel that adds the CPU's noise on a CUDA device, if its numbers are the CPU's; None without Triton.

    None with a warning if the kernel fails, or its numbers are not the CPU's.
    """
    if find_spec("triton") is None:
        return None
    kernel = CudaNormals(rounded=True, wide=dtype == torch.float64)
    with torch.cuda.device(device):
        fault = _fault(kernel)
    if not fault:
        return kernel
    warnings.warn(f"noise is drawn on the CPU and copied to {device}, because its kernel {fault}", stacklevel=4)
    return None


def _fault(kernel: CudaNormals) -> str:
    """Compares a kernel with the CPU's on its examples; returns what is wrong, or an empty string."""
    try:
        return "" if kernel.agrees else "gives other numbers than the CPU's"
    except Exception as error:  # of Triton, a C compiler that is missing, the driver: the CPU serves instead
        return f"failed: {type(error).__name__}: {str(error)[:200]}"


class SecureNoise:
    """Exact discrete Gaussians from the operating system's generator; slower, and never reproducible."""

    kind: NoiseSource = "secure"
    exact = True

    def unit(self, std: float) -> float:
        """Unit of exact noise: the standard deviation over 2^30, a power of two, so that the division is exact."""
        return _checked(std) / EXACT_SCALE

    def add(self, sums: Float[Tensor, " size"] | Int64[Tensor, " size"], std: float) -> Float[Tensor, " size"]:
        """Adds noise to integer sums exactly; float64 sums, which have no guarantee, are rounded to units first."""
        unit = self.unit(std)
        _refuse_tables(sums)
        # Clamped, because the conversion of a float beyond 2^63 to int64 is undefined.
        whole = sums if sums.dtype == torch.int64 else (sums.double() / unit).clamp(-(2.0**60), 2.0**60).round().long()
        drawn = discrete_gaussian.draw(len(sums), EXACT_SCALE).to(sums.device)
        # The sum is of integers; rounding to float64 comes after the noise, and is post-processing.
        return (whole + drawn).double() * unit

    def state(self) -> Tensor | None:
        """Returns None: the stream has no state."""
        return None

    def load(self, state: Tensor | None) -> None:
        """Does nothing: a resumed run draws new noise, with the same privacy."""


def seeded(seed: int) -> Noise:
    """Returns reproducible noise for experiments; a privacy claim requires that the seed is secret.

    Args:
        seed: any number of bits; all of them count.

    Raises:
        ValueError: for a negative seed.
    """
    if seed < 0:
        raise ValueError(f"the seed of noise must be at least 0, got {seed}")
    # Hashed with a prefix, so that keys of consecutive seeds, and of a sampler with the same seed, are unrelated.
    return CipherNoise(hashlib.sha256(f"noise/{seed}".encode()).digest(), "seeded")


def from_generator(generator: torch.Generator) -> Noise:
    """Returns reproducible noise with a key drawn from a generator; a second call gives another stream."""
    words = torch.randint(0, 256, (_KEY_BYTES,), generator=generator, device=generator.device)
    return CipherNoise(bytes(words.tolist()), "seeded")


def from_os() -> Noise:
    """Returns noise with a key from the operating system, which no checkpoint contains."""
    return CipherNoise(os.urandom(_KEY_BYTES), "os")


def secure() -> Noise:
    """Returns exact noise from the operating system's cryptographic generator."""
    return SecureNoise()


def of_one_run(noise: Noise) -> Noise:
    """Returns noise for a single run, so that its checkpoint can rewind the stream of seeded noise.

    If several runs shared a stream, a resumed run could repeat draws of another run, and the noise would cancel in the
    difference of their releases.

    Args:
        noise: source given to the run, perhaps also to others; a source of another type or kind is returned unchanged.
    """
    return noise.handed_over() if type(noise) is CipherNoise and noise.kind == "seeded" else noise


def _checked(std: float) -> float:
    if not SMALLEST_STD <= std <= LARGEST_STD:  # false for NaN
        raise ValueError(
            f"the noise's standard deviation must be between 2^-100 and 2^100, got {std}; "
            "it is the noise multiplier times the bound's norm over the root of the block's share"
        )
    return std


def _refuse_tables(sums: Tensor) -> None:
    if sums.dim() != 1:  # the number of draws would be the length of the first dimension only
        raise ValueError(f"sums must be vectors [size], got {tuple(sums.shape)}")
