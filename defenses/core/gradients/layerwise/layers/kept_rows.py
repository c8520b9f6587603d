"""Rows of a convolution that are kept for the sum, in the order in which they were computed.

Kernels write the numbers of a row in their own order. Reordering every row to the weight's order would take as long as
computing it, so masks and directions are reordered to the rows' order, and sums back to the weight's order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakIdKeyDictionary

from ....kernels.bound_factors import NormTable
from ....kernels.weighted_rows import SumTable
from ....plan.linear_algebra.products import product
from ....plan.public_data import RowSizes
from ..factors import BasisPiece, FactoredGradient, GradientRows, Squares, products_with
from .convolution_settings import Geometry

_REORDERED: Any = WeakIdKeyDictionary()
"""Cache of reordered directions by the tensor that holds them, while it is alive.

The key is a piece of that tensor, the value the tensor's version at the last request and, from the second request of
the same version on, the directions in the rows' order. A basis that is requested once is therefore not cached.
"""
_MOST_HELD = 2**24  # entries of directions, above which they are reordered each time to save memory


@lru_cache(maxsize=512)
def product_order(geometry: Geometry) -> ProductOrder:
    """Returns the order for a layer's settings, which is cached."""
    return ProductOrder(geometry)


class ProductOrder:
    """Order of a row [groups, height, width, input channels, output channels], in which products of patches leave it.

    Attributes:
        sizes: sizes of a row in this order.
        simple: (height * width, entering, leaving) for a single group; else None.
    """

    def __init__(self, geometry: Geometry) -> None:
        """Takes the layer's settings."""
        self._geometry, self._weight, self._groups = geometry, geometry.weight_shape, geometry.groups
        out, entering, height, width = self._weight
        self.sizes = (self._groups, height, width, entering, out // self._groups)
        self.simple = (height * width, entering, out) if self._groups == 1 else None

    def ordered(self, values: Float[Tensor, " size"] | Bool[Tensor, " size"]) -> Tensor:
        """Reorders numbers of the weight to the order of a row."""
        out, entering, height, width = self._weight
        groups = self._groups
        return values.view(groups, out // groups, entering, height, width).permute(0, 3, 4, 2, 1).flatten()

    def restored(self, values: Float[Tensor, " size"]) -> Float[Tensor, "leaving entering height width"]:
        """Reorders numbers of a row to the weight's shape."""
        return values.view(self.sizes).permute(0, 4, 3, 1, 2).flatten(0, 1)

    def in_order(self, rows: Float[Tensor, "some size"]) -> Float[Tensor, "some size"]:
        """Reorders rows to the weight's own order."""
        return rows.unflatten(1, self.sizes).permute(0, 1, 5, 4, 2, 3).reshape(len(rows), -1)

    def products(self, rows: Float[Tensor, "some size"], start: int, basis: Float[Tensor, "span k"]) -> Tensor:
        """Inner products with directions; if these cover few output channels, only those channels are multiplied."""
        out, entering, height, width = self._weight
        groups, patch = self._groups, entering * height * width
        # A piece may begin or end within the weights of an output channel.
        first, last = start // patch, -(-(start + len(basis)) // patch)
        if groups > 1 or 2 * (last - first) > out:
            first, last = 0, out
        columns = rows
        if last - first < out:
            columns = rows.unflatten(1, (groups * patch, -1))[:, :, first:last].reshape(len(rows), -1)
        return product(columns, self._directions(start, basis, first, last).T)

    def _directions(self, start: int, basis: Float[Tensor, "span k"], first: int, last: int) -> Tensor:
        """Returns directions in the order of `made`, for the output channels [first, last)."""
        _, entering, height, width = self._weight
        groups, patch = self._groups, entering * height * width
        # A basis that is kept for some steps is reordered once: it is as long as many rows.
        owner = basis if basis._base is None else basis._base
        version = None if basis.is_inference() else basis._version
        key = (self._geometry, start, basis.storage_offset(), basis.shape, basis.stride())
        remembered = _REORDERED.get(owner, {})
        last_version, reordered = remembered.get(key, (None, None))
        if reordered is not None and last_version == version:
            return reordered
        # Directions first, as they lie in memory (`basis.py`): the permutation then moves direction by direction.
        before, behind = start - first * patch, last * patch - start - len(basis)
        turned = F.pad(basis.T, (before, behind)) if before or behind else basis.T
        split = turned.unflatten(1, (groups, (last - first) // groups, entering, height, width))
        directions = split.permute(0, 1, 4, 5, 3, 2).reshape(len(split), patch * (last - first))
        # A view would keep its own cache key alive.
        if directions._base is None and version is not None and directions.numel() <= _MOST_HELD:
            _REORDERED[owner] = {**remembered, key: (version, directions if last_version == version else None)}
        return directions


def along(order: ProductOrder, rows: Float[Tensor, "some size"], pieces: Sequence[BasisPiece]) -> list[Tensor]:
    """Inner products of rows with pieces of bases; rows or directions, whichever are fewer, are reordered."""
    if sum(basis.shape[1] for _, basis in pieces) > len(rows):
        return products_with(order.in_order(rows), pieces)
    return [order.products(rows, start, basis) for start, basis in pieces]


class KeptRows(FactoredGradient):
    """Rows in the order in which they were computed."""

    def __init__(
        self,
        values: Float[Tensor, "rows size"],
        order: ProductOrder,
        measured: Float[Tensor, " rows"] | None = None,
    ) -> None:
        """Takes computed rows.

        Args:
            values: the rows.
            order: order of their numbers.
            measured: their `squared_lengths`, if already measured.
        """
        self._rows, self._order = GradientRows(values, measured), order
        self._mask: tuple[Tensor, Tensor] | None = None
        self.like, self.scratch = values, 0
        self.examples, self.size = values.shape

    def rows(self, index: slice | Tensor) -> Tensor:
        """Returns the rows of some examples."""
        return self._order.in_order(self._rows.values[index])

    def weighted(self, factors: Tensor) -> Float[Tensor, "leaving entering height width"]:
        """Weighted sum by a matrix-vector product, whose result is reordered."""
        return self._order.restored(self._rows.weighted(factors))

    def enter(self, norms: NormTable, mask: Bool[Tensor, " size"] | bool) -> bool:
        """Enters the rows, and the masked rows."""
        return self._rows.enter(norms, mask if isinstance(mask, bool) else self._ordered(mask))

    def enter_sum(self, sums: SumTable, start: int) -> bool:
        """Enters the rows, with the order of their numbers."""
        return self._order.simple is not None and sums.add(self._rows.values, start, self._order.simple)

    def without(self, bad: Tensor) -> KeptRows:
        """Returns a copy with zero rows for some examples."""
        return KeptRows(self._rows.without(bad).values, self._order)

    def largest(self) -> Tensor:
        """Returns the norms, which bound the entries."""
        return self._rows.largest()

    def squares(self) -> Squares:
        """Squared norms in a single pass over the rows."""
        return self._rows.squares()

    def masked_squares(self, mask: Bool[Tensor, " size"]) -> Squares:
        """Squared norms of the masked rows, in the rows' order."""
        return self._rows.masked_squares(self._ordered(mask))

    def _ordered(self, mask: Bool[Tensor, " size"]) -> Tensor:
        # Kept, because a table of norms may be begun in vain.
        if self._mask is None or self._mask[0] is not mask:
            self._mask = (mask, self._order.ordered(mask))
        return self._mask[1]

    @property
    def made_as(self) -> RowSizes:
        """Sizes of the rows' order."""
        return self._order.sizes

    def made(self) -> Tensor:
        """Returns all rows, in the order of their computation."""
        return self._rows.values

    def along_made(self, directions: Float[Tensor, "size k"]) -> tuple[Tensor, Tensor]:
        """Inner products with directions in the rows' own order, and norms."""
        return product(self._rows.values, directions), self._rows.norms()

    def along(self, pieces: Sequence[BasisPiece]) -> tuple[list[Tensor], Tensor]:
        """A product for each piece, and a single pass for the norms."""
        return along(self._order, self._rows.values, pieces), self._rows.norms()

    def inner(self, direction: Float[Tensor, " size"]) -> Tensor:
        """Inner products with the direction in the rows' order."""
        return self._rows.inner(self._order.ordered(direction))

    def norms(self) -> Tensor:
        """Norms in a single pass over the rows."""
        return self._rows.norms()
