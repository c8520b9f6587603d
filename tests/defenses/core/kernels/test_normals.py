"""Normal numbers from ChaCha20: the cipher, its key, their distribution and rounding; see also `test_kernels.py`."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from leakbench.defenses.core.kernels.normals import GROUP, normals, reference_blocks, reference_normals

from ....parameters import subtests

KEY = bytes(range(32))


def drawn(count: int, *, key: bytes = KEY, draw: int = 0, first: int = 0) -> np.ndarray:
    values = np.zeros(count * GROUP)
    normals(rounded=False).code(key, draw, first, count * GROUP, values.ctypes.data, 1.0, 1.0)
    return values


def test_the_reference_is_the_published_cipher():
    # Bernstein's first test vector: a key, a counter and a nonce of zeros.
    words = reference_blocks(bytes(32), torch.zeros(1, 16, dtype=torch.int64), 0)[:, 0, 0].tolist()
    stream = b"".join(word.to_bytes(4, "little") for word in words)
    assert stream.hex().startswith("76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7")


@pytest.mark.parametrize(("first", "draw"), [(0, 0), (2**28 - 1, 2**32 + 3), (2**40, 2**63)])
def test_groups_of_any_number_are_those_of_the_reference(first, draw):
    expected = reference_normals(KEY, torch.arange(first, first + 2), draw)
    differences = (torch.from_numpy(drawn(2, draw=draw, first=first)) - expected).abs()
    assert float(differences.max()) <= 5e-14
    assert float((differences / expected.abs()).max()) <= 1e-12  # near zero too


def test_every_bit_of_the_key_the_draw_and_the_group_counts():
    plain = drawn(1)
    for bit in range(256):
        other = bytearray(KEY)
        other[bit // 8] ^= 1 << bit % 8
        assert not (drawn(1, key=bytes(other)) == plain).any()
    for bit in range(64):
        assert not (drawn(1, draw=1 << bit) == plain).any()
    for bit in range(60):
        assert not (drawn(1, first=1 << bit) == plain).any()


@pytest.mark.slow
def test_a_billion_numbers_are_normal():
    # Of chi-squared in bins of equal probability, of which a millionth of a wrong scale would be seen.
    edges = stats.norm.ppf(np.linspace(0, 1, 1001)[1:-1])
    counts = np.zeros(1000)
    for start in range(100):
        counts += np.bincount(np.searchsorted(edges, drawn(78_125, first=78_125 * start)), minlength=1000)
    assert counts.sum() == 10**9
    assert stats.chisquare(counts).pvalue > 1e-6


def test_numbers_are_independent_within_a_group():
    values = drawn(20_000).reshape(-1, GROUP)
    for moment in (values, values**2 - 1):
        correlations = np.corrcoef(moment.T) - np.eye(GROUP)
        # Of 8128 pairs with a standard deviation of 1 / sqrt(20,000) each: six of them.
        assert np.abs(correlations).max() < 6 / math.sqrt(20_000)
    # Cosine and sine of one angle: neither says how long the other is.
    assert abs(np.corrcoef(np.abs(values[:, 0]), np.abs(values[:, 8]))[0, 1]) < 6 / math.sqrt(20_000)


def test_sums_are_rounded_to_the_nearest_multiple_half_to_even():
    values = torch.arange(GROUP, dtype=torch.float64) / 2
    normals(rounded=True).code(KEY, 0, 0, GROUP, values.data_ptr(), 0.0, 1.0)
    assert torch.equal(values, (torch.arange(GROUP, dtype=torch.float64) / 2).round())


@subtests("wide", [False, True])
@subtests("size", [1, 7, GROUP - 1, GROUP, GROUP + 1, 3 * GROUP - 8])
def test_nothing_beside_the_numbers_is_touched(size, wide):
    values = torch.full((size + 2 * GROUP,), 7.0, dtype=torch.float64 if wide else torch.float32)
    normals(rounded=False, wide=wide)(values[GROUP : GROUP + size], KEY, 3, 1.0, None)
    assert int((values != 7).sum()) == size and bool((values[GROUP : GROUP + size] != 7).all())
