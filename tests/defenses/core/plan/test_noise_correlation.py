"""Correlated noise: what is drawn against the strategy's matrix, and what one record can move."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from leakbench.defenses.core import cyclic, fixed, full, partition, poisson, random_allocation, secure, seeded, shuffle
from leakbench.defenses.core.plan.noise_correlation import (
    Banded,
    BandedInverse,
    Buffered,
    NoiseMemory,
    StrategyRow,
    Tree,
    gram,
    longest_column,
    prefix_errors,
)
from leakbench.defenses.core.privacy.events import Gaussian
from leakbench.defenses.core.privacy.participation import bands, sensitivity, stream_events

from ....parameters import subtests

STEPS = 12
ALL = (
    Banded(STEPS, (0.5, 0.375)),
    BandedInverse(STEPS, (-0.5, -0.125)),
    Buffered(STEPS, (0.3, 0.1), (0.9, 0.4)),
    Tree(STEPS),
)
each = subtests("strategy", ALL)


def stream(strategy, sums, *, seed=1, std=2.0):
    """Releases of a whole stream of one block."""
    memory, noise = NoiseMemory(), seeded(seed)
    return torch.stack([memory.add(StrategyRow(strategy, t), [row], [std], noise)[0] for t, row in enumerate(sums)])


@each
def test_what_is_released_is_the_sums_plus_the_inverse_of_the_matrix_times_independent_noise(strategy):
    dim = 20_000
    released = stream(strategy, torch.zeros(STEPS, dim, dtype=torch.float64))
    drawn = torch.from_numpy(strategy.matrix()) @ released / 2.0
    # C times what is released is independent, of variance 1, whatever the matrix: and nothing else of it would be.
    moments = (drawn @ drawn.T / dim).numpy()
    assert np.abs(moments - np.eye(STEPS)).max() < 6 * math.sqrt(2 / dim)
    correlated = (released @ released.T / dim / 4).numpy()
    assert np.abs(correlated - np.eye(STEPS)).max() > 0.2
    # The first draw is that of independent noise with the same key.
    assert torch.equal(released[0], seeded(1).add(torch.zeros(dim, dtype=torch.float64), 2.0))


@each
def test_sums_are_released_whole_and_noise_does_not_depend_on_them(strategy):
    sums = torch.arange(STEPS * 3, dtype=torch.float64).view(STEPS, 3)
    without = stream(strategy, torch.zeros_like(sums))
    # Rounded to a unit of the noise, in which what went before is carried on.
    torch.testing.assert_close(stream(strategy, sums.clone()) - sums, without, rtol=0, atol=1e-4)


@each
def test_the_matrix_is_that_of_the_recurrence(strategy):
    kept, rows = np.zeros((strategy.size, STEPS)), []
    for t in range(STEPS):
        weights, carry, entry = strategy.recurrence(t)
        drawn = np.eye(STEPS)[t]
        rows.append(drawn + weights @ kept)
        kept = carry @ kept + np.outer(entry, drawn)
    np.testing.assert_allclose(np.linalg.inv(np.array(rows)), strategy.matrix(), atol=1e-12)
    assert (np.diag(strategy.matrix()) == 1).all()
    marginal = [StrategyRow(strategy, t).marginal for t in range(STEPS)]
    np.testing.assert_allclose(marginal, longest_column(strategy) * np.linalg.norm(np.array(rows), axis=1))


def test_a_tree_gives_prefix_sums_the_noise_of_their_nodes():
    inverse = np.linalg.inv(Tree(16).matrix())
    nodes = (np.cumsum(inverse, axis=0) ** 2).sum(axis=1)
    assert nodes.round(9).tolist() == [number.bit_count() for number in range(1, 17)]
    assert longest_column(Tree(16)) == math.sqrt(5)  # the first step is in nodes of 1, 2, 4, 8 and 16


def test_prefix_errors_are_those_of_the_matrix():
    column = np.array([1.0, 0.5, 0.375])
    inverse = np.linalg.inv(Banded(STEPS, (0.5, 0.375)).matrix())
    expected = np.linalg.norm(np.cumsum(inverse, axis=0), axis=1)
    np.testing.assert_allclose(prefix_errors(column, STEPS), expected, rtol=1e-12)


# --- what a record can move -----------------------------------------------------------------------------------------


def patterns(sampling, steps):
    """All ways in which a record may take part."""
    if sampling.kind in ("partition", "cyclic"):
        turns = sampling.groups if sampling.kind == "cyclic" else sampling.steps_per_epoch
        return [[t for t in range(steps) if t % turns == place] for place in range(turns)]
    if sampling.kind in ("shuffle", "random_allocation"):
        n = sampling.steps_per_epoch
        return list(itertools.product(*(range(start, min(start + n, steps)) for start in range(0, steps, n))))
    return [list(range(steps))]


@each
@pytest.mark.parametrize(
    "sampling",
    [
        partition(0.25),
        cyclic(0.05, groups=2),
        shuffle(0.25),
        random_allocation(0.25),
        fixed(0.25),
        poisson(0.25),
        full(),
    ],
    ids=lambda s: s.kind,
)
def test_the_sensitivity_bounds_every_record_and_is_reached_where_it_can_be(strategy, sampling):
    found = sensitivity(strategy, sampling, 0, 0, STEPS) * longest_column(strategy)
    matrix = strategy.matrix()
    coins = np.random.default_rng(0)
    largest = 0.0
    for pattern in patterns(sampling, STEPS):
        columns = matrix[:, list(pattern)]
        # The worst signs, and contributions in other directions.
        for signs in itertools.product((1.0, -1.0), repeat=min(len(pattern), 5)):
            signs = np.array([*signs, *coins.choice((-1.0, 1.0), max(0, len(pattern) - 5))])
            largest = max(largest, float(np.linalg.norm(columns @ signs)))
        largest = max(largest, float(np.linalg.norm(columns.sum(axis=1))))
        vectors = coins.standard_normal((len(pattern), 4))
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        largest = max(largest, float(np.linalg.norm(columns @ vectors)))
    assert largest <= found * (1 + 1e-9)
    # A rate so small that nobody comes again in the stream, nor does a number of its turns fit 64 bits.
    if sampling.kind in ("partition", "shuffle", "random_allocation"):
        rare = [sensitivity(strategy, replace(sampling, rate=rate), 0, 0, STEPS) for rate in (1e-3, 1e-300)]
        assert rare[0] == rare[1]
    positive = (gram(strategy) >= 0).all()
    if positive and sampling.kind not in ("shuffle", "random_allocation"):
        assert largest == pytest.approx(found)  # everybody in one direction
    assert largest > 0.6 * found


def test_one_use_of_a_record_costs_one_gaussian_at_the_noise_multiplier():
    for strategy in ALL:
        once = stream_events(strategy, partition(1 / STEPS), 1.3, first=0, position=0, steps=STEPS)
        (event,) = once
        assert (event.sample_rate, event.count) == (1.0, 1)
        assert event.noise_multiplier == pytest.approx(1.3)


def test_groups_as_many_as_bands_are_amplified_and_fewer_are_not():
    strategy = Banded(STEPS, (0.5, 0.375))
    assert [bands(one) for one in ALL] == [3, STEPS, STEPS, 8]
    assert stream_events(strategy, cyclic(0.02, groups=3), 1.3, first=0, position=0, steps=STEPS) == [
        Gaussian(0.06, 1.3, 4)
    ]
    (event,) = stream_events(strategy, cyclic(0.02, groups=2), 1.3, first=0, position=0, steps=STEPS)
    assert event.sample_rate == 1.0
    # Six uses, neighbours of which overlap.
    assert event.noise_multiplier < 1.3 / math.sqrt(6)


def test_epochs_of_at_least_as_many_steps_as_bands_compose():
    strategy = Banded(STEPS, (0.5, 0.375))
    (event,) = stream_events(strategy, partition(0.25), 1.3, first=0, position=0, steps=STEPS)
    assert event.noise_multiplier == pytest.approx(1.3 / math.sqrt(3))


# --- refusals -------------------------------------------------------------------------------------------------------


def test_exact_noise_is_refused():
    with pytest.raises(ValueError, match="correlated over steps must be drawn in float64, got exact noise"):
        NoiseMemory().add(StrategyRow(Tree(4), 0), [torch.zeros(2, dtype=torch.int64)], [1.0], secure())


def test_a_stream_begins_at_its_beginning_and_leaves_no_step_out():
    memory, noise, strategy = NoiseMemory(), seeded(0), Banded(6, (0.5,))
    sums = torch.zeros(3, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"a step at position 1 .* got none; begin a stream at position 0"):
        memory.add(StrategyRow(strategy, 1), [sums], [1.0], noise)
    memory.add(StrategyRow(strategy, 0), [sums], [1.0], noise)
    for row in (StrategyRow(strategy, 2), StrategyRow(Banded(6, (0.4,)), 1)):
        with pytest.raises(ValueError, match="must follow the one before it, got step 0 of Banded"):
            memory.add(row, [sums], [1.0], noise)
    with pytest.raises(ValueError, match=r"as many numbers as in the step before .* got \[2\] after \[3\]"):
        memory.add(StrategyRow(strategy, 1), [sums[:2]], [1.0], noise)


def test_what_is_kept_goes_on_in_another_process():
    strategy, sums = ALL[0], torch.zeros(STEPS, 4, dtype=torch.float64)
    whole = stream(strategy, sums)
    memory, noise = NoiseMemory(), seeded(1)
    for t in range(5):
        memory.add(StrategyRow(strategy, t), [sums[t].clone()], [2.0], noise)
    later, source = NoiseMemory(), seeded(9)
    later.load(memory.state(), torch.device("cpu"))
    source.load(noise.state())
    for t in range(5, STEPS):
        assert torch.equal(later.add(StrategyRow(strategy, t), [sums[t].clone()], [2.0], source)[0], whole[t])


def test_streams_have_an_end():
    with pytest.raises(ValueError, match="must have 1 to 5000 steps, got 5001; take larger batches or fewer epochs"):
        StrategyRow(Tree(5001), 0)
    with pytest.raises(ValueError, match="position must be in the 4 steps of the strategy, got 4"):
        StrategyRow(Tree(4), 4)
