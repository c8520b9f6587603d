"""Every sum of a convolution's gradient lies in one lane, of as few vectors as there can be."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from leakbench.defenses.core.kernels.convolution_tiles import ChannelPart, Patch, parts, runs

PAIRS = st.tuples(st.integers(1, 5), st.integers(1, 5))


def patch_of(entering, kernel, dilation=(1, 1)):
    return Patch(kernel=kernel, dilation=dilation, entering=entering, line=entering * 40)


def places(part: ChannelPart, lanes: int):
    """(number of the patch, place in the input, channel) of every lane."""
    for tile in part.tiles:
        first = tile.first
        for group in tile.groups:
            for i, step in enumerate(group):
                for start in part.channels:
                    for channel in range(start, min(start + part.channels.step, part.channels.stop)):
                        yield first + i, tile.place + step, channel
            assert len(group) * part.channels.step <= lanes
            first += len(group)


@given(
    entering=st.integers(1, 40),
    leaving=st.integers(1, 70),
    kernel=PAIRS,
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    lanes=st.sampled_from([2, 4, 8, 16]),
    most=st.sampled_from([12, 24]),
)
def test_every_sum_is_formed_once_and_no_more_vectors_than_those_of_channels_are_taken(
    entering, leaving, kernel, dilation, lanes, most
):
    patch = patch_of(entering, kernel, dilation)
    found = parts(patch, leaving, lanes, most)
    numbers = [place for line in patch.lines() for place in line]
    expected = {(i, place, channel) for i, place in enumerate(numbers) for channel in range(leaving)}
    count = Counter(sum for part in found for sum in places(part, lanes))
    assert count.keys() == expected and set(count.values()) == {1}
    assert sum(part.vectors for part in found) <= len(numbers) * -(-leaving // lanes)
    for part in found:
        assert max(len(tile.groups) for tile in part.tiles) * part.beside <= most


def test_channels_that_fill_no_vector_take_those_of_the_patch():
    # 324 numbers in lines of 108: two vectors of channels for each, and four channels of 7 vectors a line.
    whole, few = parts(patch_of(36, (3, 3)), 36, 16, 24)
    assert list(whole.channels) == [0, 16] and whole.vectors == 2 * 324
    assert list(few.channels) == [32, 33, 34, 35] and few.vectors == 4 * 3 * 7
    # 15 of 16 channels are left in a vector of their own; the patch has no multiple of 16 numbers.
    (filled,) = parts(patch_of(36, (3, 3)), 15, 16, 24)
    assert list(filled.channels) == [0] and filled.vectors == 324


def test_vectors_cross_the_lines_of_a_kernel_where_that_saves_some():
    (crossing,) = parts(patch_of(3, (4, 4)), 12, 16, 24)  # 48 numbers in lines of 12
    assert crossing.vectors == 12 * 3
    (filled,) = parts(patch_of(3, (5, 5)), 6, 16, 24)  # 75 in lines of 15
    assert {len(group) for tile in filled.tiles for group in tile.groups} == {15}


def test_numbers_are_read_in_runs():
    assert runs([4, 5, 6, 40, 41, 50]) == [range(3), range(3, 5), range(5, 6)]
