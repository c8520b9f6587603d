"""Noise is standard normal from every source, never repeats by accident, and can be taken up again."""

import math
import os
import threading

import pytest
import torch
from scipy import stats

from defenses.core import from_os, keyed, noise, secure, seeded
from defenses.core.noise import GeneratorNoise

ALARM = 1e-8
SOURCES = {"seeded": lambda: seeded(5), "os": from_os, "secure": secure}
each = pytest.mark.parametrize("kind", SOURCES)
N = 200_000


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draws_are_standard_normal(kind, dtype):
    draws = SOURCES[kind]().normal(N, torch.zeros(1, dtype=dtype))
    assert draws.dtype == dtype
    values = draws.double().numpy()
    assert stats.kstest(values, "norm").pvalue > ALARM
    # Moments: the k-th has variance (E z^2k - (E z^k)^2) / n.
    for power, expected, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((values**power).mean() - expected) < 6 * math.sqrt(variance / N)


@each
def test_tails_are_there_and_finite(kind):
    draws = SOURCES[kind]().normal(N, torch.zeros(1))
    assert draws.isfinite().all()
    beyond = int((draws.abs() > 3.5).sum())
    expected = 2 * stats.norm.sf(3.5) * N
    assert abs(beyond - expected) < 6 * math.sqrt(expected)


@each
def test_draws_do_not_depend_on_earlier_ones(kind):
    source = SOURCES[kind]()
    a, b = (source.normal(N, torch.zeros(1, dtype=torch.float64)) for _ in range(2))
    for x, y in ((a, b), (a[1:], a[:-1]), (a.square() - 1, b.square() - 1)):
        scale = float(x.std() * y.std()) * math.sqrt(len(x))
        assert abs(float(x @ y)) < 6 * scale


def test_secure_draws_are_not_on_the_grid_of_one_uniform():
    draws = secure().normal(100_000, torch.zeros(1, dtype=torch.float64))
    assert draws.unique().numel() == 100_000


@pytest.mark.parametrize(("byte", "sign"), [(0x00, 0), (0xFF, 0), (0x80, -1), (0x7F, 1)])
def test_secure_draws_use_all_of_their_bits_and_stay_finite_at_the_ends(byte, sign, monkeypatch):
    # The largest and smallest 64-bit words, little end first, are half a cell of 2^-52 away from 0 and 1.
    word = bytes([0xFF if sign > 0 or byte == 0xFF else 0x00] * 7 + [byte])
    monkeypatch.setattr(os, "urandom", lambda n: word * (n // 8))
    draw = float(secure().normal(1, torch.zeros(1, dtype=torch.float64)))
    furthest = 2 * float(stats.norm.isf(2.0**-53))  # four equal draws over two
    assert draw == pytest.approx(sign * furthest, abs=1e-6)


def test_a_seed_decides_and_two_seeds_differ():
    like = torch.zeros(1)
    assert torch.equal(seeded(5).normal(9, like), seeded(5).normal(9, like))
    assert not torch.equal(seeded(5).normal(9, like), seeded(6).normal(9, like))


@pytest.mark.parametrize("source", [from_os, secure])
def test_what_the_operating_system_keys_never_comes_twice(source):
    assert not torch.equal(source().normal(9, torch.zeros(1)), source().normal(9, torch.zeros(1)))


@pytest.mark.parametrize("size", [0, 1, 7, 16, 33])
@each
def test_any_number_of_draws_can_be_had(kind, size):
    assert SOURCES[kind]().normal(size, torch.zeros(3)).shape == (size,)


def test_a_stream_is_taken_up_where_its_state_was_saved():
    source, like = seeded(5), torch.zeros(1)
    source.normal(7, like)
    state = source.state()
    expected = [source.normal(20, like), source.normal(3, like)]
    other = from_os()
    other.load(state)
    assert all(torch.equal(other.normal(len(e), like), e) for e in expected)


def test_a_secure_stream_has_no_state_to_save():
    source = secure()
    assert source.state() is None
    source.load(None)
    assert source.normal(4, torch.zeros(1)).shape == (4,)


def test_noise_leaves_the_global_generator_alone():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    seeded(1).normal(10, torch.zeros(1))
    secure().normal(10, torch.zeros(1))
    assert torch.equal(torch.rand(3), expected)


LONG = 2 * 2**20 + 12_345  # drawn in three parts


@pytest.mark.parametrize("kind", ["seeded", "os"])
def test_a_long_draw_is_standard_normal_and_no_part_of_it_comes_twice(kind):
    source = SOURCES[kind]()
    values = source.normal(LONG, torch.zeros(1))
    assert values.isfinite().all()
    assert stats.kstest(values[:: LONG // N].double().numpy(), "norm").pvalue > ALARM
    starts = [values[: 2**20], values[2**20 : 2**21], values[2**21 :], source.normal(LONG, torch.zeros(1))[: 2**20]]
    for i, one in enumerate(starts):
        for other in starts[:i]:
            size = min(len(one), len(other))
            assert abs(float(one[:size] @ other[:size])) < 6 * math.sqrt(size)


def test_a_long_draw_is_the_same_on_any_number_of_threads_and_after_a_resumption():
    source, like, before = seeded(5), torch.zeros(1), torch.get_num_threads()
    state = source.state()
    try:
        torch.set_num_threads(1)
        alone = [source.normal(LONG, like), source.normal(3, like)]
        torch.set_num_threads(3)
        source.load(state)
        assert all(torch.equal(source.normal(len(values), like), values) for values in alone)
    finally:
        torch.set_num_threads(before)


def test_large_seeds_that_agree_in_their_lower_32_bits_differ():
    like = torch.zeros(1)
    assert not torch.equal(seeded(5).normal(9, like), seeded(5 + 2**32).normal(9, like))


def test_where_states_cannot_be_filled_the_operating_systems_noise_is_the_secure_one(monkeypatch):
    monkeypatch.setattr(noise, "fills_states", lambda: False)
    assert from_os().kind == "secure"
    assert seeded(3).normal(LONG, torch.zeros(1)).shape == (LONG,)


@pytest.mark.parametrize("size", [7, LONG])
def test_noise_that_is_added_in_place_is_the_noise_that_would_have_been_drawn(size):
    one, other = (GeneratorNoise(keyed(8), "seeded") for _ in range(2))
    values = torch.randn(size, generator=torch.Generator().manual_seed(0))
    expected = torch.add(values, one.normal(size, values), alpha=2.5)
    assert other.add(values, 2.5) is values
    assert torch.equal(values, expected)
    assert torch.equal(one.normal(5, values), other.normal(5, values))


def test_long_noise_may_be_added_to_what_is_traced():
    like = torch.zeros(LONG)
    expected = seeded(8).normal(LONG, like)
    rows = torch.zeros(LONG, requires_grad=True)
    assert torch.equal(GeneratorNoise(keyed(8), "seeded").add(rows * 1.0, 1.0), expected)
    with torch.inference_mode():
        assert torch.equal(GeneratorNoise(keyed(8), "seeded").add(torch.zeros(LONG), 1.0), expected)


def test_a_long_draw_takes_no_more_threads_than_torch_has():
    before, seen = torch.get_num_threads(), []
    try:
        torch.set_num_threads(2)
        source = GeneratorNoise(keyed(8), "seeded")
        source._visit(torch.zeros(LONG), lambda piece, _: seen.append((threading.get_ident(), len(piece))))
    finally:
        torch.set_num_threads(before)
    assert len({thread for thread, _ in seen}) <= 2
    assert sum(size for _, size in seen) == LONG and max(size for _, size in seen) <= 2**15


def test_seeds_below_nought_are_refused():
    with pytest.raises(ValueError, match="key must be at least 0"):
        seeded(-1)
