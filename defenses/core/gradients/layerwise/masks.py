"""A mask of the flat parameter vector, split by parameter, with the number of kept coordinates of each."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from jaxtyping import Bool, Int, Int64
from torch import Tensor

Spans = tuple[tuple[int, int], ...]
"""(start, stop) of each parameter that a term holds, in a flat vector."""


class SpanMasks:
    """Parts of a mask by parameter."""

    def __init__(
        self, coordinates: Int[Tensor, " some"], dim: int, spans: Sequence[tuple[int, int]], *, inside: bool = True
    ) -> None:
        """Counts the kept coordinates of all spans at once: a query per span costs as much as a small layer's norms.

        Args:
            coordinates: coordinates of the vector, in ascending order.
            dim: length of the vector.
            spans: (start, stop) of the parameters.
            inside: True if the coordinates are kept, False if all others are.
        """
        marks = torch.full((dim,), not inside, dtype=torch.bool, device=coordinates.device)
        marks.index_fill_(0, coordinates, inside)
        # Number of coordinates before each edge.
        before = torch.searchsorted(coordinates, _edges(tuple(spans), coordinates.device)).tolist()
        self._parts = {span: marks[slice(*span)] for span in spans}
        self._kept = {
            (start, stop): last - first if inside else stop - start - (last - first)
            for (start, stop), (first, last) in zip(spans, before, strict=True)
        }

    def kept(self, spans: Spans) -> int:
        """Returns the number of kept coordinates of some parameters."""
        return sum(self._kept[span] for span in spans)

    def of(self, spans: Spans) -> Bool[Tensor, " size"]:
        """Returns the mask of some parameters, concatenated."""
        parts = [self._parts[span] for span in spans]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def share(self, spans: Spans) -> Bool[Tensor, " size"] | bool:
        """Returns the mask of some parameters; True if all coordinates are kept, False if none is."""
        kept = self.kept(spans)
        return kept > 0 if kept in (0, sum(stop - start for start, stop in spans)) else self.of(spans)


@lru_cache(maxsize=64)  # its construction takes as long as the whole search
def _edges(spans: Spans, device: torch.device) -> Int64[Tensor, "spans 2"]:
    return torch.tensor(spans, dtype=torch.int64, device=device).view(-1, 2)
