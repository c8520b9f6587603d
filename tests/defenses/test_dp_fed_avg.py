"""What is particular to DP-FedAvg: a client is an example of a central defense at the server."""

from dataclasses import replace

import pytest
import torch

from leakbench.defenses.adaptive_clipping import adaptive_clipping
from leakbench.defenses.band_mf import band_mf
from leakbench.defenses.core import (
    Federated,
    Federation,
    Follow,
    PrivateAverage,
    RoundSchedule,
    cyclic,
    full,
    own_noise,
    own_sampler_key,
    partition,
    poisson,
    train,
)
from leakbench.defenses.diff2 import diff2
from leakbench.defenses.dp_fed_avg import dp_fed_avg
from leakbench.defenses.dp_ftrl import dp_ftrl
from leakbench.defenses.dp_sgd import dp_sgd
from leakbench.defenses.dp_snip import dp_snip
from leakbench.defenses.dpsur import dpsur
from leakbench.defenses.nsgd import nsgd
from leakbench.defenses.per_layer import per_layer
from leakbench.defenses.random_sparsification import random_sparsification
from leakbench.defenses.sgd import sgd

from ..parameters import subtests
from .duties import DATA, network
from .federated_runs import EVERYBODY, FEDERATION, SHARDS, Diverging, federated, parameters

ONE_EACH = [(DATA[0][i : i + 1], DATA[1][i : i + 1]) for i in range(24)]


def of_server(defense):
    return Federated(client=sgd(), server=PrivateAverage(defense=defense))


def centrally(defense, sampling, steps=8, lr=0.3):
    return train(
        network(), DATA, defense, sampling=sampling, steps=steps, lr=lr, seed=2,
        noise=own_noise(7, "server", "seeded"), sampler_key=own_sampler_key(7, "server"),
    )  # fmt: skip


SERVERS = {
    "dp_sgd": dp_sgd(clip_norm=0.4, noise_multiplier=1.1),
    "per_layer": per_layer(clip_norm=0.4, noise_multiplier=1.1),
    "adaptive_clipping": adaptive_clipping(clip_norm=0.4, noise_multiplier=1.1),
    "random_sparsification": random_sparsification(clip_norm=0.4, noise_multiplier=1.1),
    "nsgd": nsgd(noise_multiplier=1.1),
}


@subtests("name", list(SERVERS))
def test_one_record_a_client_and_one_step_of_rate_1_is_the_central_defense(name):
    """Rows are gradients: minus the displacement of a plain step of learning rate 1."""
    federation = Federation(rounds=8, local_steps=1, participation=0.25, participants="poisson", server_lr=0.3)
    run = federated(of_server(SERVERS[name]), shards=ONE_EACH, federation=federation, sampling=full(), lr=1.0)
    central = centrally(SERVERS[name], poisson(0.25))
    torch.testing.assert_close(parameters(run), parameters(central.model), rtol=0, atol=2e-5)
    assert all(ledger.entries == central.ledger.entries for ledger in run.ledgers)
    assert run.claim(1e-5).epsilon == central.claim(1e-5).epsilon and run.claim(1e-5).relation == "add_remove"


def test_the_function_is_dp_sgd_at_the_server():
    federation = Federation(rounds=8, local_steps=1, participation=0.25, participants="poisson", server_lr=0.3)
    method = dp_fed_avg(update_norm=0.4, noise_multiplier=1.1)
    run = federated(method, shards=ONE_EACH, federation=federation, sampling=full(), lr=1.0)
    torch.testing.assert_close(
        parameters(run), parameters(centrally(SERVERS["dp_sgd"], poisson(0.25)).model), rtol=0, atol=2e-5
    )


@subtests("name", ["dp_ftrl", "band_mf"])
def test_streams_of_correlated_noise_run_at_the_server_with_a_partition_of_clients(name):
    defense = {
        "dp_ftrl": dp_ftrl(clip_norm=0.4, noise_multiplier=1.1),
        "band_mf": band_mf(clip_norm=0.4, bands=3, noise_multiplier=1.1),
    }[name]
    federation = Federation(rounds=8, local_steps=1, participation=0.25, participants="partition", server_lr=0.3)
    run = federated(of_server(defense), shards=ONE_EACH, federation=federation, sampling=full(), lr=1.0)
    central = centrally(defense, partition(0.25))
    assert all(ledger.entries == central.ledger.entries for ledger in run.ledgers)
    assert run.claim(1e-5).epsilon == central.claim(1e-5).epsilon
    # Another order of clients than that of the central sampler's key, so the models differ; the noise does not.
    assert torch.isfinite(parameters(run)).all()
    with pytest.raises(ValueError, match="participants must be 'partition', got 'fixed'"):
        federated(of_server(defense), shards=ONE_EACH, federation=replace(federation, participants="fixed"))
    assert cyclic(0.25, groups=4).groups == 4


def test_removing_a_client_moves_the_released_sum_by_at_most_the_update_norm():
    """Without noise, over the public constant participation x clients."""
    method = dp_fed_avg(update_norm=0.02, noise_multiplier=0.0)
    whole = federated(method, schedule=EVERYBODY)
    for client in range(4):
        members = tuple(other for other in range(4) if other != client)
        less = federated(method, schedule=RoundSchedule((members, (0,), (0,))))
        moved = (whole.rounds[1].parameters - less.rounds[1].parameters).norm() * 4
        assert 0.01 < moved <= 0.02 * (1 + 1e-4)


def test_lost_clients_and_infinite_updates_are_zero_rows_and_stay_charged():
    method = dp_fed_avg(update_norm=0.02, noise_multiplier=0.0)
    schedule = RoundSchedule(((0, 1, 2, 3), (0,), (0,)), {(0, 1): 2})
    lost = federated(method, schedule=schedule)
    without = federated(method, schedule=RoundSchedule(((0, 2, 3), (0,), (0,))))
    torch.testing.assert_close(lost.rounds[1].parameters, without.rounds[1].parameters, rtol=0, atol=1e-7)
    assert sum(entry.steps for entry in lost.ledgers[1].entries) == 1
    assert without.ledgers[1].entries == []
    smaller = [SHARDS[0], tuple(part[:11] for part in SHARDS[1]), *SHARDS[2:]]
    diverged = federated(replace(method, rule=Diverging()), shards=smaller, schedule=replace(schedule, lost={}))
    assert diverged.losses == ("round 0: client 1 sends non-finite numbers",)
    assert torch.equal(diverged.rounds[1].parameters, without.rounds[1].parameters)


def test_a_round_of_nobody_is_a_release_of_noise_alone():
    federation = Federation(rounds=3, local_steps=1, participation=0.01, participants="poisson")
    method = dp_fed_avg(update_norm=1.0, noise_multiplier=1.0)
    run = federated(method, federation=federation)
    assert run.schedule.rounds == ((), (), ())
    assert (parameters(run) - run.rounds[0].parameters).norm() > 0.1
    assert run.ledgers[0].steps == 3


def test_schedules_are_those_that_the_ledger_charges():
    method, half = dp_fed_avg(noise_multiplier=1.0), {"rounds": 3, "participation": 0.5}
    with pytest.raises(ValueError, match="schedule must be None for participants='poisson'"):
        federated(method, federation=Federation(participants="poisson", **half), schedule=EVERYBODY)
    twice = RoundSchedule(((0, 1), (1, 2), (3,)))
    with pytest.raises(ValueError, match="same round of every 2, got client 1 in rounds 0 and 1 of them"):
        federated(method, federation=Federation(participants="partition", **half), schedule=twice)
    # Once a cycle, but in neighbouring rounds, whose correlated noise is charged as if they were a cycle apart.
    close = RoundSchedule(((2, 3), (0, 1), (0, 1)))
    with pytest.raises(ValueError, match="same round of every 2, got client 0 in rounds 1 and 0 of them"):
        federated(
            of_server(dp_ftrl(noise_multiplier=1.0)),
            federation=Federation(participants="partition", **half),
            schedule=close,
        )
    once = RoundSchedule(((0, 1), (2, 3), (1,)))
    run = federated(method, federation=Federation(participants="partition", **half), schedule=once)
    assert run.claim(1e-5).gaussians is not None
    assert sum(event.count for event in run.claim(1e-5).gaussians or ()) == 2  # two cycles, one of them cut short


def test_what_a_server_cannot_average_is_refused():
    for defense, words in (
        (dpsur(noise_multiplier=1.0), "a round has no trial and no other start"),
        (dp_snip(noise_multiplier=1.0), "a release of its own needs data"),
        (dp_sgd(), "noise_multiplier of 'dp_sgd' must be set"),
    ):
        with pytest.raises(ValueError, match=words):
            federated(of_server(defense))
    with pytest.raises(ValueError, match="must send nothing beside its update"):
        controlled = replace(of_server(SERVERS["dp_sgd"]), rule=Chatty())
        federated(controlled)
    with pytest.raises(ValueError, match="an update is known at the global model alone"):
        federated(of_server(diff2(noise_multiplier=1.0)), federation=FEDERATION)


class Chatty(Follow):
    """Sends a copy of its displacement without noise."""

    def finish(self, state, round, delta):
        return state, {"copy": delta}
