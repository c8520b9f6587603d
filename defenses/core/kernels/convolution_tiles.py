"""Tiles of a convolution's weight gradient: assigns its entries to tiles of vector registers.

The gradient is a product of patches, [kernel, input channels], and output gradients, [output channels]. Each number of
a patch multiplies vectors of adjacent channels, the last of which may be partly idle.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

# Larger patches are processed line by line of the kernel, so that the code does not grow with them.
_MOST_UNROLLED = 160


@dataclass(frozen=True)
class Patch:
    """Patch of the padded input that a position of the output depends on.

    Attributes:
        kernel: height and width.
        dilation: of the kernel.
        entering: channels.
        line: numbers of a line of the padded input.
    """

    kernel: tuple[int, int]
    dilation: tuple[int, int]
    entering: int
    line: int

    def lines(self) -> list[list[int]]:
        """Returns the offsets of its numbers from the first, for each line of the kernel."""
        (high, wide), (down, across) = self.kernel, self.dilation
        starts = [[y * down * self.line + x * across * self.entering for x in range(wide)] for y in range(high)]
        return [[start + channel for start in line for channel in range(self.entering)] for line in starts]


@dataclass(frozen=True)
class PatchTile:
    """Adjacent numbers of a patch.

    Attributes:
        first: index of the first number within a row of the gradient.
        place: its offset in the padded input from the position's first pixel.
        offsets: offsets of the tile's numbers from that place.
    """

    first: int
    place: int
    offsets: tuple[int, ...]


def vectors_beside(vectors: int) -> int:
    """Returns the number of channel vectors in a tile, for each of its patch's numbers."""
    return 3 if vectors % 3 == 0 else min(2, vectors)


def tiles_of(patch: Patch, most: int) -> list[PatchTile]:
    """Splits a patch into tiles of at most `most` numbers, of nearly equal size."""
    lines = patch.lines()
    joined = [place for line in lines for place in line]
    # Tiles of a long line have the same offsets in every line, and share their code.
    split, tiles, first = lines if len(joined) > _MOST_UNROLLED else [joined], [], 0
    for numbers in split:
        count = -(-len(numbers) // most)
        edges = [round(len(numbers) * i / count) for i in range(count + 1)]
        for tile_numbers in (numbers[a:b] for a, b in pairwise(edges)):
            tiles.append(PatchTile(first, tile_numbers[0], tuple(step - tile_numbers[0] for step in tile_numbers)))
            first += len(tile_numbers)
    return tiles


def even(total: int, most: int) -> int:
    """Returns the largest part when `total` is split as evenly as possible into the fewest parts of at most `most`."""
    return -(-total // -(-total // max(1, most)))
