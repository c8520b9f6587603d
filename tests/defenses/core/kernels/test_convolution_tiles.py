"""Every number of a patch is in one tile, at its place, and tiles fit the registers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leakbench.defenses.core.kernels.convolution_tiles import Patch, tiles_of, vectors_beside

PAIRS = st.tuples(st.integers(1, 5), st.integers(1, 5))


@given(
    entering=st.integers(1, 40),
    kernel=PAIRS,
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    most=st.sampled_from([4, 6, 8, 12, 24]),
)
def test_every_number_of_a_patch_is_in_one_tile_at_its_place(entering, kernel, dilation, most):
    patch = Patch(kernel=kernel, dilation=dilation, entering=entering, line=entering * 40)
    tiles = tiles_of(patch, most)
    numbers = {tile.first + i: tile.place + step for tile in tiles for i, step in enumerate(tile.offsets)}
    assert numbers == dict(enumerate(place for line in patch.lines() for place in line))
    assert sum(len(tile.offsets) for tile in tiles) == len(numbers)
    assert max(len(tile.offsets) for tile in tiles) <= most


@pytest.mark.parametrize(("vectors", "beside"), [(1, 1), (2, 2), (3, 3), (4, 2), (5, 2), (6, 3), (7, 2)])
def test_a_tile_holds_up_to_three_vectors_of_channels(vectors, beside):
    assert vectors_beside(vectors) == beside
