"""Tiles of a convolution's gradient: assigns its sums to tiles and to the lanes of vectors.

The gradient is a product of patches, [kernel, entering channels], and derivatives, [leaving channels]. Each number of a
patch multiplies vectors of adjacent channels. The last channels may leave most of such a vector idle: then each of
these multiplies vectors of the patch's numbers instead. With vectors of 16, 36 channels are 32 and 4: the 4 take a
quarter of a vector for each number of the patch, not a whole vector.

Narrower vectors gain nothing: a processor multiplies no more of them in a cycle. Vectors of 4 numbers times 4 channels
gain less (Zen 5): the shuffles that arrange them occupy the units that multiply.
"""

from __future__ import annotations

from collections.abc import Sequence
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
        first: index of the first within a row.
        place: of the first in the padded input, from the position's first pixel on.
        groups: offsets from that place of the numbers that are loaded together.
    """

    first: int
    place: int
    groups: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class ChannelPart:
    """Channels whose sums lie in vectors of one kind.

    Attributes:
        channels: output channels; the first of every vector, or each channel if vectors lie along the patch.
        beside: number of these per tile.
        tiles: of the patch.
    """

    channels: range
    beside: int
    tiles: Sequence[PatchTile]

    @property
    def vectors(self) -> int:
        """Vectors of all sums."""
        return len(self.channels) * sum(len(tile.groups) for tile in self.tiles)


def parts(patch: Patch, leaving: int, lanes: int, most: int) -> list[ChannelPart]:
    """Returns the parts of a layer's gradient.

    Args:
        patch: of the layer.
        leaving: channels.
        lanes: numbers of a vector.
        most: maximum number of vectors of sums in a tile.
    """
    few = leaving % lanes
    along = [_along_patch(patch, range(leaving - few, leaving), lanes, most)] if few else []
    # Otherwise a vector for each number. A load that each of the tiles repeats takes half as long as a product.
    if few and along[0].vectors + _loads(along[0]) / 2 >= sum(len(line) for line in patch.lines()):
        few, along = 0, []
    if leaving == few:
        return along
    channels = range(0, leaving - few, lanes)
    beside = 3 if len(channels) % 3 == 0 else min(2, len(channels))
    return [ChannelPart(channels, beside, _tiles(patch, 1, most // beside)), *along]


def runs(places: Sequence[int]) -> list[range]:
    """Returns the ranges of consecutive places."""
    starts = [i for i in range(len(places)) if not i or places[i] != places[i - 1] + 1]
    return [range(a, b) for a, b in pairwise([*starts, len(places)])]


def even(total: int, most: int) -> int:
    """Returns the size of the fewest parts of at most `most`, as even as possible."""
    return -(-total // -(-total // max(1, most)))


def _along_patch(patch: Patch, channels: range, lanes: int, most: int) -> ChannelPart:
    # With few channels all loads of the patch serve few products; with many, registers do not suffice for broadcast
    # values.
    groups = max(len(tile.groups) for tile in _tiles(patch, lanes, most))
    beside = even(len(channels), max(most // 6, 3 * most // 4 // groups))
    return ChannelPart(channels, beside, _tiles(patch, lanes, most // beside))


def _loads(part: ChannelPart) -> int:
    each = sum(len(runs(group)) for tile in part.tiles for group in tile.groups)
    return each * -(-len(part.channels) // part.beside)


def _tiles(patch: Patch, together: int, most: int) -> list[PatchTile]:
    """Splits a patch into tiles of at most `most` groups of `together` numbers; tiles are nearly of one size."""
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
