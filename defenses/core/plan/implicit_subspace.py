"""Subspaces whose bases are formed only when read, or stored in the layout in which gradients are computed.

A linear layer's gradient is an outer product s xᵀ of the output derivatives s and the inputs x. Directions are V = Pᵀ
W, with a public gradient in each row of P, and W = U L^(-1/2) from their Gram matrix P Pᵀ = U L Uᵀ. Inner products of
outer products are products of inner products, <s xᵀ, t yᵀ> = <s, t> <x, y>, so P Pᵀ and the coefficients Wᵀ P g of a
batch of such gradients follow from matrices of the size of the batch, and V c = sum_i (W c)_i s_i x_iᵀ is one product.
Forming a basis that serves a single step would cost more than all its uses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from .codec import Subspace
from .linear_algebra.basis import leading_eigenvectors, orient, whitening
from .linear_algebra.memo import Memo
from .linear_algebra.products import exact_products, inner_products
from .linear_algebra.sketch import SketchDirections

# Largest number of rows whose coefficients are computed from the factors; for more, the basis is formed. The choice
# does not depend on whether the basis is formed already: otherwise the last digit of an update would depend on earlier
# reads.
_FEW = 8
# Smallest accepted ratio of singular values, because rounding errors of inner products are divided by it.
_LEAST_RATIO = 1e-3
_EDGE = 1e15  # values between this and its inverse have squares within float32


@dataclass(frozen=True, eq=False)
class OuterDirections:
    """Orthonormal combinations of outer products s_i x_iᵀ.

    Attributes:
        signals: factors s, in rows.
        inputs: factors x, in rows.
        weights: W; column j holds the coefficients of direction j.
    """

    signals: Float[Tensor, "m out"] = field(repr=False)
    inputs: Float[Tensor, "m in"] = field(repr=False)
    weights: Float[Tensor, "m k"] = field(repr=False)
    _formed: Memo[Tensor] = field(default_factory=Memo, init=False, repr=False)

    @classmethod
    @torch.no_grad()
    def leading(
        cls, signals: Float[Tensor, "m out"], inputs: Float[Tensor, "m in"], rank: int
    ) -> OuterDirections | None:
        """Returns the leading directions of these products, unordered; None if the factors are too ill-conditioned.

        The largest coefficient of each direction is positive, so that parties with the same products exchange
        coefficients with the same signs.

        Args:
            signals: factors s, in rows.
            inputs: factors x, in rows.
            rank: largest number of directions.
        """
        sizes = torch.stack([part.double().norm(dim=1).max() for part in (signals, inputs)])
        if not bool(((sizes < _EDGE) & (sizes > 1 / _EDGE)).all()):  # NaN too
            return None
        moments = exact_products(signals, signals) * exact_products(inputs, inputs)
        # At full rank any basis of the span will do; Cholesky takes a tenth of the time of eigenvectors.
        whole = whitening(moments, _LEAST_RATIO**-2) if rank >= len(moments) else None
        if whole is None:
            values, vectors = leading_eigenvectors(moments, rank)
            if not len(values) or float(values[-1]) < _LEAST_RATIO**2 * float(values[0]):
                return None
            whole = (vectors / values.sqrt()).T
        weights = whole.T
        largest = weights.gather(0, weights.abs().argmax(dim=0, keepdim=True))
        return cls(signals, inputs, (weights * largest.sign()).to(signals.dtype))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles without the basis, which may have been formed."""
        return OuterDirections, (self.signals, self.inputs, self.weights)

    @property
    def rank(self) -> int:
        """Number of directions."""
        return self.weights.shape[1]

    @property
    def basis(self) -> Float[Tensor, "span k"]:
        """The directions as columns; like other bases, the transpose of a contiguous matrix."""
        # Formed once for all steps that use it.
        return self._formed.of((self.signals, self.inputs, self.weights), self._form)

    def _form(self) -> Tensor:
        products = (self.signals.unsqueeze(2) * self.inputs.unsqueeze(1)).flatten(1)
        return (self.weights.T @ products).T

    def of_products(
        self, signals: Float[Tensor, "rows out"], inputs: Float[Tensor, "rows in"]
    ) -> Float[Tensor, "rows k"]:
        """Returns coefficients of outer products, from inner products of their factors.

        Computed in float64: cancellation leaves rounding error, which a bound may make as long as any other row, and
        products of few rows round differently from those of many, so that removing a row would move the others.
        """
        along = exact_products(signals, self.signals) * exact_products(inputs, self.inputs)
        return (along @ self.weights.double()).to(signals.dtype)

    def of_rows(self, rows: Float[Tensor, "rows span"]) -> Float[Tensor, "rows k"]:
        """Returns coefficients of arbitrary rows."""
        if len(rows) > _FEW:
            return inner_products(rows, self.basis.to(rows))
        wide = rows.unflatten(1, (self.signals.shape[1], self.inputs.shape[1]))
        inner = (torch.matmul(self.signals.to(rows), wide) * self.inputs.to(rows)).sum(dim=2)
        return inner @ self.weights.to(rows)

    def combined(self, coefficients: Float[Tensor, "rows k"]) -> Float[Tensor, "rows span"]:
        """Returns the combinations of directions with these coefficients."""
        if len(coefficients) > _FEW:
            return coefficients @ self.basis.to(coefficients).T
        shares = coefficients @ self.weights.to(coefficients).T
        scaled = self.signals.to(coefficients).T * shares.unsqueeze(1)  # [rows, out, m]
        return torch.matmul(scaled, self.inputs.to(coefficients)).flatten(1)


@dataclass(frozen=True, eq=False)
class OrderedBasis:
    """Basis of a convolution's weight, stored in the layout in which gradient rows are computed.

    Permuting so many directions to the weight's layout, and back for the products, would take as long as computing
    them.

    Attributes:
        numbers: directions as columns, in the rows' layout; the transpose of a contiguous matrix.
        sizes: (groups, height, width, entering, leaving) of a row.
    """

    numbers: Float[Tensor, "span k"] = field(repr=False)
    sizes: tuple[int, int, int, int, int]
    _restored: Memo[Tensor] = field(default_factory=Memo, init=False, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles without the basis in the weight's layout."""
        return OrderedBasis, (self.numbers, self.sizes)

    @property
    def rank(self) -> int:
        """Number of directions."""
        return self.numbers.shape[1]

    @property
    def basis(self) -> Float[Tensor, "span k"]:
        """The directions in the weight's layout; like other bases, the transpose of a contiguous matrix."""
        return self._restored.of((self.numbers,), lambda: self._in_order(self.numbers.T).T)

    def of_rows(self, rows: Float[Tensor, "n span"]) -> Float[Tensor, "n k"]:
        """Returns coefficients of rows in the weight's layout."""
        if len(rows) > _FEW:
            return inner_products(rows, self.basis.to(rows))
        groups, height, width, entering, leaving = self.sizes
        split = rows.unflatten(1, (groups, leaving, entering, height, width))
        return inner_products(split.permute(0, 1, 4, 5, 3, 2).flatten(1), self.numbers.to(rows))

    def combined(self, coefficients: Float[Tensor, "n k"]) -> Float[Tensor, "n span"]:
        """Returns the combinations of directions with these coefficients, in the weight's layout."""
        return self._in_order(coefficients @ self.numbers.to(coefficients).T)

    def _in_order(self, rows: Float[Tensor, "n span"]) -> Float[Tensor, "n span"]:
        return rows.unflatten(1, self.sizes).permute(0, 1, 5, 4, 2, 3).flatten(1)


@dataclass(frozen=True, eq=False)
class FactoredBasis:
    """Basis of combinations of public gradients, with the factors of gradients that are outer products.

    Coefficients of outer products follow from the factors, as in `OuterDirections`; all others from the basis, which is
    formed in float64, so that both agree up to the rounding of its entries.

    Attributes:
        basis: directions as columns, the transpose of a contiguous matrix.
        weights: W, float64; column j holds the coefficients of direction j.
        spans: (start, stop) of the parameters whose gradients are outer products, counted from the first coordinate of
            the basis; they may reach beyond it.
        factors: (signals [m, out], inputs [m, in]) of each span.
    """

    basis: Float[Tensor, "span k"] = field(repr=False)
    weights: Float[Tensor, "m k"] = field(repr=False)
    spans: tuple[tuple[int, int], ...]
    factors: tuple[tuple[Tensor, Tensor], ...] = field(repr=False)
    _versions: list[int] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_versions", self._now())

    @classmethod
    @torch.no_grad()
    def formed(
        cls,
        others: Float[Tensor, "m rest"],
        length: int,
        weights: Float[Tensor, "m k"],
        spans: tuple[tuple[int, int], ...],
        factors: tuple[tuple[Tensor, Tensor], ...],
    ) -> FactoredBasis:
        """Forms the basis of these combinations, and keeps the factors.

        Args:
            others: columns of the public gradients outside all spans, a row for each gradient.
            length: length of the basis.
            weights: see the attribute.
            spans: see the attribute; increasing.
            factors: see the attribute.
        """
        basis, unfactored = others.new_empty(weights.shape[1], length), weights.T @ others.double()
        at = copied = 0
        for (start, stop), (signals, inputs) in zip(spans, factors, strict=True):
            low, high, width = max(start, 0), min(stop, length), inputs.shape[1]
            basis[:, at:low] = unfactored[:, copied : copied + low - at]
            copied += low - at
            # Not from rows, which are products of the factors with their own rounding.
            first, last = (low - start) // width, -(-(high - start) // width)
            shares = weights.T.unsqueeze(1) * signals.double().T[first:last]
            whole = (shares @ inputs.double()).flatten(1)
            basis[:, low:high] = whole[:, low - start - first * width :][:, : high - low]
            at = high
        basis[:, at:] = unfactored[:, copied:]
        # Signs as for leading directions, so that parties that form the directions from rows get the same ones.
        return cls(basis.T, weights * orient(basis).to(weights), spans, factors)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles with the factors only if they still match the basis."""
        known = (self.spans, self.factors) if self._unchanged else ((), ())
        return FactoredBasis, (self.basis, self.weights, *known)

    @property
    def rank(self) -> int:
        """Number of directions."""
        return self.weights.shape[1]

    def factors_of(self, span: tuple[int, int]) -> tuple[Tensor, Tensor] | None:
        """Returns factors (signals, inputs) of a parameter's public gradients; None if unknown.

        Args:
            span: (start, stop) of the parameter, counted from the first coordinate of the basis.
        """
        return self.factors[self.spans.index(span)] if span in self.spans and self._unchanged else None

    def of_inner(self, inner: Float[Tensor, "rows m"]) -> Float[Tensor, "rows k"]:
        """Returns partial coefficients from inner products with the gradients, in float64."""
        return inner @ self.weights.to(inner)

    def of_rows(self, rows: Float[Tensor, "n span"]) -> Float[Tensor, "n k"]:
        """Returns coefficients of arbitrary rows."""
        return inner_products(rows, self.basis.to(rows))

    def combined(self, coefficients: Float[Tensor, "n k"]) -> Float[Tensor, "n span"]:
        """Returns the combinations of directions with these coefficients."""
        return coefficients @ self.basis.to(coefficients).T

    @property
    def _unchanged(self) -> bool:
        """True if no tensor was written to in place; the others would no longer match."""
        return self._versions is not None and self._versions == self._now()

    def _now(self) -> list[int] | None:
        tensors = [self.basis, self.weights, *(part for pair in self.factors for part in pair)]
        # Inference tensors have no version counter.
        return None if any(part.is_inference() for part in tensors) else [part._version for part in tensors]


Directions = Tensor | OuterDirections | OrderedBasis | FactoredBasis | SketchDirections
"""An orthonormal basis [span, k], or its implicit form."""
_OURS = OuterDirections, OrderedBasis, FactoredBasis, SketchDirections


# Largest absolute row sum of a Gram matrix, which is 1 for an orthonormal basis. Rounding error grows with it, and a
# method may have written to the tensors of its state, whose orthonormality is not checked again.
_MOST_ALONG = 10.0


class ImplicitSubspace(Subspace):
    """A `Subspace` whose implicit bases are formed only when `bases` is read.

    Attributes:
        parts: orthonormal columns, or an implicit form of them, for each span.
    """

    parts: tuple[Directions, ...]
    _moments: Memo[tuple[Tensor, ...]]

    def __init__(self, parts: Sequence[Directions], spans: tuple[tuple[int, int], ...], dim: int) -> None:
        """Takes directions that were orthonormal when made; orthonormality is not checked again.

        Raises:
            ValueError: for subclasses of directions, which could compute anything, or for a length other than the
                span's.
        """
        for part, (start, stop) in zip(parts, spans, strict=True):
            if not isinstance(part, Tensor) and type(part) not in _OURS:
                names = ", ".join(kind.__name__ for kind in _OURS[:-1])
                raise ValueError(
                    f"directions must be {names} or {_OURS[-1].__name__} itself, got {type(part).__name__}"
                )
            if isinstance(part, SketchDirections) and len(part.factors) != stop - start:
                raise ValueError(f"factors must be {stop - start}, one for each of a span, got {len(part.factors)}")
            if isinstance(part, OrderedBasis) and not len(part.numbers) == math.prod(part.sizes) == stop - start:
                raise ValueError(
                    f"sizes must be those of a row of {stop - start} numbers, got {part.sizes} for {len(part.numbers)}"
                )
            if isinstance(part, FactoredBasis) and len(part.basis) != stop - start:
                raise ValueError(f"basis must have {stop - start} rows for its span, got {len(part.basis)}")
        # Fields of a frozen dataclass can only be set this way.
        for name, value in (("parts", tuple(parts)), ("spans", spans), ("dim", dim), ("_moments", Memo())):
            object.__setattr__(self, name, value)

    @property
    def bases(self) -> tuple[Float[Tensor, "_ _"], ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """All bases, formed."""
        return tuple(part if isinstance(part, Tensor) else part.basis for part in self.parts)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles without the bases that were formed."""
        return ImplicitSubspace, (self.parts, self.spans, self.dim)

    @property
    def ranks(self) -> list[int]:
        """Number of directions in each span."""
        return [part.shape[1] if isinstance(part, Tensor) else part.rank for part in self.parts]

    def moments(self) -> tuple[Float[Tensor, "_ _"], ...]:
        """Gram matrix of each basis, see `Subspace`; computed once for all steps that keep the bases.

        Raises:
            ValueError: for directions so long or so nearly parallel that rounding along them may exceed the result.
        """
        return self._moments.of(self.bases, self._bounded_moments)

    def _bounded_moments(self) -> tuple[Float[Tensor, "_ _"], ...]:
        moments_of_parts = super().moments()
        for moments in moments_of_parts:
            longest = float(moments.abs().sum(dim=1).max()) if moments.numel() else 0.0
            if not longest <= _MOST_ALONG:  # NaN is refused too
                raise ValueError(
                    f"directions must be orthonormal, got some along which squares grow {longest:.2g} times"
                )
        return moments_of_parts

    def encode(self, rows: Float[Tensor, "rows dim"]) -> Float[Tensor, "rows size"]:
        """Returns inner products with the directions."""
        coefficients = [rows.new_zeros(len(rows), 0)]
        for part, (start, stop) in zip(self.parts, self.spans, strict=True):
            part_rows = rows[:, start:stop]
            if isinstance(part, SketchDirections):
                coefficients.append(part.of_rows(part_rows))
            else:
                coefficients.append(
                    inner_products(part_rows, (part if isinstance(part, Tensor) else part.basis).to(rows))
                )
        return torch.cat(coefficients, dim=1)

    def coordinates(self, vector: Float[Tensor, " dim"]) -> Float[Tensor, " size"]:
        """Returns inner products of a single vector with the directions, without forming a basis."""
        # Not in `encode`, whose rows are examples: their rounding would depend on the size of the batch.
        row, along = vector.unsqueeze(0), [vector.new_zeros(1, 0)]
        for part, (start, stop) in zip(self.parts, self.spans, strict=True):
            part_row = row[:, start:stop]
            along.append(inner_products(part_row, part.to(row)) if isinstance(part, Tensor) else part.of_rows(part_row))
        return torch.cat(along, dim=1).squeeze(0)

    def decode(self, values: Float[Tensor, " size"]) -> Float[Tensor, " dim"]:
        """Returns the combination of directions with these coefficients."""
        decoded = values.new_zeros(self.dim)
        for part, (start, stop), c in zip(self.parts, self.spans, values.split(self.ranks), strict=True):
            along = part.to(values) @ c if isinstance(part, Tensor) else part.combined(c.unsqueeze(0))[0]
            decoded[start:stop] = along
        return decoded

    def project(
        self, rows: Float[Tensor, "rows dim"], weights: Float[Tensor, " size"] | None = None
    ) -> Float[Tensor, "rows dim"]:
        """Projects each row on the subspace; arguments as in `Subspace`."""
        inside = torch.zeros_like(rows)
        shares = [None] * len(self.parts) if weights is None else weights.split(self.ranks)
        for part, (start, stop), share in zip(self.parts, self.spans, shares, strict=True):
            if isinstance(part, Tensor):
                inside[:, start:stop] = self._along(rows[:, start:stop], part.to(rows), share)
            else:
                along = part.of_rows(rows[:, start:stop])
                inside[:, start:stop] = part.combined(along if share is None else along * share.to(along))
        return inside
