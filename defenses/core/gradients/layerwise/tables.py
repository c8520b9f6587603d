"""Tables of a batch's rows, from which kernels compute all bounding factors, or all weighted sums, in a single call.

PyTorch operations on a few hundred numbers take longer to launch than to run, and a batch on a small network needs
dozens of them, which together take as long as the forward pass.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ...kernels.bound_factors import KINDS, PART, bound_factors
from ...kernels.weighted_rows import MATRIX, weighted_rows
from ...plan.bound import Bound, normalize

ANY_BOUND = normalize(1.0, regulariser=1.0)
"""Bound of calls that need squared norms alone.

Not `clip`, under which a row shorter than the clip norm is certain although its norm is not.
"""
# Size of a sum, from which on PyTorch's sums on several threads are faster.
_WORTH_A_THREAD = 2**22
# Number of products, up to which outer products are added up in float64 by the kernel: MKL's float32 sums are twice as
# fast, but scaling the rows and calling MKL takes 50 us within a step, when its code has left the cache.
_MOST_PRODUCTS = 2**20
# The same if the second factor is narrow and does not fill the vectors of the kernel.
_MOST_NARROW, _NARROW = 2**18, 16
# Size of a convolution's weight, up to which its order is restored in the cache.
_MOST_IN_ORDER = 2**16


def measurable(values: Tensor) -> bool:
    """Returns whether compiled code can read the numbers in place: contiguous rows, on the CPU."""
    plain = type(values) is Tensor and values.is_cpu and values.dtype in (torch.float32, torch.float64)
    return plain and values.stride(-1) == 1


class BoundFactors(NamedTuple):
    """Factors that bound a batch's gradients.

    Attributes:
        factors: factors of the gradients, in their dtype.
        squares: squared norms, float64.
        certain: mask of the examples for which both are valid; None if they are for all.
    """

    factors: Float[Tensor, " rows"]
    squares: Float[Tensor, " rows"]
    certain: Bool[Tensor, " rows"] | None


class NormTable:
    """Table of the parts that the norms of a batch's gradients consist of."""

    def __init__(self, examples: int, like: Tensor) -> None:
        """Starts empty.

        Args:
            examples: number of examples.
            like: tensor of the gradients' dtype, on their device.
        """
        self._examples, self._like = examples, like
        self._sides: list[int] = []
        self._parts: list[int] = []
        self._numbers: dict[tuple[int, ...], int] = {}
        self._alive: list[Tensor] = []

    def add(self, *sides: int | None, counts: bool = True, under: int | None = -1) -> bool:
        """Adds rows, or outer products of two rows, as a part of the gradients.

        Args:
            sides: index of a side, or of two sides; None for a side that compiled code cannot read.
            counts: True if the part's norm is needed, False if the part must only be finite.
            under: index of the side with the part's masked values; -1 for no mask.

        Returns:
            True if all sides are available.
        """
        first, second = sides if len(sides) == 2 else (*sides, -1)
        if first is None or second is None or under is None:
            return False
        self._parts += (first, second, under if counts else -2)
        return True

    def rows(self, values: Float[Tensor, "rows size"], mask: Bool[Tensor, " size"] | None = None) -> int | None:
        """Adds a side (rows, or masked rows) and returns its index; None if compiled code cannot read the rows.

        Args:
            values: rows of the examples.
            mask: mask of the rows' numbers, in their order.
        """
        marks = 0
        if values.dtype != self._like.dtype or not measurable(values):
            return None
        if mask is not None:
            if not (mask.is_cpu and mask.is_contiguous()):
                return None
            self._alive.append(mask)
            marks = mask.data_ptr()
        return self._side(values.data_ptr(), values.stride(0), values.shape[1], marks, 0)

    def weighted(self, values: Float[Tensor, "rows size"], weights: Float[Tensor, "rows size"]) -> int | None:
        """Adds a side (rows whose squares are weighted) and returns its index; None if compiled code cannot read them.

        Args:
            values: rows of the examples.
            weights: weights of the squares.
        """
        both = (values, weights)
        if any(each.dtype != self._like.dtype or not measurable(each) or not each.shape[1] for each in both):
            return None
        self._alive.append(weights)
        place = (values.data_ptr(), values.stride(0), values.shape[1])
        return self._side(*place, weights.data_ptr(), weights.stride(0))

    def squares(self, measured: Float[Tensor, " rows"]) -> int | None:
        """Adds a side (known squared norms, float64) and returns its index; None if compiled code cannot read them."""
        if measured.dtype != torch.float64 or not (measurable(measured) and measured.is_contiguous()):
            return None
        self._alive.append(measured)
        return self._side(measured.data_ptr(), 0, -1, 0, 0)

    def factors(self, bound: Bound) -> BoundFactors | None:
        """Returns the factors that bound the gradients; None without parts or examples.

        Args:
            bound: a bound of any kind in `KINDS`.
        """
        if not (self._parts and self._examples):
            return None
        factors, squares = (self._like.new_empty(self._examples, dtype=of) for of in (None, torch.float64))
        sides, parts, doubtful = array("q", self._sides), array("q", self._parts), array("q", (0,))
        certain = self._like.new_empty(self._examples, dtype=torch.bool)
        memory = array("d", (0.0,)) * len(self._numbers)
        bound_factors(wide=self._like.dtype == torch.float64)(
            sides.buffer_info()[0],
            len(self._numbers),
            parts.buffer_info()[0],
            len(parts) // PART,
            self._examples,
            KINDS.index(bound.kind),
            bound.norm,
            bound.regulariser,
            memory.buffer_info()[0],
            factors.data_ptr(),
            squares.data_ptr(),
            certain.data_ptr(),
            doubtful.buffer_info()[0],
        )
        return BoundFactors(factors, squares, certain if doubtful[0] else None)

    def _side(self, *line: int) -> int:
        # Equal sides are entered once: a linear layer's output gradients are the rows of its bias too.
        if line not in self._numbers:
            self._numbers[line] = len(self._numbers)
            self._sides += line
        return self._numbers[line]


class SumTable:
    """Table of matrices whose rows are added up, each sum into its place."""

    def __init__(self, factors: Float[Tensor, " rows"], flat: Float[Tensor, " dim"]) -> None:
        """Starts empty.

        Args:
            factors: factors of the rows.
            flat: vector to which the sums are written.
        """
        self._factors, self._to, self._bytes = factors, flat.data_ptr(), flat.element_size()
        plain = measurable(factors) and measurable(flat) and factors.is_contiguous() and flat.is_contiguous()
        self._dtype = factors.dtype if plain and factors.dtype == flat.dtype and factors.numel() else None
        self._lines: list[int] = []
        self._longest, self._widest = 0, 0

    def add(self, values: Float[Tensor, "rows size"], start: int, order: tuple[int, int, int] = (0, 0, 0)) -> bool:
        """Adds a matrix; returns False if compiled code cannot add it up, or PyTorch is faster.

        Args:
            values: rows of the examples.
            start: beginning of their part in the vector of sums.
            order: (height * width, entering, leaving) of a convolution whose rows have their own order.
        """
        size = values.shape[1]
        if values.dtype != self._dtype or not (size and measurable(values)):
            return False
        if (values.numel() >= _WORTH_A_THREAD and torch.get_num_threads() > 1) or (order[0] and size > _MOST_IN_ORDER):
            return False
        self._lines += (values.data_ptr(), values.stride(0), size, self._to + start * self._bytes, *order, 0, 0, 0)
        if order[0]:
            self._longest = max(self._longest, size)
        return True

    def outer(self, leading: Float[Tensor, "rows a"], values: Float[Tensor, "rows b"], start: int) -> bool:
        """Adds outer products [a, b] of the rows of two matrices; returns False if PyTorch has to add them up.

        Args:
            leading: rows of the examples.
            values: likewise.
            start: beginning of their part in the vector of sums.
        """
        products, both = leading.numel() * values.shape[1], (leading, values)
        most = _MOST_NARROW if values.shape[1] < _NARROW else _MOST_PRODUCTS
        if not 0 < products <= most or not all(v.dtype == self._dtype and measurable(v) for v in both):
            return False
        self._lines += (values.data_ptr(), values.stride(0), values.shape[1], self._to + start * self._bytes, 0, 0, 0)
        self._lines += (leading.data_ptr(), leading.stride(0), leading.shape[1])
        self._widest = max(self._widest, leading.numel())
        return True

    def run(self) -> None:
        """Writes the sums."""
        if self._lines:
            lines = array("q", self._lines)
            memory = self._factors.new_empty(self._longest) if self._longest else None
            weights = array("d", (0.0,)) * (len(self._factors) + self._widest)
            weighted_rows(wide=self._dtype == torch.float64)(
                lines.buffer_info()[0],
                len(lines) // MATRIX,
                self._factors.data_ptr(),
                len(self._factors),
                0 if memory is None else memory.data_ptr(),
                weights.buffer_info()[0],
            )
