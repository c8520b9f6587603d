"""Codecs composed of other codecs: on a span, on a mask, several side by side in a block, a rescaled subspace.

Guarantee:
    The same as for the composed codecs: each row is processed separately, and no row is kept.
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


def nested_codecs(codec: object) -> Iterator[object]:
    """Yields a codec and, recursively, the codecs that it is composed of."""
    yield codec
    match codec:
        case ConcatenatedCodec():
            inner: tuple[object, ...] = codec.codecs
        case SpanCodec():
            inner = (codec.codec,)
        case Masked():
            inner = (codec.kept, codec.codec)
        case Complement() | Stretched():
            inner = (codec.subspace,)
        case _:
            inner = ()
    for part in inner:
        yield from nested_codecs(part)


@dataclass(frozen=True, eq=False)
class SpanCodec:
    """A codec applied to a span of coordinates, such as a layer; other coordinates are not released.

    Attributes:
        start: first coordinate of the span.
        codec: codec of rows restricted to the span.
        dim: length of a whole row.
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
        """Gain of the span's codec."""
        return gain_of(self.codec)

    def encode(self, rows: Float[Tensor, "rows dim"]) -> Float[Tensor, "rows size"]:
        """Encodes the span."""
        return self.codec.encode(rows[:, self.start : self.stop])

    def least(self, rows: Float[Tensor, "rows dim"]) -> Float[Tensor, " rows"] | None:
        """Least norm of the span's codec."""
        return least_of(self.codec, rows[:, self.start : self.stop])

    def decode(self, values: Float[Tensor, " size"]) -> Float[Tensor, " dim"]:
        """Decodes the span; zero elsewhere."""
        whole = values.new_zeros(self.dim)
        whole[self.start : self.stop] = self.codec.decode(values)
        return whole

    def signal(self, values: Float[Tensor, "... size"]) -> Float[Tensor, "... size"]:
        """Projects the values on the range of the span's codec."""
        return self.codec.signal(values)


@dataclass(frozen=True, eq=False)
class Masked:
    """A codec applied to the coordinates kept by a mask; the others are dropped before it and not released.

    Attributes:
        kept: the mask.
        codec: codec of rows restricted to the kept coordinates, in ascending order.
    """

    kept: Coordinates
    codec: Codec

    def __post_init__(self) -> None:
        if self.codec.dim != self.kept.size:
            raise ValueError(f"codec must be of the {self.kept.size} kept coordinates, got one of {self.codec.dim}")

    @property
    def dim(self) -> int:
        """Length of a whole row."""
        return self.kept.dim

    @property
    def size(self) -> int:
        """Number of released values."""
        return self.codec.size

    @property
    def gain(self) -> float:
        """Gain of the inner codec."""
        return gain_of(self.codec)

    def encode(self, rows: Float[Tensor, "rows dim"]) -> Float[Tensor, "rows size"]:
        """Encodes the kept coordinates."""
        return self.codec.encode(self.kept.encode(rows))

    def least(self, rows: Float[Tensor, "rows dim"]) -> Float[Tensor, " rows"] | None:
        """Least norm of the inner codec on the kept coordinates."""
        return least_of(self.codec, self.kept.encode(rows))

    def decode(self, values: Float[Tensor, " size"]) -> Float[Tensor, " dim"]:
        """Decodes the kept coordinates; zero elsewhere."""
        return self.kept.decode(self.codec.decode(values))

    def signal(self, values: Float[Tensor, "... size"]) -> Float[Tensor, "... size"]:
        """Projects the values on the range of the inner codec."""
        return self.codec.signal(values)


def spread(subspace: Subspace, kept: Coordinates) -> Subspace:
    """Extends directions of kept coordinates to whole rows, with zeros at dropped coordinates.

    Args:
        subspace: subspace of the kept coordinates.
        kept: their positions in a row.
    """
    bases, spans, places = [], [], kept.kept
    for basis, (start, stop) in zip(subspace.bases, subspace.spans, strict=True):
        own = places[start:stop].to(basis.device)
        first, last = (int(own[0]), int(own[-1]) + 1) if len(own) else (0, 0)
        # Directions are stored as the transpose of a contiguous matrix.
        wide = basis.new_zeros(basis.shape[1], last - first)
        bases.append(wide.index_copy_(1, own - first, basis.T).T)
        spans.append((first, last))
    return ImplicitSubspace(bases, tuple(spans), kept.dim)


@dataclass(frozen=True, eq=False)
class ConcatenatedCodec:
    """Several codecs side by side, each with its own factor, under a single bound.

    Attributes:
        codecs: codecs of rows of the same length.
        factors: positive multipliers of each codec's values, applied before the bound.
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
        """Length of a row."""
        return self.codecs[0].dim

    @property
    def size(self) -> int:
        """Number of released values of all codecs."""
        return sum(codec.size for codec in self.codecs)

    @property
    def gain(self) -> float:
        """Bound on the gain: the root of the sum of squares of the scaled gains."""
        return math.hypot(*(factor * gain_of(codec) for codec, factor in zip(self.codecs, self.factors, strict=True)))

    def encode(self, rows: Float[Tensor, "rows dim"]) -> Float[Tensor, "rows size"]:
        """Concatenates the scaled values of all codecs."""
        parts = [codec.encode(rows) * factor for codec, factor in zip(self.codecs, self.factors, strict=True)]
        return torch.cat(parts, dim=1)

    def least(self, rows: Float[Tensor, "rows dim"]) -> Float[Tensor, " rows"] | None:
        """Norm of the scaled least norms of the codecs that subtract; None if no codec does."""
        norms_and_factors = [
            (least_of(codec, rows), factor) for codec, factor in zip(self.codecs, self.factors, strict=True)
        ]
        known = [norms * factor for norms, factor in norms_and_factors if norms is not None]
        return torch.linalg.vector_norm(torch.stack(known), dim=0) if known else None

    def decode(self, values: Float[Tensor, " size"]) -> Float[Tensor, " dim"]:
        """Sums the decoded values of all codecs."""
        parts = zip(self.codecs, self._split(values), self.factors, strict=True)
        return torch.stack([codec.decode(part / factor) for codec, part, factor in parts]).sum(dim=0)

    def signal(self, values: Float[Tensor, "... size"]) -> Float[Tensor, "... size"]:
        """Projects each codec's values on its range."""
        parts = zip(self.codecs, self._split(values), strict=True)
        return torch.cat([codec.signal(part) for codec, part in parts], dim=-1)

    def _split(self, values: Tensor) -> tuple[Tensor, ...]:
        return values.split([codec.size for codec in self.codecs], dim=-1)


@dataclass(frozen=True, eq=False)
class Stretched:
    """Multiplies the component along each direction of a subspace by its factor, and the orthogonal rest by another.

    Values stay in the rows' own coordinates, because bound and noise are isotropic and do not depend on the choice of
    an orthonormal basis. With all factors 1 the codec is the identity.

    Attributes:
        subspace: the directions.
        factors: positive finite factors of the directions.
        rest: positive finite factor of the component orthogonal to them.
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
        """Length of a row."""
        return self.subspace.dim

    @property
    def size(self) -> int:
        """Number of released values, `dim`."""
        return self.subspace.dim

    @property
    def gain(self) -> float:
        """The largest factor."""
        return max(self.rest, float(self.factors.max()) if self.factors.numel() else 0.0)

    def encode(self, rows: Float[Tensor, "rows dim"]) -> Float[Tensor, "rows dim"]:
        """Scales the rows."""
        return self._stretched(rows, self.factors, self.rest)

    def least(self, rows: Float[Tensor, "rows dim"]) -> Float[Tensor, " rows"]:
        """Returns a fraction of the largest possible norm: a far shorter result comes from a subtraction."""
        return LEAST_SHARE * self.gain * row_norms(rows)

    def decode(self, values: Float[Tensor, " dim"]) -> Float[Tensor, " dim"]:
        """Scales the values back."""
        return self._stretched(values.unsqueeze(0), 1 / self.factors, 1 / self.rest).squeeze(0)

    def signal(self, values: Float[Tensor, "... dim"]) -> Float[Tensor, "... dim"]:
        """Returns the values unchanged: `encode` reaches all of them."""
        return values

    def _stretched(self, rows: Tensor, factors: Tensor, rest: float) -> Tensor:
        # rest * g + V (factors - rest) V^T g: rounding of the directions enters only through the change of a row.
        return rest * rows + self.subspace.project(rows, factors - rest)
