"""Codecs made of codecs: one of a span or of a mask, several side by side in one block, a subspace stretched.

Guarantee:
    As of the codecs that they are made of: rows by themselves, nothing remembered.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from .bound import row_norms
from .codec import Codec, Complement, Coordinates, Subspace
from .implicit_subspace import ImplicitSubspace
from .rounding import LEAST_SHARE, gain_of, least_of


def made_of(codec: object) -> Iterator[object]:
    """A codec, and those that it is made of."""
    yield codec
    match codec:
        case Stacked():
            inner: tuple[object, ...] = codec.codecs
        case Within():
            inner = (codec.codec,)
        case Masked():
            inner = (codec.kept, codec.codec)
        case Complement() | Stretched():
            inner = (codec.subspace,)
        case _:
            inner = ()
    for one in inner:
        yield from made_of(one)


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

    @property
    def gain(self) -> float:
        """That of the span's codec."""
        return gain_of(self.codec)

    def encode(self, rows: Float[Tensor, "rows dim"]) -> Float[Tensor, "rows size"]:
        """The span, encoded."""
        return self.codec.encode(rows[:, self.start : self.stop])

    def least(self, rows: Float[Tensor, "rows dim"]) -> Float[Tensor, " rows"] | None:
        """That of the span."""
        return least_of(self.codec, rows[:, self.start : self.stop])

    def decode(self, values: Float[Tensor, " size"]) -> Float[Tensor, " dim"]:
        """The span, decoded; zero elsewhere."""
        whole = values.new_zeros(self.dim)
        whole[self.start : self.stop] = self.codec.decode(values)
        return whole

    def signal(self, values: Float[Tensor, "... size"]) -> Float[Tensor, "... size"]:
        """What rows reach of the span."""
        return self.codec.signal(values)


@dataclass(frozen=True, eq=False)
class Masked:
    """A codec of the coordinates that a mask keeps; the others are dropped first, get no noise and are not released.

    Attributes:
        kept: the mask.
        codec: takes the kept coordinates, in their order, as its rows.
    """

    kept: Coordinates
    codec: Codec

    def __post_init__(self) -> None:
        if self.codec.dim != self.kept.size:
            raise ValueError(f"codec must be of the {self.kept.size} kept coordinates, got one of {self.codec.dim}")

    @property
    def dim(self) -> int:
        """Length of the rows, of which some coordinates are dropped."""
        return self.kept.dim

    @property
    def size(self) -> int:
        """Number of released values."""
        return self.codec.size

    @property
    def gain(self) -> float:
        """That of the codec."""
        return gain_of(self.codec)

    def encode(self, rows: Float[Tensor, "rows dim"]) -> Float[Tensor, "rows size"]:
        """The kept coordinates, encoded."""
        return self.codec.encode(self.kept.encode(rows))

    def least(self, rows: Float[Tensor, "rows dim"]) -> Float[Tensor, " rows"] | None:
        """That of the kept coordinates."""
        return least_of(self.codec, self.kept.encode(rows))

    def decode(self, values: Float[Tensor, " size"]) -> Float[Tensor, " dim"]:
        """The kept coordinates, decoded; zero elsewhere."""
        return self.kept.decode(self.codec.decode(values))

    def signal(self, values: Float[Tensor, "... size"]) -> Float[Tensor, "... size"]:
        """What the kept coordinates reach."""
        return self.codec.signal(values)


def spread(subspace: Subspace, kept: Coordinates) -> Subspace:
    """Directions of kept coordinates as directions of whole rows, which are zero where the mask drops.

    Args:
        subspace: of the kept coordinates.
        kept: their places in a row.
    """
    bases, spans, places = [], [], kept.kept
    for basis, (start, stop) in zip(subspace.bases, subspace.spans, strict=True):
        own = places[start:stop].to(basis.device)
        first, last = (int(own[0]), int(own[-1]) + 1) if len(own) else (0, 0)
        # As directions lie in memory: the transpose of a contiguous matrix.
        wide = basis.new_zeros(basis.shape[1], last - first)
        bases.append(wide.index_copy_(1, own - first, basis.T).T)
        spans.append((first, last))
    return ImplicitSubspace(bases, tuple(spans), kept.dim)


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

    @property
    def gain(self) -> float:
        """Those of all codecs together."""
        return math.hypot(*(factor * gain_of(codec) for codec, factor in zip(self.codecs, self.factors, strict=True)))

    def encode(self, rows: Float[Tensor, "rows dim"]) -> Float[Tensor, "rows size"]:
        """The values of all codecs, one after another."""
        parts = [codec.encode(rows) * factor for codec, factor in zip(self.codecs, self.factors, strict=True)]
        return torch.cat(parts, dim=1)

    def least(self, rows: Float[Tensor, "rows dim"]) -> Float[Tensor, " rows"] | None:
        """Those of all codecs that have one, together."""
        found = [(least_of(codec, rows), factor) for codec, factor in zip(self.codecs, self.factors, strict=True)]
        known = [norms * factor for norms, factor in found if norms is not None]
        return torch.linalg.vector_norm(torch.stack(known), dim=0) if known else None

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


@dataclass(frozen=True, eq=False)
class Stretched:
    """Every direction of a subspace times a factor of its own, and what is left of a row times another one.

    Written in the rows' coordinates, and not in those of the directions: a bound and noise that look the same in all
    directions make no difference between the two, and with all factors 1 it is the identity.

    Attributes:
        subspace: the directions.
        factors: one for each of them, positive and finite.
        rest: of what is orthogonal to them, likewise.
    """

    subspace: Subspace
    factors: Float[Tensor, " k"]
    rest: float

    def __post_init__(self) -> None:
        if self.factors.shape != (self.subspace.size,):
            raise ValueError(
                f"factors must be one for each of {self.subspace.size} directions, got {tuple(self.factors.shape)}"
            )
        if not (bool((self.factors > 0).all()) and bool(torch.isfinite(self.factors).all())):
            raise ValueError("factors must be positive finite numbers, got others")
        if not 0 < self.rest < float("inf"):
            raise ValueError(f"rest must be a positive finite number, got {self.rest}")

    @property
    def dim(self) -> int:
        """Length of the rows."""
        return self.subspace.dim

    @property
    def size(self) -> int:
        """As many values as coordinates."""
        return self.subspace.dim

    @property
    def gain(self) -> float:
        """The largest factor."""
        return max(self.rest, float(self.factors.max()) if self.factors.numel() else 0.0)

    def encode(self, rows: Float[Tensor, "rows dim"]) -> Float[Tensor, "rows dim"]:
        """The rows, stretched."""
        return self._stretched(rows, self.factors, self.rest)

    def least(self, rows: Float[Tensor, "rows dim"]) -> Float[Tensor, " rows"]:
        """A share of the rows at their longest: a row that is made far shorter is what a subtraction leaves."""
        return LEAST_SHARE * self.gain * row_norms(rows)

    def decode(self, values: Float[Tensor, " dim"]) -> Float[Tensor, " dim"]:
        """The values, stretched back."""
        return self._stretched(values.unsqueeze(0), 1 / self.factors, 1 / self.rest).squeeze(0)

    def signal(self, values: Float[Tensor, "... dim"]) -> Float[Tensor, "... dim"]:
        """Rows reach every value."""
        return values

    def _stretched(self, rows: Tensor, factors: Tensor, rest: float) -> Tensor:
        # The change alone goes through the directions, whose rounding a row then has the less of.
        return rest * rows + self.subspace.project(rows, factors - rest)
