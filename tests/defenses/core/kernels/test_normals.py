"""The compiled noise is what ChaCha20 and the transform of Box and Muller say, number by number."""

import math

import mpmath
import numpy as np
import pytest
import torch
from scipy import stats

from leakbench.defenses.core.kernels.normals import GROUP, normals

from ....parameters import subtests

MASK = 2**32 - 1
KEY = bytes(range(32))


def block(key: bytes, counter: int, nonce: int) -> list[int]:
    """One block of ChaCha20, word by word, with a counter and a nonce of 64 bits."""
    words = [int.from_bytes(key[i : i + 4], "little") for i in range(0, 32, 4)]
    tail = [counter & MASK, counter >> 32, nonce & MASK, nonce >> 32]
    begun = [int.from_bytes(b"expand 32-byte k"[i : i + 4], "little") for i in range(0, 16, 4)] + words + tail
    state = list(begun)

    def quarter(a, b, c, d):
        for x, y, z, bits in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            state[x] = (state[x] + state[y]) & MASK
            state[z] ^= state[x]
            state[z] = (state[z] << bits | state[z] >> (32 - bits)) & MASK

    for _ in range(10):
        for start in range(4):
            quarter(start, 4 + start, 8 + start, 12 + start)
        for start in range(4):
            quarter(start, 4 + (start + 1) % 4, 8 + (start + 2) % 4, 12 + (start + 3) % 4)
    return [(a + b) & MASK for a, b in zip(state, begun, strict=True)]


def expected(key: bytes, group: int, draw: int) -> list[float]:
    """The numbers of a group, in 60 digits."""
    blocks, found = [block(key, 16 * group + lane, draw) for lane in range(16)], []
    with mpmath.workdps(60):
        for first in range(0, 16, 2):
            # A word of 64 bits is the same word of two neighbouring blocks.
            words = [[blocks[2 * i][w] | blocks[2 * i + 1][w] << 32 for i in range(8)] for w in range(first, first + 2)]
            pairs = []
            for high, shared in zip(*words, strict=True):
                # No bit is both the radius's and the angle's.
                uniform = (mpmath.mpf(high << 24 | shared & (2**24 - 1)) + 0.5) / mpmath.mpf(2) ** 88
                radius = mpmath.sqrt(-2 * mpmath.log(uniform))
                turn = 2 * mpmath.pi * (shared >> 24) / mpmath.mpf(2) ** 40
                pairs.append((float(radius * mpmath.cos(turn)), float(radius * mpmath.sin(turn))))
            found += [pair[0] for pair in pairs] + [pair[1] for pair in pairs]
    return found


def drawn(count: int, *, key: bytes = KEY, draw: int = 0, first: int = 0) -> np.ndarray:
    values = np.zeros(count * GROUP)
    normals(rounded=False)(key, draw, first, count * GROUP, values.ctypes.data, 1.0, 1.0)
    return values


def test_the_reference_is_the_published_cipher():
    # Bernstein's first test vector: a key, a counter and a nonce of zeros.
    stream = b"".join(word.to_bytes(4, "little") for word in block(bytes(32), 0, 0))
    assert stream.hex().startswith("76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7")


@pytest.mark.parametrize(("first", "draw"), [(0, 0), (1, 5), (2**28 - 1, 2**32 + 3), (2**40, 2**63)])
def test_numbers_are_those_of_the_cipher_and_the_transform(first, draw):
    found = drawn(2, draw=draw, first=first)
    wanted = np.array(expected(KEY, first, draw) + expected(KEY, first + 1, draw))
    assert np.abs(found - wanted).max() <= 5e-14
    assert np.abs(found / wanted - 1).max() <= 1e-12  # near zero too


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
    normals(rounded=True)(KEY, 0, 0, GROUP, values.data_ptr(), 0.0, 1.0)
    assert torch.equal(values, (torch.arange(GROUP, dtype=torch.float64) / 2).round())


def test_nothing_beside_the_numbers_is_touched():
    values = np.full(4 * GROUP, 7.0)
    normals(rounded=True)(KEY, 0, 0, 2 * GROUP, values[GROUP:].ctypes.data, 1.0, 2.0**-18)
    assert (values[:GROUP] == 7).all() and (values[3 * GROUP :] == 7).all() and (values[GROUP : 3 * GROUP] != 7).all()


@subtests("wide", [False, True])
@subtests("size", [1, 7, GROUP - 1, GROUP, GROUP + 1, 3 * GROUP - 8])
def test_of_a_last_group_that_is_short_the_first_numbers_are_used(size, wide):
    found = torch.full((size + 2 * GROUP,), 7.0, dtype=torch.float64 if wide else torch.float32)
    found[:size] = 0.0
    normals(rounded=False, wide=wide)(KEY, 3, 2, size, found.data_ptr(), 1.0, 1.0)
    assert torch.equal(found[:size], torch.from_numpy(drawn(3, draw=3, first=2)[:size]).to(found.dtype))
    assert bool((found[size:] == 7).all())
