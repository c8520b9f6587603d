"""Order in which the kernel for inner products (`row_products.py`) reads rows, or outer products."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Int64
from torch import Tensor


@dataclass(frozen=True)
class Runs:
    """Tables of runs of consecutive numbers, and of strips of as many runs as are added up at a time.

    Attributes:
        runs: place in left rows, place in right rows, length, index of the factor, place in the strip.
        strips: first run, end of runs, vectors.
    """

    runs: Int64[Tensor, "n 5"]
    strips: Int64[Tensor, "m 3"]


@lru_cache(maxsize=256)
def whole_runs(size: int, strip: int, lanes: int) -> Runs:
    """Traversal of whole rows, a strip at a time."""
    places = torch.arange(0, size, strip)
    widths, number = (size - places).clamp(max=strip), torch.arange(len(places))
    none = torch.zeros_like(places)
    vectors = (widths + lanes - 1) // lanes
    return Runs(
        torch.stack([places, places, widths, none, none], dim=1), torch.stack([number, number + 1, vectors], dim=1)
    )


@lru_cache(maxsize=256)
def outer_runs(start: int, stop: int, width: int, strip: int, lanes: int) -> Runs:
    """Traversal of flattened outer products over [start, stop): runs of inputs, each with the index of its output."""
    runs: list[tuple[int, int, int, int, int]] = []
    strips: list[tuple[int, int, int]] = []
    first, filled, at = 0, 0, start
    while at < stop:
        output, place = divmod(at, width)
        length = min(width - place, stop - at, strip)
        room = -(-length // lanes) * lanes
        if filled + room > strip:
            strips.append((first, len(runs), filled // lanes))
            first, filled = len(runs), 0
        runs.append((place, at - start, length, output, filled))
        filled, at = filled + room, at + length
    strips.append((first, len(runs), filled // lanes))
    return Runs(torch.tensor(runs), torch.tensor(strips))
