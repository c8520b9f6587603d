"""Rows of a convolution that are kept for the sum, as they were made: brought into order where that costs the least.

What makes rows leaves their numbers in an order of its own. To bring every row into the weight's order would take as
long as to make it: so masks, directions and sums are brought into the rows' order, or out of it, instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakIdKeyDictionary

from ....plan.linear_algebra.products import product
from ....plan.public_data import RowSizes
from ..factors import BasisPiece, FactoredGradient, GradientRows, Squares, products_with
from ..tables import NormTable, SumTable
from .convolution_settings import Geometry

_REORDERED: Any = WeakIdKeyDictionary()
"""By the tensor that directions are of, for as long as it is there: of each part the version that was asked for, and
from the second time on, as of a basis that is kept for some steps, the directions in the order of rows."""
_MOST_HELD = 2**24  # numbers of directions, from which on memory counts for more than time


@lru_cache(maxsize=512)
def product_order(geometry: Geometry) -> ProductOrder:
    """The one order of a layer's settings."""
    return ProductOrder(geometry)


class ProductOrder:
    """[groups, height, width, entering, leaving]: sums over positions of patch times derivative.

    Attributes:
        sizes: of a row.
        simple: (height * width, entering, leaving) where there is one group; else None.
    """

    def __init__(self, geometry: Geometry) -> None:
        """Takes the layer's settings."""
        self._geometry, self._weight, self._groups = geometry, geometry.weight_shape, geometry.groups
        out, entering, height, width = self._weight
        self.sizes = (self._groups, height, width, entering, out // self._groups)
        self.simple = (height * width, entering, out) if self._groups == 1 else None

    def ordered(self, values: Float[Tensor, " size"] | Bool[Tensor, " size"]) -> Tensor:
        """Numbers of the weight, as they lie in a row."""
        out, entering, height, width = self._weight
        groups = self._groups
        return values.view(groups, out // groups, entering, height, width).permute(0, 3, 4, 2, 1).flatten()

    def restored(self, values: Float[Tensor, " size"]) -> Float[Tensor, "leaving entering height width"]:
        """Numbers of a row, as the weight has them."""
        return values.view(self.sizes).permute(0, 4, 3, 1, 2).flatten(0, 1)

    def in_order(self, made: Float[Tensor, "some size"]) -> Float[Tensor, "some size"]:
        """Rows in the weight's own order."""
        return made.unflatten(1, self.sizes).permute(0, 1, 5, 4, 2, 3).reshape(len(made), -1)

    def products(self, made: Float[Tensor, "some size"], start: int, basis: Float[Tensor, "span k"]) -> Tensor:
        """Inner products with directions, of the channels that leave in them alone where those are few."""
        out, entering, height, width = self._weight
        groups, patch = self._groups, entering * height * width
        # A group of directions may begin or end within a weight.
        first, last = start // patch, -(-(start + len(basis)) // patch)
        if groups > 1 or 2 * (last - first) > out:
            first, last = 0, out
        some = made
        if last - first < out:
            some = made.unflatten(1, (groups * patch, -1))[:, :, first:last].reshape(len(made), -1)
        return product(some, self._directions(start, basis, first, last).T)

    def _directions(self, start: int, basis: Float[Tensor, "span k"], first: int, last: int) -> Tensor:
        """Directions as rows that lie as `made` does, of the channels [first, last) that leave."""
        _, entering, height, width = self._weight
        groups, patch = self._groups, entering * height * width
        # Of a basis that is kept for some steps, once: it is as long as many rows.
        owner = basis if basis._base is None else basis._base
        version = None if basis.is_inference() else basis._version
        key = (self._geometry, start, basis.storage_offset(), basis.shape, basis.stride())
        held = _REORDERED.get(owner, {})
        asked, reordered = held.get(key, (None, None))
        if reordered is not None and asked == version:
            return reordered
        # Directions first, as they lie in memory (`basis.py`): what is permuted is then one direction at a time.
        before, behind = start - first * patch, last * patch - start - len(basis)
        turned = F.pad(basis.T, (before, behind)) if before or behind else basis.T
        split = turned.unflatten(1, (groups, (last - first) // groups, entering, height, width))
        found = split.permute(0, 1, 4, 5, 3, 2).reshape(len(split), patch * (last - first))
        # A view would keep alive what it is held for.
        if found._base is None and version is not None and found.numel() <= _MOST_HELD:
            _REORDERED[owner] = {**held, key: (version, found if asked == version else None)}
        return found


def along(order: ProductOrder, made: Float[Tensor, "some size"], pieces: Sequence[BasisPiece]) -> list[Tensor]:
    """Inner products of rows with pieces of bases; rows or directions, whichever are fewer, are reordered."""
    if sum(basis.shape[1] for _, basis in pieces) > len(made):
        return products_with(order.in_order(made), pieces)
    return [order.products(made, start, basis) for start, basis in pieces]


class KeptRows(FactoredGradient):
    """Rows in an order of their own."""

    def __init__(
        self,
        values: Float[Tensor, "rows size"],
        order: ProductOrder,
        measured: Float[Tensor, " rows"] | None = None,
        masked: tuple[Bool[Tensor, " size"], Float[Tensor, " rows"]] | None = None,
    ) -> None:
        """Takes rows that were made.

        Args:
            values: the rows.
            order: how their numbers lie.
            measured: their `squared_lengths`, if somebody has them.
            masked: a mask, in the weight's order, and squared norms of what it leaves, if somebody has those.
        """
        self._rows, self._order, self._masked = GradientRows(values, measured), order, masked
        self.like, self.scratch = values, 0
        self.examples, self.size = values.shape

    def rows(self, which: slice | Tensor) -> Tensor:
        """The rows of some examples."""
        return self._order.in_order(self._rows.values[which])

    def weighted(self, factors: Tensor) -> Float[Tensor, "leaving entering height width"]:
        """One matrix-vector product, whose result is brought into order."""
        return self._order.restored(self._rows.weighted(factors))

    def enter(self, norms: NormTable, mask: Bool[Tensor, " size"] | bool) -> bool:
        """The rows, and what the mask leaves of them, which may have been measured when they were made."""
        if isinstance(mask, bool):
            return self._rows.enter(norms, mask)
        if self._masked is not None and self._masked[0] is mask:
            return norms.add(self._rows.side(norms), under=norms.squares(self._masked[1]))
        return self._rows.enter(norms, self._order.ordered(mask))

    def enter_sum(self, sums: SumTable, start: int) -> bool:
        """The rows, with the order of their numbers."""
        return self._order.simple is not None and sums.add(self._rows.values, start, self._order.simple)

    def without(self, bad: Tensor) -> KeptRows:
        """The same with zero rows for some examples."""
        return KeptRows(self._rows.without(bad).values, self._order)

    def largest(self) -> Tensor:
        """Their norms, which bound their entries."""
        return self._rows.largest()

    def squares(self) -> Squares:
        """In one pass over the rows."""
        return self._rows.squares()

    def masked_squares(self, mask: Bool[Tensor, " size"]) -> Squares:
        """Those that came with the rows, of the very same mask; else by the mask in the rows' order."""
        if self._masked is not None and self._masked[0] is mask:
            return Squares.exact(self._masked[1])
        return self._rows.masked_squares(self._order.ordered(mask))

    @property
    def made_as(self) -> RowSizes:
        """Sizes of the rows' order."""
        return self._order.sizes

    def made(self) -> Tensor:
        """All rows, as they were made."""
        return self._rows.values

    def along_made(self, directions: Float[Tensor, "size k"]) -> tuple[Tensor, Tensor]:
        """Inner products with directions in the rows' own order, and norms."""
        return product(self._rows.values, directions), self._rows.norms()

    def along(self, pieces: Sequence[BasisPiece]) -> tuple[list[Tensor], Tensor]:
        """A product for each piece, and one pass for the norms."""
        return along(self._order, self._rows.values, pieces), self._rows.norms()

    def inner(self, direction: Float[Tensor, " size"]) -> Tensor:
        """By the direction in the rows' order."""
        return self._rows.inner(self._order.ordered(direction))

    def norms(self) -> Tensor:
        """In one pass over the rows."""
        return self._rows.norms()
