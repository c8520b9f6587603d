"""Order in which the kernel for inner products (`row_products.py`) reads rows or outer products."""

from __future__ import annotations

from functools import lru_cache

import torch
from jaxtyping import Int64
from torch import Tensor


@lru_cache(maxsize=256)
def runs_over(
    start: int, stop: int, width: int, strip: int, lanes: int
) -> tuple[Int64[Tensor, "n 5"], Int64[Tensor, "m 3"]]:
    """Returns the runs of consecutive numbers of flattened outer products over [start, stop), or of rows as one output.

    A run is (place in left rows, place in right rows, length, index of the output, place in the strip). A strip has as
    many runs as are added up at a time: (first run, end of runs, vectors).
    """
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
    return torch.tensor(runs), torch.tensor(strips)
