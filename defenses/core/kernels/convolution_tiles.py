"""Tiles of a convolution's gradient: which of its sums are formed side by side, and in which lanes of vectors.

The gradient is a product of patches, [kernel, entering channels], and derivatives, [leaving channels]. Each number of a
patch multiplies vectors of neighbouring channels. The last channels may leave much of such a vector idle: then each of
these multiplies vectors of the patch's numbers instead. With vectors of 16, 36 channels are 32 and 4: the 4 take a
quarter of a vector for each number of the patch, not a whole one.

Narrower vectors gain nothing: a processor multiplies as few of them in a cycle. Vectors of 4 numbers times 4 channels
gain less (Zen 5): shuffles that bring these into place take the units that multiply.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

# Patches of more numbers are walked line by line of the kernel, so that code does not grow with them.
_MOST_UNROLLED = 160


@dataclass(frozen=True)
class Patch:
    """What one position of the output sees.

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
        """Where its numbers lie, from its first one on, for each line of the kernel."""
        (high, wide), (down, across) = self.kernel, self.dilation
        starts = [[y * down * self.line + x * across * self.entering for x in range(wide)] for y in range(high)]
        return [[start + channel for start in line for channel in range(self.entering)] for line in starts]


@dataclass(frozen=True)
class PatchTile:
    """Neighbouring numbers of a patch.

    Attributes:
        first: number of the first in a row.
        place: of the first in the padded input, from the position's first pixel on.
        groups: places of those that are loaded together, from that place on.
    """

    first: int
    place: int
    groups: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class ChannelPart:
    """Channels whose sums lie in vectors of one kind.

    Attributes:
        channels: that leave; the first of every vector, or each one where vectors lie along the patch.
        beside: how many of these a tile takes.
        tiles: of the patch.
    """

    channels: range
    beside: int
    tiles: Sequence[PatchTile]

    @property
    def vectors(self) -> int:
        """Of all sums."""
        return len(self.channels) * sum(len(tile.groups) for tile in self.tiles)


def parts(patch: Patch, leaving: int, lanes: int, most: int) -> list[ChannelPart]:
    """The parts of a layer's gradient.

    Args:
        patch: of the layer.
        leaving: channels.
        lanes: numbers of a vector.
        most: vectors of sums that a tile may have.
    """
    few = leaving % lanes
    along = [_along_patch(patch, range(leaving - few, leaving), lanes, most)] if few else []
    # Else a vector for each number. A load that each of the tiles repeats takes half as long as a product.
    if few and along[0].vectors + _loads(along[0]) / 2 >= sum(len(line) for line in patch.lines()):
        few, along = 0, []
    if leaving == few:
        return along
    channels = range(0, leaving - few, lanes)
    beside = 3 if len(channels) % 3 == 0 else min(2, len(channels))
    return [ChannelPart(channels, beside, _tiles(patch, 1, most // beside)), *along]


def runs(places: Sequence[int]) -> list[range]:
    """Which of some places lie beside one another."""
    starts = [i for i in range(len(places)) if not i or places[i] != places[i - 1] + 1]
    return [range(a, b) for a, b in pairwise([*starts, len(places)])]


def even(total: int, most: int) -> int:
    """The size of the fewest parts of at most so many, as even as they can be."""
    return -(-total // -(-total // max(1, most)))


def _along_patch(patch: Patch, channels: range, lanes: int, most: int) -> ChannelPart:
    # Of few channels all loads of the patch serve few products; with many, registers do not suffice for what is spread.
    groups = max(len(tile.groups) for tile in _tiles(patch, lanes, most))
    beside = even(len(channels), max(most // 6, 3 * most // 4 // groups))
    return ChannelPart(channels, beside, _tiles(patch, lanes, most // beside))


def _loads(part: ChannelPart) -> int:
    each = sum(len(runs(group)) for tile in part.tiles for group in tile.groups)
    return each * -(-len(part.channels) // part.beside)


def _tiles(patch: Patch, together: int, most: int) -> list[PatchTile]:
    """A patch's numbers in tiles of at most so many groups of so many numbers; tiles are nearly of one size."""
    lines = patch.lines()
    joined = [place for line in lines for place in line]
    by_line = [_chunks(line, together) for line in lines]
    if len(joined) > _MOST_UNROLLED:
        walked = by_line  # tiles of a long line have the same groups in every line, and share their code
    elif len(_chunks(joined, together)) < sum(map(len, by_line)):
        walked = [_chunks(joined, together)]
    else:
        walked = [[group for groups in by_line for group in groups]]
    tiles, first = [], 0
    for groups in walked:
        count = -(-len(groups) // most)
        edges = [round(len(groups) * i / count) for i in range(count + 1)]
        for some in (groups[a:b] for a, b in pairwise(edges)):
            place = some[0][0]
            tiles.append(PatchTile(first, place, tuple(tuple(step - place for step in group) for group in some)))
            first += sum(map(len, some))
    return tiles


def _chunks(values: Sequence[int], size: int) -> list[Sequence[int]]:
    return [values[i : i + size] for i in range(0, len(values), size)]
