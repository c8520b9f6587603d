"""Schedules: participants and losses of a run, drawn beforehand from public coins or by the sampler that is charged."""

from collections import Counter

import pytest

from leakbench.defenses.core import Federation, RoundSchedule, draw_schedule, poisson

from ....parameters import subtests

TEN = list(range(10))


def test_fixed_rounds_have_as_many_distinct_clients_each_and_all_equally_often():
    federation = Federation(rounds=600, participation=0.8)
    schedule = draw_schedule(federation, TEN, seed=1, key=2)
    assert {len({*members}) for members in schedule.rounds} == {8}
    counts = Counter(client for members in schedule.rounds for client in members)
    assert all(abs(count - 480) < 60 for count in counts.values())  # six deviations
    assert schedule == draw_schedule(federation, TEN, seed=1, key=3)  # public: its key is the seed
    assert schedule != draw_schedule(federation, TEN, seed=2, key=2)
    assert {len(m) for m in draw_schedule(Federation(rounds=3, participation=0.01), TEN, seed=1, key=2).rounds} == {1}


def test_poisson_rounds_are_the_samplers_own_and_may_be_empty():
    federation = Federation(rounds=200, participation=0.1, participants="poisson")
    schedule = draw_schedule(federation, TEN, seed=1, key=2)
    expected = [tuple(poisson(0.1).indices(number, 10, 2).tolist()) for number in range(200)]
    assert list(schedule.rounds) == expected and () in expected
    assert schedule == draw_schedule(federation, TEN, seed=9, key=2)


def test_a_partition_has_every_client_once_a_cycle_in_the_same_rounds():
    federation = Federation(rounds=8, participation=0.25, participants="partition")
    schedule = draw_schedule(federation, TEN, seed=1, key=2)
    assert schedule.rounds[:4] == schedule.rounds[4:]
    assert sorted(client for members in schedule.rounds[:4] for client in members) == TEN


def test_losses_are_drawn_with_the_schedule_at_their_rate_and_after_any_number_of_steps():
    federation = Federation(rounds=400, local_steps=3, participation=1.0, dropout=0.25)
    schedule = draw_schedule(federation, TEN, seed=1, key=2)
    assert abs(len(schedule.lost) - 1000) < 170  # of 4,000; six deviations
    assert {*schedule.lost.values()} == {0, 1, 2, 3}
    assert schedule.steps_of(4, 0, 3) == schedule.lost.get((0, 4), 3)
    assert draw_schedule(Federation(rounds=9), TEN, seed=1, key=2).lost == {}


def test_a_client_that_joins_decides_nothing_about_the_losses_of_others():
    everybody = Federation(rounds=100, local_steps=3, participation=1.0, participants="poisson", dropout=0.4)
    lost = draw_schedule(everybody, TEN, seed=1, key=2).lost
    for absent in TEN:
        others = [client for client in TEN if client != absent]
        expected = {place: steps for place, steps in lost.items() if place[1] != absent}
        assert draw_schedule(everybody, others, seed=1, key=2).lost == expected
    some = draw_schedule(Federation(rounds=100, participation=0.5, local_steps=3, dropout=0.4), TEN, seed=1, key=2)
    assert some.lost and some.lost.items() <= lost.items()


def test_clients_without_data_are_in_no_round():
    schedule = draw_schedule(Federation(rounds=20, participation=0.5), [1, 4, 6, 9], seed=1, key=2)
    assert {client for members in schedule.rounds for client in members} == {1, 4, 6, 9}
    assert schedule.rounds_of(0) == () and len(schedule.rounds_of(4)) > 3


@subtests(
    ("settings", "words"),
    [
        ({"rounds": 0}, "rounds must be at least 1"),
        ({"local_steps": 0}, "local_steps must be at least 1"),
        ({"participation": 0.0}, r"participation must be in \(0, 1\]"),
        ({"participants": "all"}, "participants"),
        ({"equal": "sizes"}, "equal"),
        ({"weights": "votes"}, "weights"),
        ({"server_lr": float("nan")}, "server_lr must be a positive finite number"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\)"),
    ],
)
def test_shapes_of_a_run_that_cannot_be_are_refused(settings, words):
    with pytest.raises(Exception, match=words):
        Federation(**{"rounds": 3} | settings)


def test_a_schedule_of_repeats_is_refused():
    with pytest.raises(ValueError, match="must have distinct clients with data, got 1, 1"):
        RoundSchedule(((1, 1),)).check(Federation(rounds=1), TEN)


def test_a_loss_before_the_round_is_refused():
    with pytest.raises(ValueError, match="lost must be after at least 0 local steps, got -1"):
        RoundSchedule(((1,),), {(0, 1): -1}).check(Federation(rounds=1), TEN)
