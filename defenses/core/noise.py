"""Where the Gaussian noise comes from. Only the engine draws; nothing else ever sees a source.

Guarantee:
    Each draw is independent of the data and of every other draw. `secure` draws come from the operating
    system's cryptographic generator, each the mean of four Gaussians scaled back to unit variance, so that
    the float grid of a single draw cannot be read off the release (Holohan & Braghin, "Secure random sampling
    in differential privacy", ESORICS 2021). `os` and `seeded` use PyTorch's generator, keyed by the operating
    system or by a number: good for research, not proof against somebody who can reconstruct a generator's
    state from its outputs. A `seeded` key must be kept secret for the guarantee to mean anything.
"""

from __future__ import annotations

import math
import os
import secrets
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

Kind = Literal["seeded", "os", "secure"]


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
        """One contiguous draw; float64 releases get float64 noise."""
        draw = torch.randn(size, generator=self._generator, dtype=like.dtype, device=self._generator.device)
        return draw.to(like.device)

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
    return GeneratorNoise(torch.Generator().manual_seed(seed), "seeded")


def from_os() -> Noise:
    """Noise keyed by 63 bits from the operating system."""
    return GeneratorNoise(torch.Generator().manual_seed(secrets.randbits(63)), "os")


def secure() -> Noise:
    """Noise drawn from the operating system's cryptographic generator."""
    return SecureNoise()
