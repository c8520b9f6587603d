"""Codecs: linear maps to the space that a block is released in (all or some coordinates, a subspace, its complement).

A codec is a linear map fixed before the batch is drawn. `encode` takes rows into the released space, before
they are bounded; `decode` takes the noisy sum back to the parameters. What the bound sees after `encode` decides the
sensitivity, whatever the map is; a codec of ours that is not orthonormal would only decode wrongly, and is refused.
Those that subtract say below which norm their values may be rounding (`rounding.py`).

Guarantee:
    The codecs of this file treat each row by itself, and remember nothing of it. Of another codec this is assumed, not
    checked: one that looks at the number of rows, or keeps them for `decode`, spoils the guarantee. A claim names such
    a codec (`verified.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .bound import row_norms
from .linear_algebra.basis import gram, orthonormality_error
from .linear_algebra.products import inner_products
from .rounding import LEAST_SHARE


@runtime_checkable
class Codec(Protocol):
    """A linear map from rows in R^dim to a released space in R^size, and back."""

    @property
    def dim(self) -> int:
        """Length of the rows it takes."""
        ...

    @property
    def size(self) -> int:
        """Number of released values."""
        ...

    def encode(self, rows: Float[Tensor, "rows dim"]) -> Float[Tensor, "rows size"]:
        """Rows in the released space; differentiable."""
        ...

    def decode(self, values: Float[Tensor, " size"]) -> Float[Tensor, " dim"]:
        """The released vector in the rows' space: post-processing, free."""
        ...

    def signal(self, values: Float[Tensor, "... size"]) -> Float[Tensor, "... size"]:
        """The part of released values that rows can reach; the rest is noise whatever the data are."""
        ...


@dataclass(frozen=True)
class Everything:
    """The identity: all `dim` coordinates are released."""

    dim: int

    @property
    def size(self) -> int:
        """All of them."""
        return self.dim

    def encode(self, rows: Float[Tensor, "rows dim"]) -> Float[Tensor, "rows dim"]:
        """The rows themselves."""
        return rows

    def decode(self, values: Float[Tensor, " dim"]) -> Float[Tensor, " dim"]:
        """The values themselves."""
        return values

    def signal(self, values: Float[Tensor, "... dim"]) -> Float[Tensor, "... dim"]:
        """Rows reach every value."""
        return values


@dataclass(frozen=True, eq=False)
class Coordinates:
    """A mask: only the named coordinates are released, the others are exactly zero after decoding.

    Attributes:
        kept: distinct coordinate numbers in [0, dim); stored sorted.
        dim: length of the rows.
    """

    kept: Int[Tensor, " size"] = field(repr=False)
    dim: int = field(kw_only=True)

    def __post_init__(self) -> None:
        if self.kept.dtype != torch.int64:
            raise ValueError(
                f"kept must be coordinates, int64, got {self.kept.dtype}; those of a mask are Coordinates.of(mask)"
            )
        if self.kept.numel():
            low, high = (int(edge) for edge in torch.aminmax(self.kept))
            if low < 0 or high >= self.dim:
                raise ValueError(f"kept must lie in [0, {self.dim}), got {low} to {high}")
        kept = _in_order(self.kept, self.dim)
        if kept.numel() < self.kept.numel():
            raise ValueError("kept must not repeat a coordinate, got duplicates")
        object.__setattr__(self, "kept", kept)

    @classmethod
    def of(cls, mask: Bool[Tensor, " dim"]) -> Coordinates:
        """Those that a mask keeps."""
        found = object.__new__(cls)
        # Distinct, in order and within the mask as they are found.
        for name, value in (("kept", marked(mask)), ("dim", mask.numel())):
            object.__setattr__(found, name, value)
        return found

    @property
    def size(self) -> int:
        """Number of kept coordinates."""
        return self.kept.numel()

    def encode(self, rows: Float[Tensor, "rows dim"]) -> Float[Tensor, "rows size"]:
        """The kept columns."""
        return rows.index_select(1, self.kept.to(rows.device))

    def decode(self, values: Float[Tensor, " size"]) -> Float[Tensor, " dim"]:
        """The values at their places, zero elsewhere."""
        return values.new_zeros(self.dim).scatter(0, self.kept.to(values.device), values)

    def project(self, rows: Float[Tensor, "rows dim"]) -> Float[Tensor, "rows dim"]:
        """The rows with all other coordinates zero."""
        kept = self.kept.to(rows.device)
        return torch.zeros_like(rows).index_copy(1, kept, rows.index_select(1, kept))

    def signal(self, values: Float[Tensor, "... size"]) -> Float[Tensor, "... size"]:
        """Rows reach every kept coordinate."""
        return values


def _in_order(kept: Int[Tensor, " size"], dim: int) -> Int[Tensor, " distinct"]:
    """The coordinates in ascending order, in which columns are read, each once."""
    if kept.dim() == 1 and bool((kept[1:] > kept[:-1]).all()):
        # As a mask names them; a copy, because the caller may write into its own.
        return kept.clone()
    if 64 * kept.numel() < dim:
        return kept.unique()
    # By a mask, which takes a sixth of the time of sorting.
    return marked(torch.zeros(dim, dtype=torch.bool, device=kept.device).index_fill_(0, kept, True))


def marked(mask: Bool[Tensor, " dim"]) -> Int[Tensor, " size"]:
    """Where a mask is true, in ascending order."""
    if mask.device.type != "cpu":
        return mask.nonzero().flatten()
    # NumPy's takes no branch for each entry: of a random mask a quarter of the time.
    return torch.from_numpy(np.flatnonzero(mask.numpy()))


@dataclass(frozen=True, eq=False)
class Scaled:
    """Every coordinate times a factor of its own.

    Attributes:
        factors: [dim], finite; what has the factor 0 is noise alone, and decodes to 0.
    """

    factors: Float[Tensor, " dim"] = field(repr=False)

    def __post_init__(self) -> None:
        if not bool(torch.isfinite(self.factors).all()):
            raise ValueError("factors must be finite, got a NaN or an infinity")

    @property
    def dim(self) -> int:
        """Length of the rows."""
        return self.factors.numel()

    @property
    def size(self) -> int:
        """As many values as coordinates."""
        return self.factors.numel()

    @property
    def gain(self) -> float:
        """The largest factor."""
        return float(self.factors.abs().max()) if self.factors.numel() else 1.0

    def encode(self, rows: Float[Tensor, "rows dim"]) -> Float[Tensor, "rows dim"]:
        """The rows, scaled."""
        return rows * self.factors.to(rows)

    def decode(self, values: Float[Tensor, " dim"]) -> Float[Tensor, " dim"]:
        """The values, scaled back."""
        factors = self.factors.to(values)
        return torch.where(factors == 0, 0.0, values / torch.where(factors == 0, 1.0, factors))

    def signal(self, values: Float[Tensor, "... dim"]) -> Float[Tensor, "... dim"]:
        """Rows reach every value whose factor is not 0."""
        return torch.where(self.factors.to(values) == 0, 0.0, values)


@dataclass(frozen=True, eq=False)
class Subspace:
    """Coefficients along orthonormal directions; each basis lives on its own span of coordinates.

    One basis over (0, dim) is a global subspace, one basis a layer a layer-wise one: spans do not overlap, so
    the whole is an orthonormal basis of R^dim's subspace, stored in blocks.

    Attributes:
        bases: matrices [stop - start, k], orthonormal columns.
        spans: (start, stop) of each basis, increasing and disjoint.
        dim: length of the rows.
    """

    bases: tuple[Float[Tensor, "_ _"], ...] = field(repr=False)
    spans: tuple[tuple[int, int], ...]
    dim: int

    def __post_init__(self) -> None:
        # Sorted edges say it all: spans are inside, increasing and disjoint; they may touch.
        edges = [0, *(edge for span in self.spans for edge in span), self.dim]
        if len(self.bases) != len(self.spans) or edges != sorted(edges):
            raise ValueError(f"spans must be disjoint, increasing and inside [0, {self.dim}), got {self.spans}")
        for basis, (start, stop) in zip(self.bases, self.spans, strict=True):
            if basis.shape[0] != stop - start:
                raise ValueError(f"basis must have {stop - start} rows for its span, got {basis.shape[0]}")
            if basis.dtype not in (torch.float32, torch.float64):
                raise ValueError(f"basis must be float32 or float64, got {basis.dtype}: take basis.float()")
            error = orthonormality_error(basis)
            if not error < 1e-4:  # NaN is refused too
                raise ValueError(
                    f"basis must have orthonormal columns, got an error of {error:.1e}; use torch.linalg.qr"
                )

    @classmethod
    def of(cls, basis: Float[Tensor, "dim k"]) -> Subspace:
        """A global subspace from one matrix with orthonormal columns."""
        return cls((basis,), ((0, basis.shape[0]),), basis.shape[0])

    @property
    def size(self) -> int:
        """Number of coefficients."""
        return sum(self.ranks)

    @property
    def ranks(self) -> list[int]:
        """Number of directions of each span."""
        return [basis.shape[1] for basis in self.bases]

    def moments(self) -> tuple[Float[Tensor, "_ _"], ...]:
        """Inner products of each basis's directions, float64: the identity up to what `bases` may be off."""
        return tuple(gram(basis.T, basis.dtype) for basis in self.bases)

    def encode(self, rows: Float[Tensor, "rows dim"]) -> Float[Tensor, "rows size"]:
        """Inner products with the directions."""
        parts = [inner_products(rows[:, a:b], v.to(rows)) for v, (a, b) in zip(self.bases, self.spans, strict=True)]
        return torch.cat(parts, dim=1) if parts else rows.new_zeros(rows.shape[0], 0)

    def least(self, rows: Float[Tensor, "rows dim"]) -> Float[Tensor, " rows"]:
        """A share of the whole rows: coefficients of one at a right angle to the directions are rounding."""
        return LEAST_SHARE * row_norms(rows)

    def decode(self, values: Float[Tensor, " size"]) -> Float[Tensor, " dim"]:
        """The combination of directions that has these coefficients."""
        decoded = values.new_zeros(self.dim)
        coefficients = values.split(self.ranks)
        for basis, (start, stop), c in zip(self.bases, self.spans, coefficients, strict=True):
            decoded[start:stop] = basis.to(values) @ c
        return decoded

    def project(
        self, rows: Float[Tensor, "rows dim"], weights: Float[Tensor, " size"] | None = None
    ) -> Float[Tensor, "rows dim"]:
        """The part of each row inside the subspace.

        Args:
            rows: to be projected.
            weights: what the part along each direction is multiplied by; 1 where None.
        """
        if self.spans == ((0, self.dim),):  # no zeros to fill in
            return self._along(rows, self.bases[0].to(rows), weights)
        inside = torch.zeros_like(rows)
        first = 0
        for basis, (start, stop) in zip(self.bases, self.spans, strict=True):
            own = None if weights is None else weights[first : first + basis.shape[1]]
            inside[:, start:stop] = self._along(rows[:, start:stop], basis.to(rows), own)
            first += basis.shape[1]
        return inside

    def _along(
        self, rows: Float[Tensor, "rows span"], v: Float[Tensor, "span k"], weights: Float[Tensor, " k"] | None
    ) -> Float[Tensor, "rows span"]:
        coefficients = inner_products(rows, v)
        return (coefficients if weights is None else coefficients * weights.to(rows)) @ v.T

    def signal(self, values: Float[Tensor, "... size"]) -> Float[Tensor, "... size"]:
        """Rows reach every coefficient."""
        return values


@dataclass(frozen=True, eq=False)
class Complement:
    """The orthogonal complement of a subspace: rows minus their projection, released in all `dim` coordinates.

    Decoding projects once more, which removes the noise along the subspace: post-processing, free.

    Attributes:
        subspace: what is left out: directions, or coordinates, which are then released as noise alone.
        project_noise: False decodes without that projection, as some papers print it: more noise, same
            privacy.
    """

    subspace: Subspace | Coordinates
    project_noise: bool = True

    @property
    def dim(self) -> int:
        """Length of the rows."""
        return self.subspace.dim

    @property
    def size(self) -> int:
        """As many values as coordinates: the release has the rows' shape."""
        return self.subspace.dim

    def encode(self, rows: Float[Tensor, "rows dim"]) -> Float[Tensor, "rows dim"]:
        """Rows without their part inside the subspace."""
        return rows - self.subspace.project(rows)

    def least(self, rows: Float[Tensor, "rows dim"]) -> Float[Tensor, " rows"] | None:
        """A share of the whole rows: what is left of one inside a span is rounding; coordinates leave zeros."""
        return None if isinstance(self.subspace, Coordinates) else self.subspace.least(rows)

    def decode(self, values: Float[Tensor, " dim"]) -> Float[Tensor, " dim"]:
        """Values without the noise inside the subspace, where no row reaches; with it if `project_noise` is off."""
        return self.signal(values) if self.project_noise else values

    def signal(self, values: Float[Tensor, "... dim"]) -> Float[Tensor, "... dim"]:
        """Inside the subspace there is noise only."""
        flat = values.reshape(-1, self.dim)
        return (flat - self.subspace.project(flat)).reshape(values.shape)
