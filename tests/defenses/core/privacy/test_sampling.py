"""Samplers: who takes part how often, and the refusals."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from leakbench.defenses.core import (
    Sampling,
    cyclic,
    fixed,
    full,
    partition,
    poisson,
    random_allocation,
    shuffle,
    truncated_poisson,
)

from ....parameters import subtests

N = 200
ALARM = 1e-7


def participation(sampling, steps, *, examples=N, key=0):
    taken = torch.zeros(steps, examples, dtype=torch.float64)
    for step in range(steps):
        taken[step, sampling.indices(step, examples, key)] = 1.0
    return taken


def test_under_poisson_every_example_is_a_binomial_of_its_own():
    rate, steps = 0.07, 600
    taken = participation(poisson(rate), steps)
    variance = rate * (1 - rate)
    counts = taken.sum(dim=0)
    statistic = float(((counts - steps * rate).square() / (steps * variance)).sum())
    assert ALARM < stats.chi2.sf(statistic, N) < 1 - ALARM
    assert abs(float(counts.sum()) - steps * N * rate) < 6 * math.sqrt(steps * N * variance)
    # Batch sizes vary like independent coins, neither fixed nor lumpy.
    sizes = taken.sum(dim=1)
    statistic = float(((sizes - N * rate).square() / (N * variance)).sum())
    assert ALARM < stats.chi2.sf(statistic, steps) < 1 - ALARM
    # Neighbouring examples and neighbouring steps know nothing of each other.
    centred = taken - rate
    for a, b in ((centred[:, 1:], centred[:, :-1]), (centred[1:], centred[:-1])):
        assert abs(float((a * b).sum())) < 5.5 * variance * math.sqrt(a.numel())


@pytest.mark.parametrize("sampler", [shuffle, partition])
@given(examples=st.integers(1, 120), rate=st.floats(0.01, 1.0), epoch=st.integers(0, 5))
def test_an_epoch_uses_each_example_exactly_once(sampler, examples, rate, epoch):
    sampling = sampler(rate)
    first = epoch * sampling.steps_per_epoch
    steps = range(first, first + sampling.steps_per_epoch)
    used = torch.cat([sampling.indices(step, examples, 3) for step in steps])
    assert used.sort().values.tolist() == list(range(examples))


def test_batches_of_an_epoch_have_the_expected_size():
    sizes = participation(shuffle(0.1), 20, examples=105).sum(dim=1)
    assert sizes.min() >= 10
    assert sizes.max() <= 11


def test_a_partition_repeats_itself_and_a_shuffle_does_not():
    for sampling, repeats in ((partition(0.1), True), (shuffle(0.1), False)):
        taken = participation(sampling, 20)
        assert torch.equal(taken[:10], taken[10:]) is repeats


def test_shuffled_neighbours_are_as_good_as_random():
    # In which of ten batches an example is, over 300 epochs: uniform for every example.
    taken = participation(shuffle(0.1), 3000, examples=50).view(300, 10, 50)
    counts = taken.sum(dim=0)
    statistic = float(((counts - 30).square() / 30).sum())
    assert ALARM < stats.chi2.sf(statistic, 9 * 50) < 1 - ALARM


def test_fixed_batches_have_one_size_and_uniform_members():
    taken = participation(fixed(0.1), 500)
    assert (taken.sum(dim=1) == 20).all()
    counts = taken.sum(dim=0)
    statistic = float(((counts - 50).square() / (500 * 0.1 * 0.9)).sum())
    assert ALARM < stats.chi2.sf(statistic, N - 1) < 1 - ALARM


def test_a_subset_of_fixed_size_never_exceeds_the_share_that_is_charged():
    for examples, drawn in ((100, 29), (101, 29), (199, 57), (4, 1)):  # 0.29 x 100 is a hair below 29
        assert len(fixed(0.29).indices(0, examples, 3)) == drawn
        assert drawn / examples <= 0.29
    assert len(fixed(1.0).indices(0, 7, 3)) == 7
    with pytest.raises(ValueError, match=r"must give at least one of 3 examples, got 0\.29"):
        fixed(0.29).indices(0, 3, 3)


def test_full_takes_everybody():
    assert full().indices(7, 5, 1).tolist() == [0, 1, 2, 3, 4]


@subtests(
    "sampling",
    [
        poisson(0.3),
        truncated_poisson(0.3, most=50, examples=N),
        random_allocation(0.25),
        cyclic(0.1, groups=3),
        shuffle(0.25),
        partition(0.25),
        fixed(0.3),
        full(),
    ],
)
def test_who_takes_part_is_a_function_of_step_and_key_alone(sampling):
    late_first = sampling.indices(9, N, 4)
    for step in range(9):
        sampling.indices(step, N, 4)
    assert torch.equal(sampling.indices(9, N, 4), late_first)
    assert late_first.unique().numel() == late_first.numel()
    if sampling.kind != "full":
        assert not torch.equal(sampling.indices(9, N, 5), late_first)


def test_the_divisor_is_the_expected_batch_and_may_be_a_fraction():
    assert poisson(0.05).expected_batch(1437) == pytest.approx(71.85)


@subtests(("rate", "steps"), [(0.1, 10), (70 / 700, 10), (1.0, 1), (0.3, 4), (256 / 60000, 235), (1 / 3, 3)])
def test_an_epoch_has_as_many_steps_as_it_takes(rate, steps):
    assert poisson(rate).steps_per_epoch == steps


def test_only_poisson_and_full_protect_a_record_that_is_added_or_removed():
    relations = {s.kind: s.relation for s in (poisson(0.1), shuffle(0.1), partition(0.1), fixed(0.1), full())}
    assert {kind for kind, relation in relations.items() if relation == "add_remove"} == {"poisson", "full"}
    assert {kind for kind, relation in relations.items() if relation == "zero_out"} == {"shuffle", "partition"}
    assert relations["fixed"] == "replace_one"


@subtests("rate", [2.0, 0.0, -0.1, float("nan")])
def test_a_rate_that_is_none_is_refused(rate):
    with pytest.raises(ValueError, match=r"sample_rate must be in \(0, 1\], got"):
        poisson(rate)


def test_a_rate_whose_inverse_is_no_float_is_refused():
    with pytest.raises(ValueError, match="sample_rate must be so large that its inverse is a float, got 5e-324"):
        poisson(5e-324)


def test_full_batches_have_no_rate_and_unknown_samplers_are_named():
    with pytest.raises(ValueError, match=r"sample_rate must be 1 for full batches, got 0\.5"):
        Sampling("full", 0.5)


# --- samplers that amplify besides Poisson's ------------------------------------------------------------------------


def test_random_allocation_puts_everybody_into_one_step_an_epoch_uniformly_and_apart():
    sampling, epochs, steps = random_allocation(0.1), 400, 10
    taken = participation(sampling, epochs * steps).view(epochs, steps, N)
    assert (taken.sum(dim=1) == 1).all()
    counts = taken.sum(dim=0)
    statistic = float(((counts - epochs / steps).square() / (epochs / steps)).sum())
    assert ALARM < stats.chi2.sf(statistic, (steps - 1) * N) < 1 - ALARM
    # Batch sizes are binomial: nobody knows from who else is there who must be.
    sizes = taken.sum(dim=2).flatten()
    variance = N * 0.1 * 0.9
    assert abs(float((sizes - N / steps).square().mean()) / variance - 1) < 6 * math.sqrt(2 / len(sizes))


def test_a_rate_of_random_allocation_is_one_over_a_whole_number():
    assert random_allocation(0.3).rate == 0.25
    assert random_allocation(0.25).expected_batch(100) == 25


def test_groups_of_cyclic_sampling_take_turns_and_coins_decide_within_them():
    sampling, groups = cyclic(0.05, groups=4), 4
    taken = participation(sampling, 4000).view(1000, groups, N)
    turns = taken.sum(dim=0) > 0
    assert (turns.sum(dim=0) == 1).all(), "an example belongs to one group"
    assert (turns.sum(dim=1) == N // groups).all()
    counts = taken.sum(dim=(0, 1))
    assert sampling.rate_in_group == pytest.approx(0.2)
    statistic = float(((counts - 200).square() / (1000 * 0.2 * 0.8)).sum())
    assert ALARM < stats.chi2.sf(statistic, N) < 1 - ALARM
    # Another key deals other groups.
    assert not torch.equal(turns, participation(sampling, 4000, key=1).view(1000, groups, N).sum(dim=0) > 0)


def test_a_truncated_batch_is_a_poisson_batch_of_which_a_random_part_is_dropped():
    most = 22
    sampling = truncated_poisson(0.1, most=most, examples=N)
    taken = participation(sampling, 3000)
    sizes = taken.sum(dim=1)
    assert int(sizes.max()) == most
    expected = float(np.minimum(np.arange(N + 1), most) @ stats.binom.pmf(np.arange(N + 1), N, 0.1))
    assert float(sizes.mean()) == pytest.approx(expected, abs=6 * math.sqrt(18 / 3000))
    assert float((sizes < most).double().mean()) == pytest.approx(stats.binom.cdf(most - 1, N, 0.1), abs=0.05)
    # No example is dropped more often than another, wherever it stands.
    counts, rate = taken.sum(dim=0), expected / N
    statistic = float(((counts - 3000 * rate).square() / (3000 * rate * (1 - rate))).sum())
    assert ALARM < stats.chi2.sf(statistic, N - 1) < 1 - ALARM


def test_a_truncated_sampler_serves_the_number_of_examples_that_it_is_charged_for():
    with pytest.raises(ValueError, match="made, and is charged, for 200 examples, got 100"):
        truncated_poisson(0.1, most=22, examples=N).indices(0, 100, 1)


@subtests(
    ("make", "message"),
    [
        (lambda: cyclic(0.1, groups=1), "groups of cyclic sampling must be at least 2, got 1"),
        (lambda: cyclic(0.3, groups=4), r"groups x sample_rate must be at most 1, .*got 4 x 0\.3"),
        (lambda: Sampling("poisson", 0.1, groups=4), "groups must be given for cyclic sampling alone, got 4"),
        (lambda: Sampling("poisson", 0.1, most=4), "a largest batch must be given for truncated_poisson alone"),
        (lambda: truncated_poisson(0.1, most=0, examples=10), "between 1 and its number of examples, got 0 of 10"),
        (lambda: truncated_poisson(0.1, most=11, examples=10), "between 1 and its number of examples, got 11 of 10"),
    ],
)
def test_settings_of_samplers_that_make_no_sense_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_whose_key_must_stay_secret():
    amplify = [poisson(0.1), random_allocation(0.1), cyclic(0.1, groups=2), truncated_poisson(0.1, most=9, examples=50)]
    assert all(s.amplifies for s in amplify)
    assert not any(s.amplifies for s in (poisson(1.0), cyclic(0.5, groups=2), shuffle(0.1), partition(0.1), full()))
