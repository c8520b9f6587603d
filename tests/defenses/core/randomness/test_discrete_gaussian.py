"""Draws have the discrete Gaussian's exact probabilities, also where 32 bits do not decide."""

import math
import os

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from leakbench.defenses.core.randomness import discrete_gaussian
from leakbench.defenses.core.randomness.discrete_gaussian import LARGEST, draw, probabilities

from ....parameters import subtests

ALARM = 1e-8
SCALES = (0.5, 1.0, 10.0, 1000.0)
WRONG = (2 / 3, 3 / 2)


def p_value(draws: np.ndarray, scale: float) -> float:
    """Chi-square test against the exact probabilities, in cells of a tenth of the scale, with the tails pooled."""
    width = max(1, int(scale / 10))
    reach = width * math.ceil(6 * scale / width + 1)
    integers = np.arange(-reach, reach + width)
    cells = (integers + reach) // width
    expected = np.bincount(cells, probabilities(integers, scale)) * len(draws)
    inside = np.abs(draws) <= reach
    found = np.bincount((draws[inside] + reach) // width, minlength=len(expected)).astype(float)[: len(expected)]
    large = expected >= 10
    rest = len(draws) - expected[large].sum()
    pairs = list(zip(found[large], expected[large], strict=True))
    if rest > 1:
        pairs.append((len(draws) - found[large].sum(), rest))
    statistic = sum((o - e) ** 2 / e for o, e in pairs)
    return float(stats.chi2.sf(statistic, len(pairs) - 1))


@subtests("scale", [*SCALES, 3.7, 31.9, 32.0])
def test_draws_have_the_exact_probabilities_and_two_thirds_or_three_halves_of_the_scale_are_rejected(scale):
    draws = draw(100_000, scale).numpy()
    assert p_value(draws, scale) > ALARM
    for factor in WRONG:
        assert p_value(draws, scale * factor) < ALARM


@pytest.mark.slow
@pytest.mark.parametrize("scale", SCALES)
def test_a_million_draws_have_the_exact_probabilities(scale):
    draws = draw(10**6, scale).numpy()
    assert p_value(draws, scale) > ALARM
    for factor in (0.99, 1.01, *WRONG):
        assert p_value(draws, scale * factor) < ALARM


@pytest.mark.parametrize("scale", [2.0**20 + 0.5, 2.0**30, LARGEST])
def test_wide_ones_look_normal_in_every_digit(scale):
    draws = draw(200_000, scale).numpy()
    assert stats.kstest(draws / scale, "norm").pvalue > ALARM
    assert stats.kstest(draws / scale * 1.05, "norm").pvalue < ALARM
    for bit in range(16):  # the lower digits of a wide one are fair coins
        ones = int((draws >> bit & 1).sum())
        assert abs(ones - 100_000) < 6 * math.sqrt(50_000)
    assert abs(int((draws > 0).sum()) - 100_000) < 6 * math.sqrt(50_000)


class Bits:
    """Random bits whose first 32-bit words are given; what is drawn after them is fair."""

    def __init__(self, words):
        self.words, self.given = words, False

    def __call__(self, size):
        if self.given:
            return np.random.default_rng(size).bytes(size)
        self.given = True
        return np.broadcast_to(np.array(self.words, dtype=np.uint32)[:, None], (3, size // 12)).tobytes()


def test_where_32_bits_lie_on_an_edge_more_are_drawn(monkeypatch):
    table = discrete_gaussian._table(1.0)
    below = discrete_gaussian._cumulative(1.0, 60)
    edge = int(table.edges[0])  # of h = 0 and h = 1: both must come, as often as the rest of the cell says
    draws = []
    for seed in range(400):
        bits, given = np.random.default_rng(seed), Bits([edge, 0, 0])
        monkeypatch.setattr(
            os, "urandom", lambda n, given=given, bits=bits: given(n) if not given.given else bits.bytes(n)
        )
        draws.append(int(discrete_gaussian._propose(1, table)[0]))
    inside = float(below[0] * 2**32 - edge)  # part of the cell below the edge
    zeros = draws.count(0)
    assert set(draws) <= {0, 1}
    assert stats.binomtest(zeros, 400, inside).pvalue > 1e-6


def test_where_32_bits_do_not_tell_whether_a_draw_is_kept_more_are_drawn(monkeypatch):
    table = discrete_gaussian._table(1000.0)
    high, low = 20, table.step - 1
    bound = math.exp(-(2 * high * table.step + low) * low / (2 * 1000.0**2)) * 2**32
    word = int(bound)
    kept = []
    for seed in range(400):
        bits = np.random.default_rng(seed)
        monkeypatch.setattr(os, "urandom", bits.bytes)
        kept.append(discrete_gaussian._kept_slowly(word, high, low, table))
    assert stats.binomtest(sum(kept), 400, bound - word).pvalue > 1e-6
    surely = discrete_gaussian._kept(
        np.array([word - 1, word + 2], np.uint32), np.full(2, high), np.full(2, low), table
    )
    assert surely.tolist() == [True, False]


def test_there_is_no_largest_value(monkeypatch):
    # All bits set: beyond any table, and more bits are asked for until one is not.
    table = discrete_gaussian._table(1.0)
    answers = iter([b"\xff" * 8] * 12 + [bytes(8)] * 12)
    monkeypatch.setattr(os, "urandom", lambda n: next(answers))
    far = discrete_gaussian._inverted_slowly(2**32 - 1, table)
    # After 32 + 12 * 64 ones about 2^-800 is left above: 2 Q(far) there.
    assert far == pytest.approx(math.sqrt(2 * 800 * math.log(2)), rel=0.02)


def test_parts_are_drawn_apart_on_any_number_of_threads():
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            draws = draw(2 * 2**17 + 5, 7.0).double()
            halves = draws[: 2**17], draws[2**17 : 2**18]
            assert abs(float(halves[0] @ halves[1])) < 6 * 49 * math.sqrt(2**17)
            spread = draws.numpy() + np.random.default_rng(0).random(len(draws)) - 0.5
            assert stats.kstest(spread, stats.norm(scale=7.0).cdf).pvalue > ALARM
    finally:
        torch.set_num_threads(before)


@subtests("scale", [0.0, -1.0, math.nan, math.inf, LARGEST * 2])
def test_a_scale_that_is_none_is_refused(scale):
    with pytest.raises(ValueError, match=r"the scale of a discrete Gaussian must be in \(0, 2\^35\], got"):
        draw(1, scale)


def test_it_is_a_function_of_a_slightly_narrower_gaussian_up_to_what_the_summation_formula_leaves():
    """Draw z around a whole number from a Gaussian of variance s^2 - r^2, then k around z: that is a discrete one of s.

    What the ledger rests on, here at r^2 = 0.5, where the factor 1 +- 2 exp(-2 pi^2 r^2) can be seen.
    """
    s, r, centre = 2.0, math.sqrt(0.5), 3
    narrow = math.sqrt(s**2 - r**2)
    integers = np.arange(-30, 40)

    def weights(z: float) -> np.ndarray:
        unscaled = np.exp(-((integers - z) ** 2) / (2 * r**2))
        return unscaled / unscaled.sum()

    for k in range(-6, 12):
        place = int(np.flatnonzero(integers == k)[0])
        found = integrate.quad(
            lambda z, p=place: stats.norm.pdf(z, centre, narrow) * weights(z)[p], -25, 30, limit=400
        )[0]
        exact = probabilities(np.array([k - centre]), s)[0]
        assert abs(math.log(found / exact)) < 3 * 2 * math.exp(-2 * math.pi**2 * r**2)
    assert 3 * 2 * math.exp(-2 * math.pi**2 * 8) < 1e-67  # at the r^2 = 8 that is charged
