"""Codecs made of codecs: one within a span of coordinates, and several side by side in one block.

Guarantee:
    As of the codecs that they are made of: rows by themselves, nothing remembered.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from .codec import Codec


@dataclass(frozen=True, eq=False)
class Within:
    """A codec of a span of coordinates, as of one layer; other coordinates are not released.

    Attributes:
        start: first coordinate of the span.
        codec: takes the span as its rows.
        dim: length of the whole rows.
    """

    start: int
    codec: Codec
    dim: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop <= self.dim:
            raise ValueError(f"the span must lie in [0, {self.dim}), got {self.start} to {self.stop}")

    @property
    def stop(self) -> int:
        """One past the last coordinate of the span."""
        return self.start + self.codec.dim

    @property
    def size(self) -> int:
        """Number of released values."""
        return self.codec.size

    def encode(self, rows: Float[Tensor, "rows dim"]) -> Float[Tensor, "rows size"]:
        """The span, encoded."""
        return self.codec.encode(rows[:, self.start : self.stop])

    def decode(self, values: Float[Tensor, " size"]) -> Float[Tensor, " dim"]:
        """The span, decoded; zero elsewhere."""
        whole = values.new_zeros(self.dim)
        whole[self.start : self.stop] = self.codec.decode(values)
        return whole

    def signal(self, values: Float[Tensor, "... size"]) -> Float[Tensor, "... size"]:
        """What rows reach of the span."""
        return self.codec.signal(values)


@dataclass(frozen=True, eq=False)
class Stacked:
    """Several codecs side by side, each in units of its own: one bound for all that they release together.

    Attributes:
        codecs: of rows of one length.
        factors: what each codec's values are multiplied by before they are bounded; positive.
    """

    codecs: tuple[Codec, ...]
    factors: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.codecs) != len(self.factors) or len({codec.dim for codec in self.codecs}) != 1:
            raise ValueError(f"codecs must be of one length and have a factor each, got {len(self.factors)} factors")
        if not all(0 < factor < float("inf") for factor in self.factors):
            raise ValueError(f"factors must be positive finite numbers, got {self.factors}")

    @property
    def dim(self) -> int:
        """Length of the rows."""
        return self.codecs[0].dim

    @property
    def size(self) -> int:
        """Number of released values of all of them."""
        return sum(codec.size for codec in self.codecs)

    def encode(self, rows: Float[Tensor, "rows dim"]) -> Float[Tensor, "rows size"]:
        """The values of all codecs, one after another."""
        parts = [codec.encode(rows) * factor for codec, factor in zip(self.codecs, self.factors, strict=True)]
        return torch.cat(parts, dim=1)

    def decode(self, values: Float[Tensor, " size"]) -> Float[Tensor, " dim"]:
        """The sum of what each codec makes of its values."""
        parts = zip(self.codecs, self._split(values), self.factors, strict=True)
        return torch.stack([codec.decode(part / factor) for codec, part, factor in parts]).sum(dim=0)

    def signal(self, values: Float[Tensor, "... size"]) -> Float[Tensor, "... size"]:
        """What rows reach of each codec's values."""
        parts = zip(self.codecs, self._split(values), strict=True)
        return torch.cat([codec.signal(part) for codec, part in parts], dim=-1)

    def _split(self, values: Tensor) -> tuple[Tensor, ...]:
        return values.split([codec.size for codec in self.codecs], dim=-1)
