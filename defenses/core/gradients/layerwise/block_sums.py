"""Clipped sums of a plan's blocks from factored per-example gradients, with rows for examples of uncertain norm.

Guarantee:
    An example's contribution is the output of `Block` for its row, least norms (`rounding.py`) included. Norms come
    from the factors; if rounding may have moved a norm by more than a trusted fraction, or the norm is near overflow or
    underflow, that example's row is formed and bounded by the reference. A non-finite row adds zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ...kernels.bound_factors import KINDS, SMALL, BoundFactors, NormTable
from ...kernels.weighted_rows import SumTable
from ...plan.bound import Bound, finite_rows, row_norms
from ...plan.codec import Codec, Complement, Coordinates, Everything, Subspace
from ...plan.composed_codecs import Masked, spread
from ...plan.defense import Block
from ...plan.implicit_subspace import FactoredBasis, ImplicitSubspace, OrderedBasis, OuterDirections
from ...plan.linear_algebra.products import OuterPiece, inner_with
from ...plan.linear_algebra.sketch import SketchDirections
from ...plan.public_data import RowSizes
from ...plan.query import Gradient, Gradients, NormWithin
from ...plan.rounding import LEAST_SHARE
from .factors import BasisPiece, FactoredGradient, Squares, parts
from .layers.convolution import Convolution
from .layers.kept_rows import KeptRows
from .layers.linear import Outer
from .masks import SpanMasks, Spans

# Relative error of a squared norm up to which it is trusted.
_TRUSTED = 1e-4
# The same in `matched`, for the norm outside of a subspace: a difference of two norms loses its last digits.
_TRUSTED_REST = 1e-5


def served(block: Block) -> bool:
    """Returns whether a block's sum can be computed without rows; types are exact: a subclass may compute anything."""
    if type(block.bound) is not Bound:
        return False
    if type(block.query) is NormWithin:
        return True
    kept, codec = _unmasked(block.codec)
    inner = codec.subspace if type(codec) is Complement else codec
    known = (Subspace, ImplicitSubspace) + ((Everything, Coordinates) if kept is None else ())
    return type(block.query) is Gradient and type(inner) in known


def _unmasked(codec: Codec) -> tuple[Coordinates | None, Codec]:
    """Returns the mask that is applied to rows first (None without a mask), and the codec behind it."""
    if type(codec) is Masked and type(codec.kept) is Coordinates:
        return codec.kept, codec.codec
    return None, codec


@dataclass(eq=False)  # not frozen, which takes 4 us
class BatchGradients:
    """Per-example gradients of a batch.

    Attributes:
        terms: factored gradients, each with the spans (start, stop) of its parameters in a flat vector, in the order of
            the term's rows; parameters without a term have gradient zero.
        dim: length of a row.
        examples: number of rows.
        like: device and dtype of the rows.
        counted: number of examples, from the first on, that count in sums; the others are padding.
        known: cached coefficients and least norms in the plan's subspaces, which several blocks may share.
        known_squares: cached squared norms of the coordinates of the plan's masks, which several blocks may share.
        known_masks: cached masks of the plan by `id`, split by parameter.
    """

    terms: tuple[tuple[Spans, FactoredGradient], ...]
    dim: int
    examples: int
    like: Tensor
    counted: int
    known: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)
    known_squares: dict[int, Squares] = field(default_factory=dict, repr=False)
    known_masks: dict[int, SpanMasks] = field(default_factory=dict, repr=False)

    def rows(self, index: slice | Tensor = slice(None)) -> Float[Tensor, "some dim"]:
        """Returns whole rows of some examples."""
        count = len(range(self.examples)[index]) if isinstance(index, slice) else len(index)
        rows = self.like.new_zeros(count, self.dim)
        for spans, term in self.terms:
            for (start, stop), values in _split(spans, term.rows(index)):
                rows[:, start:stop] = values
        return rows

    def columns(self, start: int, stop: int) -> Float[Tensor, "rows span"]:
        """Returns the columns [start, stop) of all rows, which begin and end with a parameter."""
        for spans, term in self.terms:
            if spans == ((start, stop),):
                return term.rows(slice(None))
        columns = self.like.new_zeros(self.examples, stop - start)
        for spans, term in self.terms:
            if any(start <= a and b <= stop for a, b in spans):
                for (a, b), values in _split(spans, term.rows(slice(None))):
                    if start <= a and b <= stop:
                        columns[:, a - start : b - start] = values
        return columns

    def made(self, start: int, stop: int) -> tuple[Tensor, RowSizes] | None:
        """Returns rows over [start, stop) in the order in which a convolution computes them; None for other layers."""
        for spans, term in self.terms:
            if spans == ((start, stop),) and isinstance(term, KeptRows | Convolution):
                return term.made(), term.made_as
        return None

    def _made(self, start: int, stop: int, sizes: RowSizes) -> tuple[int, KeptRows | Convolution] | None:
        """Returns index and term of the gradients over [start, stop) if their rows have an order of these sizes."""
        for number, (spans, term) in enumerate(self.terms):
            if spans == ((start, stop),) and isinstance(term, KeptRows | Convolution) and term.made_as == sizes:
                return number, term
        return None

    def outer(self, start: int, stop: int) -> tuple[Tensor, Tensor] | None:
        """Returns factors (signals, inputs) of the gradients over [start, stop) if they are outer products."""
        for spans, term in self.terms:
            if spans == ((start, stop),) and type(term) is Outer:
                return term.signals, term.inputs
        return None

    def clipped_sum(self, block: Block) -> Float[Tensor, " size"]:
        """Returns the sum of the examples' bounded contributions to a block: private."""
        if isinstance(block.query, NormWithin):
            return self._by_norm(block, block.query)
        kept, codec = _unmasked(block.codec)
        if isinstance(codec, Subspace):
            return block.bound(*self._along(codec, kept))[: self.counted].sum(dim=0, dtype=torch.float64)
        if block.bound.kind == "unbounded":
            # All factors are 1 and no norm is needed; a non-finite example is replaced by its row, which becomes zero.
            return self._weighted(block, torch.ones_like(self._finite, dtype=self.like.dtype), ~self._finite)
        if type(codec) in (Everything, Coordinates) and block.bound.kind in KINDS:
            bounded = self._at_once(self._mask(codec) if isinstance(codec, Coordinates) else None, block.bound)
            if bounded is not None:
                return self._weighted(block, bounded.factors, None if bounded.certain is None else ~bounded.certain)
        squares = self._encoded(block)
        factors = block.bound.scale(squares.value.sqrt(), self.like.dtype)
        return self._weighted(block, factors, _doubtful(block.bound, squares))

    def matched(
        self, block: Block, direction: Float[Tensor, " size"]
    ) -> tuple[Float[Tensor, " rows"], Float[Tensor, " rows"]]:
        """Inner products of the examples' bounded contributions with a direction, and their squared norms: private.

        Args:
            block: a block that is `served`.
            direction: vector in the block's released space, in the dtype of the rows.
        """
        if isinstance(block.query, NormWithin):
            return _compared(self._answered(block, block.query), direction)
        kept, codec = _unmasked(block.codec)
        if isinstance(codec, Subspace):
            return _compared(block.bound(*self._along(codec, kept)), direction)
        squares = self._encoded(block)
        trusted = _TRUSTED_REST if isinstance(codec, Complement) else _TRUSTED
        # Also below the clip norm, where the norm does not affect the bound: here the norm is a result.
        doubtful = ~(squares.slack <= trusted * squares.value) | ~_in_range(squares.value) | ~self._finite
        if isinstance(codec, Complement) and isinstance(codec.subspace, Subspace):
            # Raised to the least norm by which a row is bounded, which is not its own.
            doubtful |= squares.value <= LEAST_SHARE**2 * self._kept_squares(kept).value
        factors = block.bound.scale(squares.value.sqrt(), self.like.dtype).double()
        # Served codecs are linear, and decoding, or a second projection, is their transpose.
        wide = codec.decode(direction) if isinstance(codec, Coordinates) else codec.encode(direction.unsqueeze(0))[0]
        wide, inner = wide if kept is None else kept.decode(wide), torch.zeros_like(factors)
        for spans, term in self.terms:
            inner = inner + term.inner(torch.cat([wide[start:stop] for start, stop in spans]))
        inner, lengths_squared = inner * factors, squares.value * factors.square()
        for chunk, rows in self._some_rows(torch.nonzero(doubtful).flatten()):
            inner[chunk], lengths_squared[chunk] = _compared(block.contributions(_gradients_of_rows(rows)), direction)
        return inner, lengths_squared

    def _at_once(self, mask: SpanMasks | None, bound: Bound | None = None) -> BoundFactors | None:
        """Factors and squared norms of all examples, by one call of a kernel; None if a norm is not a sum of squares.

        Args:
            mask: mask of the measured coordinates; None for all.
            bound: a bound of any kind in `KINDS`; None if squared norms alone are needed.
        """
        if not self.like.is_cpu:
            return None
        table = NormTable(self.examples, self.like)
        for spans, term in self.terms:
            if not term.enter(table, True if mask is None else mask.share(spans)):
                return None
        return table.factors(bound.kind, bound.norm, bound.regulariser) if bound else table.factors()

    @cached_property
    def _certain(self) -> Float[Tensor, " rows"] | None:
        """Squared norms of whole rows, if all are sums of squares in range; else None."""
        return None if self._whole is None or self._whole.certain is not None else self._whole.squares

    @cached_property
    def _whole(self) -> BoundFactors | None:
        return self._at_once(None)

    def _encoded(self, block: Block) -> Squares:
        """Squared norms of encoded rows."""
        kept, codec = _unmasked(block.codec)
        match codec:
            case Coordinates():
                return self._kept_squares(codec)
            case Complement(subspace=Coordinates() as dropped):
                return self._masked(self._by_parameter(dropped, inside=False))
            case Complement(subspace=Subspace() as directions):
                return self._beside(directions, kept)
            case _:
                return self._squares

    @cached_property
    def _squares(self) -> Squares:
        """Squared norms of whole rows."""
        if self._certain is not None:
            return Squares.exact(self._certain)
        return _certain_squares(self._whole, self._total(term.squares() for _, term in self.terms))

    def _total(self, terms: Iterator[Squares]) -> Squares:
        first = next(terms, None)
        if first is None:
            return Squares.exact(torch.zeros(self.examples, dtype=torch.float64, device=self.like.device))
        return sum(terms, start=first)

    def _kept_squares(self, kept: Coordinates | None) -> Squares:
        """Squared norms of the coordinates of a mask, or of whole rows without a mask."""
        if kept is None:
            return self._squares
        # By identity, which holds while the plan is alive: both blocks of GEP share a mask.
        if id(kept) not in self.known_squares:
            mask = self._mask(kept)
            bounded = self._at_once(mask)
            if bounded is not None and bounded.certain is None:
                self.known_squares[id(kept)] = Squares.exact(bounded.squares)
            else:
                self.known_squares[id(kept)] = _certain_squares(bounded, self._masked(mask))
        return self.known_squares[id(kept)]

    def _mask(self, kept: Coordinates) -> SpanMasks:
        """Returns a mask of the plan by parameter, split once: that takes as long as the norms of many layers."""
        if id(kept) not in self.known_masks:
            self.known_masks[id(kept)] = self._by_parameter(kept, inside=True)
        return self.known_masks[id(kept)]

    def _by_parameter(self, named: Coordinates, *, inside: bool) -> SpanMasks:
        """Returns a mask of the named coordinates, or of all others."""
        spans = [span for spans, _ in self.terms for span in spans]
        return SpanMasks(named.kept.to(self.like.device), self.dim, spans, inside=inside)

    def _masked(self, mask: SpanMasks) -> Squares:
        """Squared norms of the coordinates that a mask keeps."""

        def each() -> Iterator[Squares]:
            for spans, term in self.terms:
                if (kept := mask.kept(spans)) == term.size:
                    yield term.squares()
                elif kept:
                    yield term.masked_squares(mask.of(spans))

        masked = self._total(each())
        # A row that is non-finite anywhere, also outside of the mask, counts as zero.
        return Squares(torch.where(self._finite, masked.value, torch.nan), masked.rounding)

    def _beside(self, subspace: Subspace, kept: Coordinates | None) -> Squares:
        """Squared norms in the complement of a subspace: |g - V c|² = |g|² - 2 |c|² + cᵀ (Vᵀ V) c with c = Vᵀ g."""
        # Not |g|² - |c|²: a basis is orthonormal up to 1e-4 only (`codec.py`), which matters for a small remainder.
        coefficients = self._along(subspace, kept)[0].double()
        inside, parts_of = 2 * coefficients.square().sum(dim=1), []
        for moments, c in zip(subspace.moments(), coefficients.split(subspace.ranks, dim=1), strict=True):
            parts_of.append(((c @ moments.to(c)) * c).sum(dim=1))
        again = torch.stack(parts_of).sum(dim=0) if parts_of else torch.zeros_like(inside)
        whole = self._kept_squares(kept)
        # The difference of numbers of the size of |g|²; VᵀV is as exact as the dtype of the basis.
        coarsest = max(torch.finfo(of).eps for of in (self.like.dtype, *(basis.dtype for basis in subspace.bases)))
        rounding = 32 * coarsest * whole.value
        least = LEAST_SHARE**2 * whole.value  # (`rounding.py`)
        return Squares(torch.maximum(whole.value - inside + again, least), whole.slack + rounding)

    def _along(
        self, subspace: Subspace, kept: Coordinates | None
    ) -> tuple[Float[Tensor, "rows size"], Float[Tensor, " rows"]]:
        """Inner products with every direction, NaN for non-finite rows, and least norms (`rounding.py`)."""
        # By identity, which holds while the plan is alive: DPDR's two blocks share a subspace.
        key = id(subspace), id(kept)
        if key in self.known:
            return self.known[key]
        if kept is not None:
            subspace = spread(subspace, kept)
        parts_of = subspace.parts if isinstance(subspace, ImplicitSubspace) else subspace.bases
        part_coefficients: list[Tensor] = []
        bases: dict[int, BasisPiece] = {}  # by number of the part, in flat coordinates
        sketches: dict[int, SketchDirections] = {}
        factored: dict[int, FactoredBasis] = {}
        norms: dict[int, Tensor] = {}  # by number of the term
        for number, (part, span) in enumerate(zip(parts_of, subspace.spans, strict=True)):
            if isinstance(part, OuterDirections) and (factors := self.outer(*span)) is not None:
                part_coefficients.append(part.of_products(*factors))
                continue
            if isinstance(part, OrderedBasis) and (part_products := self._made(*span, part.sizes)) is not None:
                of_term, term = part_products
                products, norms[of_term] = term.along_made(part.numbers.to(self.like))
                part_coefficients.append(products)
                continue
            part_coefficients.append(self.like.new_zeros(self.examples, subspace.ranks[number]))
            if isinstance(part, SketchDirections):
                sketches[number] = part
            else:
                if isinstance(part, FactoredBasis):
                    factored[number] = part
                bases[number] = (span[0], (part if isinstance(part, Tensor) else part.basis).to(self.like))
        for number, (spans, term) in enumerate(self.terms):
            # All directions at once: a layer's rows, if it needs any, are formed once.
            shared = {of: pieces for of, basis in bases.items() if (pieces := _within(basis, spans))}
            if factored and type(term) is Outer and len(spans) == 1:
                for of, product in _by_factors(term, spans[0], shared, factored, bases):
                    part_coefficients[of] = part_coefficients[of] + product.to(self.like)
            if shared:
                products, norms[number] = term.along([piece for pieces in shared.values() for piece in pieces])
                for of, product in zip((of for of, pieces in shared.items() for _ in pieces), products, strict=True):
                    part_coefficients[of] = part_coefficients[of] + product
            for of, sketch in sketches.items():
                first = subspace.spans[of][0]
                overlaps = list(_overlaps(first, subspace.spans[of][1], spans))
                for chunk, rows in term.chunks() if overlaps else ():
                    for place, low, high in overlaps:
                        part_coefficients[of][chunk] += sketch.of_rows(rows[:, place : place + high - low], low - first)
        coefficients = (
            torch.cat(part_coefficients, dim=1) if part_coefficients else self.like.new_zeros(self.examples, 0)
        )
        self.known[key] = (
            torch.where(self._finite.unsqueeze(1), coefficients, torch.nan),
            LEAST_SHARE * (self._lengths(norms) if kept is None else self._kept_lengths(kept)),
        )
        return self.known[key]

    def _lengths(self, known: Mapping[int, Tensor]) -> Float[Tensor, " rows"]:
        """Norms of whole rows from those of terms, some of which are given by number."""
        if self._certain is not None:
            return self._certain.sqrt()
        # Not `_squares`: inner products between positions may cancel, and then do not determine the length.
        norms = [known[i] if i in known else term.norms() for i, (_, term) in enumerate(self.terms)]
        if not norms:
            return torch.zeros(self.examples, dtype=torch.float64, device=self.like.device)
        return torch.linalg.vector_norm(torch.stack(norms), dim=0)

    def _kept_lengths(self, kept: Coordinates) -> Float[Tensor, " rows"]:
        """Norms of the coordinates of a mask; from the row if the squared norm is uncertain."""
        squares = self._kept_squares(kept)
        norms = squares.value.sqrt()
        doubtful = ~(squares.slack <= _TRUSTED * squares.value) | ~_in_range(squares.value)
        for chunk, rows in self._some_rows(torch.nonzero(doubtful & self._finite).flatten()):
            norms[chunk] = row_norms(kept.encode(rows)).to(norms)
        return norms

    @cached_property
    def _finite(self) -> Bool[Tensor, " rows"]:
        """Mask of the rows whose entries are all finite, however large."""
        if self._certain is not None:
            return torch.ones(self.examples, dtype=torch.bool, device=self.like.device)
        largest = self.like.new_zeros(self.examples, dtype=torch.float64)
        for _, term in self.terms:
            largest = largest + term.largest()
        # False for NaN too. Too large an upper bound proves nothing: rows of those examples are formed.
        finite = largest <= torch.finfo(self.like.dtype).max
        if not bool(finite.all()):
            for part, rows in self._some_rows(torch.nonzero(~finite).flatten()):
                finite[part] = torch.isfinite(rows).all(dim=1)
        return finite

    def _weighted(self, block: Block, factors: Tensor, doubtful: Tensor | None) -> Float[Tensor, " size"]:
        """Sum of rows times factors; rows of uncertain examples, if any, are formed and bounded by themselves."""
        terms, total = self.terms, None
        if self.counted < self.examples:
            factors[self.counted :] = 0.0
        if doubtful is not None and bool(doubtful.any()):
            factors = torch.where(doubtful, 0.0, factors)
            terms = self._without(doubtful)
            total = torch.zeros(block.codec.size, dtype=torch.float64, device=self.like.device)
            for _, rows in self._some_rows(torch.nonzero(doubtful[: self.counted]).flatten()):
                total += block.contributions(_gradients_of_rows(rows)).sum(dim=0, dtype=torch.float64)
        encoded = self._sum(terms, factors)
        if type(block.codec) is not Everything:
            # Linear codecs: the encoded sum is the sum of encoded rows, at the cost of a row.
            encoded = block.codec.encode(encoded.unsqueeze(0))[0]
        return encoded if total is None else total + encoded

    def _without(self, doubtful: Bool[Tensor, " rows"]) -> tuple[tuple[Spans, FactoredGradient], ...]:
        """Returns the terms with zeros for some examples."""
        return tuple((spans, term.without(doubtful)) for spans, term in self.terms)

    def _sum(self, terms: tuple[tuple[Spans, FactoredGradient], ...], factors: Tensor) -> Float[Tensor, " dim"]:
        """Sum of whole rows times factors."""
        # A parameter that the loss does not depend on has no term, and its gradient is zero.
        covered = sum(term.size for _, term in terms) == self.dim
        flat = self.like.new_empty(self.dim) if covered else self.like.new_zeros(self.dim)
        table = SumTable(factors, flat)
        for spans, term in terms:
            if len(spans) == 1:  # written directly to its place
                start, stop = spans[0]
                if not term.enter_sum(table, start):
                    term.weighted_into(flat[start:stop], factors)
            else:
                for (start, stop), part in _split(spans, term.weighted(factors).unsqueeze(0)):
                    flat[start:stop] = part[0]
        table.run()
        return flat

    def _by_norm(self, block: Block, query: NormWithin) -> Float[Tensor, " size"]:
        """Sum of the answers to a query about the norm alone."""
        return self._answered(block, query)[: self.counted].sum(dim=0, dtype=torch.float64)

    def _answered(self, block: Block, query: NormWithin) -> Float[Tensor, "rows size"]:
        """Answers to a query about the norm alone; from rows if rounding might change the answer."""
        squares = self._squares
        norms = squares.value.sqrt()
        answers = query.answers(norms, LEAST_SHARE * norms).to(self.like.dtype)
        # The answer changes just beyond the threshold: near it the norm is taken from the row, unless the norm is exact
        # to the last digits.
        limit = query.threshold**2
        near = (squares.value - limit).abs() <= squares.slack + (_TRUSTED + 3 * LEAST_SHARE) * limit
        near &= ~(squares.slack <= 0.01 * _TRUSTED * limit)
        for part, rows in self._some_rows(torch.nonzero(near | ~_in_range(squares.value)).flatten()):
            answers[part] = query(_gradients_of_rows(rows))
        return block.bound(block.codec.encode(answers))

    def _some_rows(self, chosen: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields whole rows of the examples with these indices, a few at a time."""
        for part in parts(len(chosen), self.dim * self.like.element_size(), self.like, wide=True):
            yield chosen[part], self.rows(chosen[part])


def _gradients_of_rows(rows: Tensor) -> Gradients:
    finite = finite_rows(rows)
    return lambda _point: finite


def _compared(rows: Float[Tensor, "rows size"], direction: Float[Tensor, " size"]) -> tuple[Tensor, Tensor]:
    wide = rows.double()
    return wide @ direction.double(), wide.square().sum(dim=1)


def _certain_squares(bounded: BoundFactors | None, others: Squares) -> Squares:
    """Squared norms; certain values come from the kernel, so that they do not depend on the rest of the batch."""
    if bounded is None or bounded.certain is None:
        return others
    value = torch.where(bounded.certain, bounded.squares, others.value)
    return Squares(value, torch.where(bounded.certain, 0.0, others.slack))


def _in_range(squares: Tensor) -> Tensor:
    return (squares >= SMALL) & (squares <= 1 / SMALL)


def _doubtful(bound: Bound, squares: Squares) -> Bool[Tensor, " rows"]:
    """Mask of examples whose factor might exceed the bound, or differ from the reference's."""
    value, slack = squares.value, squares.slack
    # A NaN slack certifies nothing.
    uncertain = ~(slack <= _TRUSTED * value) | ~_in_range(value)
    if bound.kind == "clip":
        # Below the clip norm the factor is 1 for any norm.
        short = (value + slack) * (1 + _TRUSTED) + SMALL < bound.norm**2
        return uncertain & ~short
    return uncertain


def _split(spans: Spans, rows: Tensor) -> Iterator[tuple[tuple[int, int], Tensor]]:
    return zip(spans, rows.split([stop - start for start, stop in spans], dim=1), strict=True)


def _by_factors(
    term: Outer,
    span: tuple[int, int],
    shared: dict[int, list[BasisPiece]],
    factored: Mapping[int, FactoredBasis],
    bases: Mapping[int, BasisPiece],
) -> Iterator[tuple[int, Tensor]]:
    """Yields shares of coefficients of outer products, by number of the part, from the factors of public gradients.

    Args:
        term: the outer products.
        span: (start, stop) of their parameter.
        shared: by number of the part, the pieces of its basis for this term; processed pieces are removed.
        factored: bases whose factors are known.
        bases: start of each basis, with the basis itself.
    """
    pieces: list[tuple[int, OuterPiece]] = []
    for of, part in factored.items():
        first = bases[of][0]
        if of in shared and (factors := part.factors_of((span[0] - first, span[1] - first))) is not None:
            ((place, basis),) = shared.pop(of)
            pieces.append((of, (place, place + len(basis), *factors)))
    products = inner_with(term.signals, term.inputs, [piece for _, piece in pieces]) if pieces else []
    for (of, _), inner in zip(pieces, products, strict=True):
        yield of, factored[of].of_inner(inner)


def _within(part: BasisPiece, spans: Spans) -> list[BasisPiece]:
    """Returns the pieces of a basis that lie within these spans, each with its start in the term's rows."""
    first, basis = part
    overlaps = _overlaps(first, first + len(basis), spans)
    return [(place, basis[low - first : high - first]) for place, low, high in overlaps]


def _overlaps(first: int, last: int, spans: Spans) -> Iterator[tuple[int, int, int]]:
    """Yields the intersections of [first, last) with these spans: start in the term's rows, then start and end."""
    behind = 0
    for start, stop in spans:
        low, high = max(start, first), min(stop, last)
        if low < high:
            yield behind + low - start, low, high
        behind += stop - start
