"""Sources of Gaussian noise, and its addition on a public grid. Only the engine draws; nothing else sees a source.

Floating-point numbers lie on grids, and which grid depends on how large a number is. A sum to which noise is added in
the model's own float32 shows in its last bits which sum it was, whatever the noise: Mironov, "On Significance of the
Least Significant Bits for Differential Privacy", CCS 2012; Jin, McMurtry, Rubinstein & Ohrimenko, "Are We There Yet?
Timing and Floating-Point Attacks on Differential Privacy Systems", S&P 2022. `attacks/float_grid.py` is such an attack.
So every source releases multiples of a unit that follows from the noise's standard deviation alone, and what is rounded
to float32 is that multiple.

Guarantee:
    Each draw is independent of the data and of every other draw. Released: multiples of a public unit. `secure`: sums
    of integers plus discrete Gaussian noise, exactly (`discrete_gaussian.py`, `exact_sums.py`). Assumes that the bits
    of the operating system are independent and fair. `os` and `seeded`: noise in float64, added in float64, rounded to
    the unit, of which there are 2^18 or more to a standard deviation. Assumes that nobody tells the stream of ChaCha20,
    a cipher, from fair bits, and that what float64 leaves of a Gaussian is one: within five standard deviations a unit
    holds 2^31 floats or more, two numbers are made of 128 bits, and tails end at 11. The sums themselves are rounded as
    float32 rounds them. `os` has a key of 256 bits from the operating system; the key of `seeded` follows from a
    number, which must be kept secret for the guarantee to mean anything, and be a large one.
"""

from __future__ import annotations

import hashlib
import math
import os
from threading import Lock
from typing import Literal, NoReturn, Protocol, SupportsIndex, runtime_checkable

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ..kernels.machine_code import in_threads
from ..kernels.normals import GROUP, normals
from . import discrete_gaussian

NoiseSource = Literal["seeded", "os", "secure"]

SMALLEST_STD, LARGEST_STD = 2.0**-100, 2.0**100
"""Of the noise on a sum: beyond these a float32 release would be zero or infinite."""

EXACT_SCALE = 2.0**30
"""Units to a standard deviation of exact noise: so many that rounding contributions to whole units is harmless."""

_FINE = 18  # bits: the unit of float64 noise is between 2^-19 and 2^-18 of its standard deviation
_PART = 1000 * GROUP  # numbers that a thread adds at a time
_KEY_BYTES, _STATE_WORDS = 32, 5  # of ChaCha20; of a saved stream


_forks = 0  # between the first process and this one; not its number, which another may have had


def _forked() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


@runtime_checkable
class Noise(Protocol):
    """A source of independent Gaussians.

    Attributes:
        kind: which one, for records.
        exact: whether sums must come as whole numbers of units, without any rounding of a sum.
    """

    kind: NoiseSource
    exact: bool

    def unit(self, std: float) -> float:
        """What releases with this noise are multiples of: a function of the standard deviation alone."""
        ...

    def add(self, sums: Float[Tensor, " size"] | Int64[Tensor, " size"], std: float) -> Float[Tensor, " size"]:
        """Noisy sums as float64 multiples of the unit.

        Args:
            sums: float64, or int64 in units; may be overwritten.
            std: standard deviation of the noise, in the units that float64 sums have.
        """
        ...

    def state(self) -> Tensor | None:
        """What a checkpoint must keep so that a resumed run goes on with the same stream; secret."""
        ...

    def load(self, state: Tensor | None) -> None:
        """Takes the stream up where `state` was taken."""
        ...


class CipherNoise:
    """Float64 noise from the stream cipher ChaCha20, the same on every device and on any number of threads."""

    exact = False

    def __init__(self, key: bytes, kind: NoiseSource) -> None:
        """Takes the stream's key, 32 bytes that nobody else may know."""
        if len(key) != _KEY_BYTES:
            raise ValueError(f"the key of noise must have {_KEY_BYTES} bytes, got {len(key)}")
        self.kind: NoiseSource = kind
        self._key, self._draws, self._drawing, self._process = key, 0, Lock(), _forks

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuses to be copied or pickled: both copies would add the same noise, which cancels between their releases.

        Raises:
            TypeError: always.
        """
        raise TypeError("noise must not be copied, because copies draw the same; keep its `state()`, or make another")

    def handed_over(self) -> CipherNoise:
        """The stream from here on, for somebody who may go back in it; this object goes on with another stream."""
        with self._drawing:
            taken = CipherNoise(self._key, self.kind)
            taken._draws, taken._process = self._draws, self._process
            # A seed must decide what comes next; else nothing in the checkpoint of a run tells the noise of another.
            fresh = os.urandom(_KEY_BYTES) if self.kind == "os" else hashlib.sha256(b"noise/next/" + self._key).digest()
            self._key, self._draws = fresh, 0
        return taken

    def unit(self, std: float) -> float:
        """A power of two."""
        return 2.0 ** (math.frexp(_checked(std))[1] - 1 - _FINE)

    def add(self, sums: Float[Tensor, " size"] | Int64[Tensor, " size"], std: float) -> Float[Tensor, " size"]:
        """Adds in place and rounds to the nearest unit; sums in float32 to float32 after that."""
        unit = self.unit(std)
        _refuse_tables(sums)
        if sums.dtype not in (torch.float64, torch.float32):
            raise ValueError(f"sums must be float64 or float32 for noise of kind '{self.kind}', got {sums.dtype}")
        if sums.is_cpu and sums.is_contiguous() and not sums.requires_grad:
            self._visit(sums, std, unit)
            return sums
        # Drawn on the CPU for every device, so that a seed gives one stream everywhere.
        draw = torch.zeros(len(sums), dtype=torch.float64)
        self._visit(draw, 1.0, None)
        noisy = sums.double() + draw.to(sums.device) * std
        return noisy.div(unit).round().mul(unit).to(sums.dtype)

    def _visit(self, values: Float[Tensor, " size"], std: float, unit: float | None) -> None:
        """Adds a draw to a vector, in parts that are the same on any number of threads, and rounds to a unit if any."""
        if self._process != _forks:
            raise ValueError(
                f"noise must be drawn by the process that made it, got its fork {os.getpid()}: parent and fork would "
                "draw the same numbers, which cancel between their releases; make noise after the fork"
            )
        # Two threads that draw at once must not have one number, nor one that draws the key of a stream to come.
        with self._drawing:
            stream = self._key, self._draws
            self._draws += 1
        size, address, each = values.numel(), values.data_ptr(), values.element_size()
        add = normals(rounded=unit is not None, wide=values.dtype == torch.float64)
        starts = range(0, size, _PART)

        def change(number: int) -> None:
            start = starts[number]
            add(*stream, start // GROUP, min(_PART, size - start), address + each * start, std, unit or 1.0)

        if starts:
            in_threads(change, len(starts), at_once=min(torch.get_num_threads(), len(starts)))

    def state(self) -> Tensor | None:
        """Key and number of draws."""
        with self._drawing:
            words = self._key + self._draws.to_bytes(8, "little")
        return torch.frombuffer(bytearray(words), dtype=torch.int64)

    def load(self, state: Tensor | None) -> None:
        """Takes key and number of draws."""
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
            self._process = _forks  # whoever loads a state says that this process goes on


class SecureNoise:
    """Exact discrete Gaussians from the operating system's generator; slower, and never the same twice."""

    kind: NoiseSource = "secure"
    exact = True

    def unit(self, std: float) -> float:
        """The standard deviation over 2^30, a division without rounding."""
        return _checked(std) / EXACT_SCALE

    def add(self, sums: Float[Tensor, " size"] | Int64[Tensor, " size"], std: float) -> Float[Tensor, " size"]:
        """Integer sums are added to exactly; float64 ones, for which nothing is claimed, are rounded to units first."""
        unit = self.unit(std)
        _refuse_tables(sums)
        # Clamped, because a float beyond 2^63 has no defined int64.
        whole = sums if sums.dtype == torch.int64 else (sums.double() / unit).clamp(-(2.0**60), 2.0**60).round().long()
        drawn = discrete_gaussian.draw(len(sums), EXACT_SCALE).to(sums.device)
        # Integers up to here; what float64 then rounds is rounded after the noise, so it is post-processing.
        return (whole + drawn).double() * unit

    def state(self) -> Tensor | None:
        """Nothing: the stream has no state."""
        return None

    def load(self, state: Tensor | None) -> None:
        """Nothing to load: a resumed run draws fresh noise, which is as private."""


def seeded(seed: int) -> Noise:
    """Reproducible noise for experiments; the seed is a secret of whoever makes a privacy claim with it.

    Args:
        seed: any number of bits; all of them count.

    Raises:
        ValueError: for a negative seed.
    """
    if seed < 0:
        raise ValueError(f"the seed of noise must be at least 0, got {seed}")
    # Hashed, so that neighbouring seeds have unrelated keys, and those of a sampler with the same seed as well.
    return CipherNoise(hashlib.sha256(f"noise/{seed}".encode()).digest(), "seeded")


def from_generator(generator: torch.Generator) -> Noise:
    """Reproducible noise whose key is drawn from a generator; a second call gives another stream."""
    words = torch.randint(0, 256, (_KEY_BYTES,), generator=generator, device=generator.device)
    return CipherNoise(bytes(words.tolist()), "seeded")


def from_os() -> Noise:
    """Noise under a key from the operating system, which a checkpoint keeps."""
    return CipherNoise(os.urandom(_KEY_BYTES), "os")


def secure() -> Noise:
    """Exact noise from the operating system's cryptographic generator."""
    return SecureNoise()


def of_one_run(noise: Noise) -> Noise:
    """Noise that nobody but one run draws: its checkpoint puts it back to where that was written.

    Were one stream for several runs, what another had drawn meanwhile would be drawn again, and cancel between the two.

    Args:
        noise: given to the run, and maybe to others; of a type that is none of ours it is taken as it is.
    """
    return noise.handed_over() if type(noise) is CipherNoise else noise


def _checked(std: float) -> float:
    if not SMALLEST_STD <= std <= LARGEST_STD:  # false for NaN
        raise ValueError(
            f"the noise's standard deviation must be between 2^-100 and 2^100, got {std}; "
            "it is the noise multiplier times the bound's norm over the root of the block's share"
        )
    return std


def _refuse_tables(sums: Tensor) -> None:
    if sums.dim() != 1:  # as many numbers are drawn as the first dimension has
        raise ValueError(f"sums must be vectors [size], got {tuple(sums.shape)}")
