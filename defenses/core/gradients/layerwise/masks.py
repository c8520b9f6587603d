"""A mask of a flat vector, parameter by parameter."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from jaxtyping import Bool, Int, Int64
from torch import Tensor

Spans = tuple[tuple[int, int], ...]
"""(start, stop) of each parameter that a term holds, in a flat vector."""


class SpanMasks:
    """What a mask keeps of each parameter. A parameter's part is one tensor, so that who has seen it knows it again."""

    def __init__(
        self, coordinates: Int[Tensor, " some"], dim: int, spans: Sequence[tuple[int, int]], *, inside: bool = True
    ) -> None:
        """Counts what is kept of all spans at once: to ask each of them for it costs as much as a small layer's norms.

        Args:
            coordinates: in ascending order.
            dim: length of the vector.
            spans: (start, stop) of the parameters.
            inside: whether the coordinates are kept, or all others.
        """
        marks = torch.full((dim,), not inside, dtype=torch.bool, device=coordinates.device)
        marks.index_fill_(0, coordinates, inside)
        # How many coordinates come before each edge.
        before = torch.searchsorted(coordinates, _edges(tuple(spans), coordinates.device)).tolist()
        self._parts = {span: marks[slice(*span)] for span in spans}
        self._kept = {
            (start, stop): last - first if inside else stop - start - (last - first)
            for (start, stop), (first, last) in zip(spans, before, strict=True)
        }

    def kept(self, spans: Spans) -> int:
        """How many coordinates of some parameters are kept."""
        return sum(self._kept[span] for span in spans)

    def of(self, spans: Spans) -> Bool[Tensor, " size"]:
        """The mask of some parameters, one after another."""
        parts = [self._parts[span] for span in spans]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def share(self, spans: Spans) -> Bool[Tensor, " size"] | bool:
        """The mask of some parameters; True where all of them is kept, False where nothing is."""
        kept = self.kept(spans)
        return kept > 0 if kept in (0, sum(stop - start for start, stop in spans)) else self.of(spans)

    def partly(self, span: tuple[int, int]) -> Bool[Tensor, " size"] | None:
        """The mask of one parameter; None where all or nothing of it is kept."""
        return self._parts[span] if 0 < self._kept[span] < span[1] - span[0] else None


@lru_cache(maxsize=64)  # to make one takes as long as to search all of it
def _edges(spans: Spans, device: torch.device) -> Int64[Tensor, "spans 2"]:
    return torch.tensor(spans, dtype=torch.int64, device=device).view(-1, 2)
