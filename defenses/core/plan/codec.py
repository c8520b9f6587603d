"""Codecs: linear maps to the space in which a block is released (coordinates, a subspace, its complement).

A codec is fixed before the batch is drawn. `encode` maps rows to the released space, before they are bounded; `decode`
maps the noisy sum back to the parameters. The bound acts after `encode`, so the sensitivity does not depend on the map;
a basis that is not orthonormal would not harm privacy, but decode wrongly, and is refused. Codecs that subtract return
a least norm, below which their values may be rounding error (`rounding.py`).

Guarantee:
    The codecs of this file process each row separately and keep no row. For other codecs this is assumed, not checked:
    a codec that reads the number of rows, or keeps rows for `decode`, breaks the guarantee. A claim lists codecs of
    other types as unverified (`training/assumptions.py`).
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
        """Length of a row."""
        ...

    @property
    def size(self) -> int:
        """Number of released values."""
        ...

    def encode(self, rows: Float[Tensor, "rows dim"]) -> Float[Tensor, "rows size"]:
        """Maps rows to the released space; differentiable."""
        ...

    def decode(self, values: Float[Tensor, " size"]) -> Float[Tensor, " dim"]:
        """Maps the released vector back to the rows' space: post-processing, at no privacy cost."""
        ...

    def signal(self, values: Float[Tensor, "... size"]) -> Float[Tensor, "... size"]:
        """Projects values on the range of `encode`; the rest of a release is noise, independent of the data."""
        ...


@dataclass(frozen=True)
class Everything:
    """Identity codec: all `dim` coordinates are released."""

    dim: int

    @property
    def size(self) -> int:
        """Number of released values, `dim`."""
        return self.dim

    def encode(self, rows: Float[Tensor, "rows dim"]) -> Float[Tensor, "rows dim"]:
        """Returns the rows unchanged."""
        return rows

    def decode(self, values: Float[Tensor, " dim"]) -> Float[Tensor, " dim"]:
        """Returns the values unchanged."""
        return values

    def signal(self, values: Float[Tensor, "... dim"]) -> Float[Tensor, "... dim"]:
        """Returns the values unchanged: `encode` reaches all of them."""
        return values


@dataclass(frozen=True, eq=False)
class Coordinates:
    """A mask: the kept coordinates are released, the others are exactly zero after decoding.

    Attributes:
        kept: distinct coordinate indices in [0, dim); stored sorted.
        dim: length of a row.
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
        """Returns the codec of the coordinates at which a boolean mask is true."""
        coordinates = object.__new__(cls)
        # Indices of a mask are distinct, sorted and in range: no check is needed.
        for name, value in (("kept", marked(mask)), ("dim", mask.numel())):
            object.__setattr__(coordinates, name, value)
        return coordinates

    @property
    def size(self) -> int:
        """Number of kept coordinates."""
        return self.kept.numel()

    def encode(self, rows: Float[Tensor, "rows dim"]) -> Float[Tensor, "rows size"]:
        """Returns the kept columns."""
        return rows.index_select(1, self.kept.to(rows.device))

    def decode(self, values: Float[Tensor, " size"]) -> Float[Tensor, " dim"]:
        """Puts the values at the kept coordinates, zero elsewhere."""
        return values.new_zeros(self.dim).scatter(0, self.kept.to(values.device), values)

    def project(self, rows: Float[Tensor, "rows dim"]) -> Float[Tensor, "rows dim"]:
        """Returns the rows with all other coordinates set to zero."""
        kept = self.kept.to(rows.device)
        return torch.zeros_like(rows).index_copy(1, kept, rows.index_select(1, kept))

    def signal(self, values: Float[Tensor, "... size"]) -> Float[Tensor, "... size"]:
        """Returns the values unchanged: `encode` reaches every kept coordinate."""
        return values


def _in_order(kept: Int[Tensor, " size"], dim: int) -> Int[Tensor, " distinct"]:
    """Sorts the coordinates, because columns are read in ascending order, and drops duplicates."""
    if kept.dim() == 1 and bool((kept[1:] > kept[:-1]).all()):
        # Sorted already, as from a mask; copied, because the caller may write into the tensor.
        return kept.clone()
    if 64 * kept.numel() < dim:
        return kept.unique()
    # Through a mask, in a sixth of the time of sorting.
    return marked(torch.zeros(dim, dtype=torch.bool, device=kept.device).index_fill_(0, kept, True))


def marked(mask: Bool[Tensor, " dim"]) -> Int[Tensor, " size"]:
    """Indices at which a mask is true, ascending."""
    if mask.device.type != "cpu":
        return mask.nonzero().flatten()
    # NumPy does not branch on each entry: on a random mask it takes a quarter of the time.
    return torch.from_numpy(np.flatnonzero(mask.numpy()))


@dataclass(frozen=True, eq=False)
class Scaled:
    """Multiplies every coordinate by its own factor.

    Attributes:
        factors: factors [dim], finite; a coordinate with factor 0 is released as noise alone and decodes to 0.
    """

    factors: Float[Tensor, " dim"] = field(repr=False)

    def __post_init__(self) -> None:
        if not bool(torch.isfinite(self.factors).all()):
            raise ValueError("factors must be finite, got a NaN or an infinity")

    @property
    def dim(self) -> int:
        """Length of a row."""
        return self.factors.numel()

    @property
    def size(self) -> int:
        """Number of released values, `dim`."""
        return self.factors.numel()

    @property
    def gain(self) -> float:
        """Largest absolute factor."""
        return float(self.factors.abs().max()) if self.factors.numel() else 1.0

    def encode(self, rows: Float[Tensor, "rows dim"]) -> Float[Tensor, "rows dim"]:
        """Multiplies the rows by the factors."""
        return rows * self.factors.to(rows)

    def decode(self, values: Float[Tensor, " dim"]) -> Float[Tensor, " dim"]:
        """Divides the values by the factors; 0 where the factor is 0."""
        factors = self.factors.to(values)
        return torch.where(factors == 0, 0.0, values / torch.where(factors == 0, 1.0, factors))

    def signal(self, values: Float[Tensor, "... dim"]) -> Float[Tensor, "... dim"]:
        """Sets values whose factor is 0 to zero."""
        return torch.where(self.factors.to(values) == 0, 0.0, values)


@dataclass(frozen=True, eq=False)
class Subspace:
    """Coefficients along orthonormal directions, with a basis for each of several disjoint spans of coordinates.

    A single basis over (0, dim) is a global subspace, a basis per layer a layer-wise subspace. Since spans do not
    overlap, all bases together are orthonormal: a block-diagonal basis.

    Attributes:
        bases: matrices [stop - start, k] with orthonormal columns.
        spans: (start, stop) of each basis, increasing and disjoint.
        dim: length of a row.
    """

    bases: tuple[Float[Tensor, "_ _"], ...] = field(repr=False)
    spans: tuple[tuple[int, int], ...]
    dim: int

    def __post_init__(self) -> None:
        # If the edges are sorted, spans are inside [0, dim], increasing and disjoint; they may touch.
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
        """Returns a global subspace from a matrix with orthonormal columns."""
        return cls((basis,), ((0, basis.shape[0]),), basis.shape[0])

    @property
    def size(self) -> int:
        """Number of coefficients."""
        return sum(self.ranks)

    @property
    def ranks(self) -> list[int]:
        """Number of directions in each span."""
        return [basis.shape[1] for basis in self.bases]

    def moments(self) -> tuple[Float[Tensor, "_ _"], ...]:
        """Computes the Gram matrix of each basis in float64, the identity up to an error of 1e-4."""
        return tuple(gram(basis.T, basis.dtype) for basis in self.bases)

    def encode(self, rows: Float[Tensor, "rows dim"]) -> Float[Tensor, "rows size"]:
        """Returns inner products with the directions."""
        parts = [inner_products(rows[:, a:b], v.to(rows)) for v, (a, b) in zip(self.bases, self.spans, strict=True)]
        return torch.cat(parts, dim=1) if parts else rows.new_zeros(rows.shape[0], 0)

    def coordinates(self, vector: Float[Tensor, " dim"]) -> Float[Tensor, " size"]:
        """Returns inner products of a single vector with the directions; rounding may differ from `encode`."""
        return self.encode(vector.unsqueeze(0)).squeeze(0)

    def least(self, rows: Float[Tensor, "rows dim"]) -> Float[Tensor, " rows"]:
        """Returns a fraction of each row's norm: coefficients of a row orthogonal to the basis are rounding error."""
        return LEAST_SHARE * row_norms(rows)

    def decode(self, values: Float[Tensor, " size"]) -> Float[Tensor, " dim"]:
        """Returns the combination of directions with these coefficients."""
        decoded = values.new_zeros(self.dim)
        coefficients = values.split(self.ranks)
        for basis, (start, stop), c in zip(self.bases, self.spans, coefficients, strict=True):
            decoded[start:stop] = basis.to(values) @ c
        return decoded

    def project(
        self, rows: Float[Tensor, "rows dim"], weights: Float[Tensor, " size"] | None = None
    ) -> Float[Tensor, "rows dim"]:
        """Projects each row on the subspace.

        Args:
            rows: rows to project.
            weights: multipliers of the components along the directions; 1 if None.
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
        """Returns the values unchanged: `encode` reaches every coefficient."""
        return values


@dataclass(frozen=True, eq=False)
class Complement:
    """Orthogonal complement of a subspace: rows minus their projection, released in all `dim` coordinates.

    Decoding projects again, which removes the noise inside the subspace: post-processing, at no privacy cost.

    Attributes:
        subspace: directions or coordinates to remove from the rows; removed coordinates are released as noise alone.
        project_noise: whether `decode` projects; without it, as printed in some papers, the update has more noise.
    """

    subspace: Subspace | Coordinates
    project_noise: bool = True

    @property
    def dim(self) -> int:
        """Length of a row."""
        return self.subspace.dim

    @property
    def size(self) -> int:
        """Number of released values, `dim`: the release has the shape of a row."""
        return self.subspace.dim

    def encode(self, rows: Float[Tensor, "rows dim"]) -> Float[Tensor, "rows dim"]:
        """Subtracts from the rows their projection on the subspace."""
        return rows - self.subspace.project(rows)

    def least(self, rows: Float[Tensor, "rows dim"]) -> Float[Tensor, " rows"] | None:
        """Returns a fraction of each row's norm, because a residual may be rounding error; None for coordinates."""
        return None if isinstance(self.subspace, Coordinates) else self.subspace.least(rows)

    def decode(self, values: Float[Tensor, " dim"]) -> Float[Tensor, " dim"]:
        """Removes the noise inside the subspace, unless `project_noise` is False."""
        return self.signal(values) if self.project_noise else values

    def signal(self, values: Float[Tensor, "... dim"]) -> Float[Tensor, "... dim"]:
        """Projects the values on the complement; inside the subspace, a release is noise alone."""
        flat = values.reshape(-1, self.dim)
        return (flat - self.subspace.project(flat)).reshape(values.shape)
