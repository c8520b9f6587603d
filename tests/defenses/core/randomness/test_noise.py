"""Noise is normal from every source, on a public grid, never repeats by accident, and can be taken up again."""

import copy
import math
import os
import pickle
import sys
import threading

import numpy as np
import pytest
import torch
from jaxtyping import TypeCheckError
from scipy import stats

from leakbench.defenses.core import from_generator, from_os, secure, seeded
from leakbench.defenses.core.kernels import normals as normals_module
from leakbench.defenses.core.kernels.normals import GROUP, Normals, normals
from leakbench.defenses.core.randomness import noise as noise_module
from leakbench.defenses.core.randomness.noise import EXACT_SCALE, LARGEST_STD, SMALLEST_STD, CipherNoise, of_one_run

from ....parameters import subtests

ALARM = 1e-8
PART = 1000 * GROUP  # numbers that one thread draws at a time
LONG = 2 * PART + 12_345  # drawn in three parts
SOURCES = {"seeded": lambda: seeded(5), "os": from_os, "secure": secure}
each = pytest.mark.parametrize("kind", SOURCES)
N = 200_000


def drawn(source, size, std=1.0):
    """Noise alone: what is added to a sum of zeros."""
    return source.add(torch.zeros(size, dtype=torch.float64), std)


@each
@subtests("std", [1.0, 3.7e-8, 5e6])
def test_draws_are_normal_with_the_standard_deviation_asked_for(kind, std):
    draws = drawn(SOURCES[kind](), N, std)
    assert draws.dtype == torch.float64
    values = draws.numpy() / std
    assert stats.kstest(values, "norm").pvalue > ALARM
    assert stats.kstest(values * 2 / 3, "norm").pvalue < ALARM  # the test has power
    # Moments: the k-th has variance (E z^2k - (E z^k)^2) / n.
    for power, expected, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((values**power).mean() - expected) < 6 * math.sqrt(variance / N)


@each
def test_tails_are_there_and_finite(kind):
    draws = drawn(SOURCES[kind](), N)
    assert draws.isfinite().all()
    beyond = int((draws.abs() > 3.5).sum())
    expected = 2 * stats.norm.sf(3.5) * N
    assert abs(beyond - expected) < 6 * math.sqrt(expected)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["seeded", "os"])
def test_a_billion_draws_reach_beyond_where_single_precision_ends_as_often_as_they_should(kind):
    # Float32 Box-Muller noise ends at sqrt(2 * 24 * ln 2) = 5.768 standard deviations, where a Gaussian has 8 of 10^9.
    source, edges = SOURCES[kind](), (4.0, 5.0, 5.768)
    counts = dict.fromkeys(edges, 0)
    for _ in range(100):
        draws = drawn(source, 10**7).abs()
        for edge in edges:
            counts[edge] += int((draws > edge).sum())
    for edge, count in counts.items():
        expected = 2 * stats.norm.sf(edge) * 10**9
        assert stats.poisson.cdf(count, expected) > 1e-6 and stats.poisson.sf(count - 1, expected) > 1e-6, (edge, count)
    assert counts[5.768] > 0


@each
def test_draws_do_not_depend_on_earlier_ones(kind):
    source = SOURCES[kind]()
    a, b = (drawn(source, N) for _ in range(2))
    for x, y in ((a, b), (a[1:], a[:-1]), (a.square() - 1, b.square() - 1)):
        scale = float(x.std() * y.std()) * math.sqrt(len(x))
        assert abs(float(x @ y)) < 6 * scale


@each
@subtests("std", [1.0, 0.3, 10.0, 2.0**-90])
def test_noisy_sums_are_multiples_of_a_unit_that_follows_from_the_noise_alone(kind, std):
    source = SOURCES[kind]()
    unit = source.unit(std)
    assert std * 2.0**-31 < unit < std * 2.0**-17
    for size in (1.0, 1e-6, 1e6):  # whatever the sum is
        sums = size * std * torch.randn(1000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        whole = sums / unit if kind != "secure" else (sums / unit).round().long()
        noisy = source.add(sums.clone() if kind != "secure" else whole, std)
        # The quotient of two floats can miss a whole number of 2^51 by one.
        multiples = ((noisy / unit).round() + torch.tensor([[-1.0], [0.0], [1.0]])) * unit
        assert (multiples == noisy).any(dim=0).all()


def test_floats_are_rounded_to_the_nearest_unit():
    source = seeded(3)
    sums = torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    draws = np.zeros(1000)
    normals(rounded=False).code(source._key, 0, 0, 1000, draws.ctypes.data, 1.0, 1.0)  # type: ignore[attr-defined]
    exact = sums.numpy() + 0.7 * draws
    noisy = source.add(sums.clone(), 0.7).numpy()
    assert np.abs(noisy - exact).max() <= source.unit(0.7) / 2
    assert np.abs(noisy - exact).max() > source.unit(0.7) / 3


def test_exact_noise_is_added_to_whole_numbers_without_rounding():
    whole = torch.randint(-(2**50), 2**50, (1000,), generator=torch.Generator().manual_seed(0))
    noisy = secure().add(whole, EXACT_SCALE)  # the unit is 1
    difference = noisy - whole.double()
    assert torch.equal(difference, difference.round())
    assert float(difference.std()) == pytest.approx(EXACT_SCALE, rel=0.2)


def test_a_seed_decides_and_two_seeds_differ():
    assert torch.equal(drawn(seeded(5), 9), drawn(seeded(5), 9))
    assert not torch.equal(drawn(seeded(5), 9), drawn(seeded(6), 9))
    assert not torch.equal(drawn(seeded(5), 9), drawn(seeded(5 + 2**32), 9))
    assert not torch.equal(drawn(seeded(5), 9), drawn(seeded(5 + 2**200), 9))


def test_a_generator_decides_and_goes_on():
    generator = torch.Generator().manual_seed(0)
    first, second = (drawn(from_generator(generator), 9) for _ in range(2))
    assert torch.equal(first, drawn(from_generator(torch.Generator().manual_seed(0)), 9))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("source", [from_os, secure])
def test_what_the_operating_system_keys_never_comes_twice(source):
    assert not torch.equal(drawn(source(), 9), drawn(source(), 9))


@subtests("size", [0, 1, 7, 16, 33])
@each
def test_any_number_of_draws_can_be_had(kind, size):
    assert drawn(SOURCES[kind](), size).shape == (size,)


@pytest.mark.parametrize("kind", ["seeded", "os"])
def test_a_stream_is_taken_up_where_its_state_was_saved(kind):
    source = SOURCES[kind]()
    drawn(source, 7)
    state = source.state()
    expected = [drawn(source, 20), drawn(source, 3)]
    other = from_os()
    other.load(state)
    assert all(torch.equal(drawn(other, len(e)), e) for e in expected)


def test_a_stream_that_is_handed_over_goes_on_as_it_was_and_leaves_another():
    def some(source):
        return source.add(torch.zeros(9, dtype=torch.float64), 1.0)

    whole = seeded(1)
    expected = [some(whole) for _ in range(3)]
    noise = seeded(1)
    assert torch.equal(some(noise), expected[0])
    first, second = of_one_run(noise), of_one_run(noise)
    drawn = [some(source) for source in (first, first, second, second, noise, noise)]
    assert torch.equal(drawn[0], expected[1]) and torch.equal(drawn[1], expected[2])
    assert len(torch.cat([*drawn, expected[0]]).unique()) == 7 * 9
    assert first.kind == second.kind == "seeded"


def test_noise_from_the_operating_system_is_shared_by_runs_because_none_rewinds_it():
    noise = from_os()
    first, second = of_one_run(noise), of_one_run(noise)
    assert first is second is noise
    assert len(torch.cat([drawn(first, 9), drawn(second, 9)]).unique()) == 18


def test_a_stream_that_is_left_gives_other_numbers_by_name():
    def elsewhere(name):
        source = seeded(1)
        assert isinstance(source, CipherNoise)
        source.leave(name)
        return drawn(source, 9)

    assert torch.equal(elsewhere("a"), elsewhere("a"))
    assert len(torch.cat([drawn(seeded(1), 9), elsewhere("a"), elsewhere("b")]).unique()) == 27


def test_a_stream_that_is_handed_over_while_another_thread_draws_of_it_gives_no_number_twice(monkeypatch):
    noise, taken, real = seeded(1), [], normals_module.in_threads

    def meanwhile(*args, **settings):
        if not taken:
            taken.append(of_one_run(noise))
        real(*args, **settings)

    monkeypatch.setattr(normals_module, "in_threads", meanwhile)
    found = [drawn(noise, 9) for _ in range(2)]
    assert torch.equal(found[0], drawn(seeded(1), 9))
    assert len(torch.cat([*found, drawn(taken[0], 9)]).unique()) == 3 * 9


@subtests("size", [7, GROUP, LONG])
@subtests("std", [0.7, 2.0**-60, 1e20])
def test_sums_in_float32_get_the_noise_of_float64_and_are_rounded_after_it(size, std):
    sums = std * torch.randn(size, generator=torch.Generator().manual_seed(0))
    expected = seeded(3).add(sums.double(), std).float()
    assert torch.equal(seeded(3).add(sums.clone(), std), expected)
    traced = sums.clone().requires_grad_()  # by the way of other devices
    assert torch.equal(seeded(3).add(traced, std).detach(), expected)


def test_a_stream_of_another_generator_is_not_taken_up():
    with pytest.raises(ValueError, match="state of 5 words, got 3: it was drawn by another generator"):
        seeded(1).load(torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="the key of noise must have 32 bytes, got 16"):
        CipherNoise(bytes(16), "os")


def test_a_draw_of_any_length_begins_with_the_same_numbers():
    whole = drawn(seeded(5), LONG)
    for size in (1, GROUP - 1, GROUP, GROUP + 1, PART, PART + 1):
        assert torch.equal(drawn(seeded(5), size), whole[:size])


def test_a_stream_is_not_taken_up_without_its_state():
    with pytest.raises(ValueError, match="noise of kind 'seeded' must go on from a saved state, got none"):
        seeded(1).load(None)


def test_a_secure_stream_has_no_state_to_save():
    source = secure()
    assert source.state() is None
    source.load(None)
    assert drawn(source, 4).shape == (4,)


def test_noise_leaves_the_global_generators_alone():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    before = repr(np.random.get_state())  # noqa: NPY002  the one that must not move
    for source in (seeded(1), from_os(), secure()):
        drawn(source, 10)
    assert torch.equal(torch.rand(3), expected)
    assert repr(np.random.get_state()) == before  # noqa: NPY002


@each
def test_a_long_draw_is_standard_normal_and_no_part_of_it_comes_twice(kind):
    source = SOURCES[kind]()
    values = drawn(source, LONG)
    assert stats.kstest(values.numpy(), "norm").pvalue > ALARM
    starts = [values[:PART], values[PART : 2 * PART], values[2 * PART :], drawn(source, LONG)[:PART]]
    for i, one in enumerate(starts):
        for other in starts[:i]:
            size = min(len(one), len(other))
            assert abs(float(one[:size] @ other[:size])) < 6 * math.sqrt(size)


def test_a_long_draw_is_the_same_on_any_number_of_threads_and_after_a_resumption():
    source, before = seeded(5), torch.get_num_threads()
    state = source.state()
    try:
        torch.set_num_threads(1)
        alone = [drawn(source, LONG), drawn(source, 3)]
        torch.set_num_threads(3)
        source.load(state)
        assert all(torch.equal(drawn(source, len(values)), values) for values in alone)
    finally:
        torch.set_num_threads(before)


def test_a_long_draw_takes_no_more_threads_than_torch_has(monkeypatch):
    before, seen, kernel = torch.get_num_threads(), [], Normals(rounded=True)
    code = kernel.code

    def looked_at(*arguments):
        seen.append((threading.get_ident(), arguments[3]))
        code(*arguments)

    vars(kernel)["code"] = looked_at
    monkeypatch.setattr(noise_module, "normals", lambda **_: kernel)
    try:
        torch.set_num_threads(2)
        drawn(seeded(1), LONG)
    finally:
        torch.set_num_threads(before)
    assert len({thread for thread, _ in seen}) <= 2
    assert sum(size for _, size in seen) == LONG and max(size for _, size in seen) <= PART


def test_what_a_thread_raises_is_raised(monkeypatch):
    def broken(*_):
        raise MemoryError("no room")

    kernel = Normals(rounded=True)
    vars(kernel)["code"] = broken
    monkeypatch.setattr(noise_module, "normals", lambda **_: kernel)
    with pytest.raises(MemoryError, match="no room"):
        drawn(seeded(1), LONG)


@pytest.mark.parametrize("size", [7, LONG])
def test_what_cannot_be_changed_in_place_gets_the_same_noise(size):
    sums = torch.randn(size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = seeded(8).add(sums.clone(), 2.5)
    traced = sums.clone().requires_grad_()
    torch.testing.assert_close(seeded(8).add(traced, 2.5).detach(), expected, rtol=0, atol=seeded(8).unit(2.5))
    with torch.inference_mode():
        assert torch.equal(seeded(8).add(sums.clone(), 2.5), expected)


@each
@subtests("std", [0.0, -1.0, math.nan, math.inf, SMALLEST_STD / 2, LARGEST_STD * 2])
def test_a_standard_deviation_that_floats_cannot_carry_is_refused(kind, std):
    source = SOURCES[kind]()
    with pytest.raises(ValueError, match="the noise's standard deviation must be between"):
        source.add(torch.zeros(3, dtype=torch.float64), std)


@pytest.mark.parametrize("kind", ["seeded", "os"])
def test_sums_in_half_precision_are_refused(kind):
    with pytest.raises(ValueError, match=r"sums must be float64 or float32 for noise of kind .*, got torch\.float16"):
        SOURCES[kind]().add(torch.zeros(3, dtype=torch.float16), 1.0)


@subtests("kind", [seeded(0), secure()])
@subtests("size", [(80, 5), (3, 3), (80, 1), ()])
def test_sums_that_are_no_vector_are_refused(kind, size):
    # Of 80 x 5 numbers the first 80 had noise, and the others were released as they were.
    with pytest.raises((ValueError, TypeCheckError)):
        kind.add(torch.zeros(size, dtype=torch.float64), 1.0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that fork")
def test_a_fork_does_not_draw_its_parents_numbers():
    noise, (reader, writer) = seeded(0), os.pipe()
    if not (child := os.fork()):
        said = "drew"
        try:
            noise.add(torch.zeros(3, dtype=torch.float64), 1.0)
        except ValueError as error:
            said = str(error)
        os.write(writer, said.encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert "got its fork" in os.read(reader, 1000).decode()
    fresh = noise.add(torch.zeros(3, dtype=torch.float64), 1.0)
    assert torch.equal(fresh, seeded(0).add(torch.zeros(3, dtype=torch.float64), 1.0))  # the parent goes on


@subtests("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_stream_is_not_copied(copied):
    # Noise that two copies add cancels between what they release.
    with pytest.raises(TypeError, match="must not be copied"):
        copied(seeded(0))


def test_threads_that_draw_at_once_never_get_the_same_noise():
    source, drawn, interval = seeded(0), [], sys.getswitchinterval()

    def draw():
        for _ in range(4000):
            drawn.append(float(source.add(torch.zeros(1, dtype=torch.float64), 1.0)))

    threads = [threading.Thread(target=draw) for _ in range(8)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert len(drawn) == 32000
    # Multiples of 2^-18: a pair in some thousands is alike by chance.
    fresh = seeded(0)
    assert sorted(drawn) == sorted(float(fresh.add(torch.zeros(1, dtype=torch.float64), 1.0)) for _ in drawn)


def test_seeds_below_nought_are_refused():
    with pytest.raises(ValueError, match="the seed of noise must be at least 0, got -1"):
        seeded(-1)
