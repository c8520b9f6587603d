"""Where the Gaussian noise comes from. Only the engine draws; nothing else ever sees a source.

Guarantee:
    Each draw is independent of the data and of every other draw. `secure` draws come from the operating
    system's cryptographic generator, each the mean of four Gaussians scaled back to unit variance, so that
    the float grid of a single draw cannot be read off the release (Holohan & Braghin, "Secure random sampling
    in differential privacy", ESORICS 2021). `os` and `seeded` use PyTorch's generator, its whole state filled by
    the operating system or from a number: good for research, not proof against somebody who can reconstruct a
    generator's state from its outputs. A `seeded` number must be kept secret for the guarantee to mean anything,
    and be a large one, because all below 2^32 can be tried.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from .keys import filled, fills_states, keyed

Kind = Literal["seeded", "os", "secure"]
# Longer draws come from a generator for each so many numbers, which several threads then draw from.
_LENGTH = 2**20
# At a time, in each thread: what PyTorch does not cut up for threads of its own.
_PIECE = 2**15
_KEY_BYTES = 64


@runtime_checkable
class Noise(Protocol):
    """A source of independent standard Gaussians."""

    kind: Kind

    def normal(self, size: int, like: Tensor) -> Float[Tensor, " size"]:
        """`size` draws on the device and in the dtype of `like`."""
        ...

    def state(self) -> Tensor | None:
        """What a checkpoint must keep so that a resumed run goes on with the same stream; secret."""
        ...

    def load(self, state: Tensor | None) -> None:
        """Takes the stream up where `state` was taken."""
        ...


class GeneratorNoise:
    """PyTorch's generator on the CPU, so that a run draws the same noise on every device."""

    def __init__(self, generator: torch.Generator, kind: Kind) -> None:
        """Wraps a generator that nobody else may use."""
        self.kind: Kind = kind
        self._generator = generator

    def normal(self, size: int, like: Tensor) -> Float[Tensor, " size"]:
        """One contiguous draw, whatever the number of threads; float64 releases get float64 noise."""
        draw = torch.empty(size, dtype=like.dtype, device=self._generator.device)
        self._visit(draw, lambda part, generator: part.normal_(generator=generator))
        return draw.to(like.device)

    def add(self, values: Float[Tensor, " size"], std: float) -> Float[Tensor, " size"]:
        """Adds std times what `normal` would have drawn, in place; on the CPU without a draw as long as the values."""
        on_cpu = values.device.type == self._generator.device.type == "cpu"
        if len(values) <= _LENGTH or values.requires_grad or not on_cpu:
            return values.add_(self.normal(len(values), values), alpha=std)

        def add(part: Tensor, generator: torch.Generator) -> None:
            part.add_(torch.empty_like(part).normal_(generator=generator), alpha=std)

        self._visit(values, add)
        return values

    def _visit(self, values: Tensor, do: Callable[[Tensor, torch.Generator], object]) -> None:
        """Does something to all pieces of a vector, in parts with a generator of their own where it is long."""
        if len(values) <= _LENGTH or self._generator.device.type != "cpu" or not fills_states():
            do(values, self._generator)
            return
        parts = values.split(_LENGTH)
        drawn = torch.empty(len(parts), _KEY_BYTES, dtype=torch.uint8, device="cpu").random_(generator=self._generator)
        keys = [key.numpy().tobytes() for key in drawn]
        mode = torch.is_inference_mode_enabled()  # a mode of this thread alone

        def visit(part: Tensor, key: bytes) -> None:
            generator = filled(key)
            with torch.inference_mode(mode):
                for piece in part.split(_PIECE):
                    do(piece, generator)

        with ThreadPoolExecutor(min(torch.get_num_threads(), len(parts))) as pool:
            list(pool.map(visit, parts, keys))  # a list, so that what a thread raises is raised here

    def state(self) -> Tensor | None:
        """The generator's state."""
        return self._generator.get_state()

    def load(self, state: Tensor | None) -> None:
        """Sets the generator's state."""
        if state is not None:
            self._generator.set_state(state)


class SecureNoise:
    """The operating system's cryptographic generator; slower, and never the same twice."""

    kind: Kind = "secure"

    def normal(self, size: int, like: Tensor) -> Float[Tensor, " size"]:
        """Half the sum of four independent draws by inversion, in float64 before the cast."""
        bits = torch.frombuffer(bytearray(os.urandom(8 * 4 * max(size, 1))), dtype=torch.int64)
        # The upper 52 bits, centred in their cells: uniform on (0, 1) without the end points.
        uniform = ((bits >> 12).double() + (2.0**51 + 0.5)) / 2.0**52
        draws = torch.special.ndtri(uniform).view(4, max(size, 1))[:, :size]
        return (draws.sum(dim=0) / math.sqrt(4)).to(like)

    def state(self) -> Tensor | None:
        """Nothing: the stream has no state."""
        return None

    def load(self, state: Tensor | None) -> None:
        """Nothing to load: a resumed run draws fresh noise, which is as private."""


def seeded(seed: int) -> Noise:
    """Reproducible noise for experiments; the seed is a secret of whoever makes a privacy claim with it."""
    return GeneratorNoise(keyed(seed), "seeded")


def from_os() -> Noise:
    """Noise from a generator whose state follows from 512 bits of the operating system, not from a seed of 32."""
    return GeneratorNoise(filled(os.urandom(_KEY_BYTES)), "os") if fills_states() else secure()


def secure() -> Noise:
    """Noise drawn from the operating system's cryptographic generator."""
    return SecureNoise()
