"""Clients and a server that see a sum alone, and servers that go on from a file."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from leakbench.defenses.adaptive_clipping import adaptive_clipping
from leakbench.defenses.core import (
    ClientSide,
    Federated,
    Federation,
    PrivateAverage,
    RoundSchedule,
    ServerSide,
    aggregate,
    aggregate_sum,
    local_round,
    poisson,
    summed,
)
from leakbench.defenses.core.federated.federation_file import FederationFile
from leakbench.defenses.dp_fed_avg import dp_fed_avg
from leakbench.defenses.fed_avg import fed_avg
from leakbench.defenses.fed_pcdp import fed_pcdp
from leakbench.defenses.random_sparsification import random_sparsification
from leakbench.defenses.scaffold import scaffold
from leakbench.defenses.sgd import sgd

from ....parameters import subtests
from ...duties import PUBLIC, network
from ...federated_runs import EVERYBODY, FEDERATION, LAYOUT, SHARDS, federated, parameters

NOISY: dict[str, Any] = {"noise_multiplier": 1.3}
DELTA = 1e-5
OF_SUM = replace(FEDERATION, aggregation="sum", least_honest=2, colluders=1)
SCHEDULE = RoundSchedule(((0, 1, 3), (0, 1, 2, 3), (1, 2, 3)))


def common(**settings: Any) -> dict[str, Any]:
    usual = {"federation": OF_SUM, "sampling": poisson(0.4), "lr": 0.3, "seed": 2, "public": PUBLIC, "sizes": [12] * 4}
    return usual | settings


def client_of(number, method, *, key: int | None = 7, checkpoint=None, **settings: Any) -> ClientSide:
    own: dict[str, Any] = {"number": number, "key": key, "checkpoint": checkpoint}
    return ClientSide(network(), SHARDS[number], method, **own, **common(**settings))


def run_by_sides(method, *, schedule: RoundSchedule | None = SCHEDULE, lost=(), **settings: Any):
    """All rounds with a process a client, of whose messages the server gets the sum."""
    model = network()
    server = ServerSide(model, method, schedule=schedule, key=7, **common(**settings))
    clients = {number: client_of(number, method, **settings) for number in range(4)}
    for number in range(FEDERATION.rounds):
        down = server.arrays
        replies = {c: local_round(clients[c], number, down) for c in server.clients}
        came = {client: arrays for client, arrays in replies.items() if (number, client) not in lost}
        aggregate_sum(server, summed([*came.values()]) if came else None, [*came])
    return model, clients, server


METHODS: dict[str, tuple[Federated, dict[str, Any]]] = {
    "dp_fed_avg": (dp_fed_avg(update_norm=0.05, **NOISY), {}),
    "masks at the server": (
        Federated(client=sgd(), server=PrivateAverage(defense=random_sparsification(clip_norm=0.05, **NOISY))),
        {},
    ),
    "secret participants": (
        dp_fed_avg(update_norm=0.05, **NOISY),
        {"federation": replace(OF_SUM, participation=0.5, participants="poisson"), "schedule": None},
    ),
    "fed_avg": (fed_avg(**NOISY), {}),
    "fed_avg by size": (fed_avg(**NOISY), {"federation": replace(OF_SUM, weights="size")}),
    "scaffold": (scaffold(**NOISY), {}),
    "fed_pcdp": (fed_pcdp(rank=3, **NOISY), {}),
}


@pytest.mark.long
@subtests("name", list(METHODS))
def test_clients_and_a_server_of_sums_are_the_loop(name):
    method, settings = METHODS[name]
    model, clients, server = run_by_sides(method, **settings)
    run = federated(method, **{"federation": OF_SUM, "schedule": SCHEDULE} | settings)
    torch.testing.assert_close(LAYOUT.read(model), parameters(run), rtol=0, atol=2e-6)
    for number, claim in enumerate(run.claims(DELTA)):
        own = clients[number].claim(DELTA)
        assert clients[number].ledger.entries == run.ledgers[number].entries
        assert (own.epsilon, own.relation, own.assumes) == (claim.epsilon, claim.relation, claim.assumes)
    if method.unit == "client":
        assert [claim.epsilon for claim in server.claims(DELTA)] == [claim.epsilon for claim in run.claims(DELTA)]


def test_a_client_with_a_key_of_its_own_decides_itself_whether_it_is_sampled():
    """Nobody else can: every client sends, and its coins follow from its key alone."""
    federation = replace(OF_SUM, rounds=200, participation=0.3, participants="poisson")
    sampled = []
    for key in (None, 3, 4):
        client = client_of(1, dp_fed_avg(**NOISY), key=key, federation=federation)
        sampled.append([1 in clients for clients in client._federation.schedule.rounds])
    assert sampled[1] != sampled[2] and sampled[0] != sampled[1]
    assert 0.15 < sum(map(sum, sampled)) / 600 < 0.45


def test_a_round_of_too_few_messages_is_aborted_by_the_server_and_stays_charged_at_the_clients():
    lost = {(1, 2), (1, 3)}
    _, clients, server = run_by_sides(dp_fed_avg(**NOISY), schedule=EVERYBODY, lost=lost)
    assert server.losses[-1] == "round 1: is aborted, with 2 messages of at least 3"
    assert [client.ledger.steps for client in clients.values()] == [3] * 4
    # Without noise, which a lost client draws at a side alone.
    method, schedule = dp_fed_avg(noise_multiplier=0.0), replace(EVERYBODY, lost={(1, 2): 4, (1, 3): 4})
    model, _, _ = run_by_sides(method, schedule=EVERYBODY, lost=lost)
    run = federated(method, federation=OF_SUM, schedule=schedule)
    torch.testing.assert_close(LAYOUT.read(model), parameters(run), rtol=0, atol=2e-6)


def test_a_client_is_charged_before_it_sends_and_for_rounds_in_which_all_were_to_send():
    hidden = replace(OF_SUM, participation=0.5, participants="poisson")
    for federation, expected in ((OF_SUM, 1), (hidden, 3)):
        client = client_of(0, dp_fed_avg(**NOISY), federation=federation)
        server = ServerSide(network(), dp_fed_avg(**NOISY), **common(federation=federation))
        local_round(client, 2, server.arrays)
        assert client.ledger.steps == expected


def test_a_client_of_a_partition_refuses_the_rounds_of_others(tmp_path):
    """Its ledger charges a cycle once: a server that asks for every round would get four releases for one."""
    federation = replace(OF_SUM, rounds=8, participation=0.25, participants="partition", least_honest=1, colluders=None)
    down = ServerSide(network(), dp_fed_avg(**NOISY), **common(federation=federation)).arrays
    for file in (None, tmp_path / "client"):
        client = client_of(1, dp_fed_avg(**NOISY), federation=federation, checkpoint=file)
        local_round(client, 1, down)
        if file is not None:
            client = client_of(1, dp_fed_avg(**NOISY), federation=federation, checkpoint=file)
        with pytest.raises(
            ValueError, match="a partition must have a client in the same round of every 4, got client 1"
        ):
            local_round(client, 2, down)
        assert client.ledger.steps == 2
        local_round(client, 5, down)
        assert client.ledger.steps == 6


def test_a_server_opens_exact_shares_in_their_unit():
    method = dp_fed_avg(update_norm=0.05, **NOISY)
    model = network()
    server = ServerSide(model, method, schedule=SCHEDULE, exact=True, **common())
    clients = {number: client_of(number, method, key=None, exact=True) for number in server.clients}
    replies = {number: local_round(client, 0, server.arrays) for number, client in clients.items()}
    aggregate_sum(server, summed([*replies.values()]), [*replies])
    moved = (LAYOUT.read(model) - LAYOUT.read(network())).norm()
    # The noise has z S sqrt(43) / 4 = 0.107 in all; in the unit of other noise it would be 2^12 times as much.
    assert 0.02 < moved < 0.3
    assert any(entry.exact for entry in server._federation.setup.ledgers[0].entries)


def test_a_client_of_a_sum_goes_on_from_its_file(tmp_path):
    for name in ("dp_fed_avg", "secret participants"):
        method, settings = METHODS[name]
        settings = {key: value for key, value in settings.items() if key != "schedule"}
        down = ServerSide(network(), method, **common(**settings)).arrays
        whole = client_of(0, method, **settings)
        sent = [local_round(whole, number, down) for number in range(3)]
        client = whole
        for number in range(3):
            client = client_of(0, method, checkpoint=tmp_path / name, **settings)
            arrays = local_round(client, number, down)
            assert all((arrays[part] == sent[number][part]).all() for part in arrays)
        assert client.ledger.entries == whole.ledger.entries


def test_what_does_not_fit_a_sum_is_refused_and_leaves_the_round_open(tmp_path):
    method = dp_fed_avg(**NOISY)
    server = ServerSide(network(), method, schedule=SCHEDULE, **common())
    replies = {c: local_round(client_of(c, method), 0, server.arrays) for c in (0, 1, 3)}
    total = summed([*replies.values()])
    with pytest.raises(ValueError, match="must be a sum for aggregation 'sum', got single messages"):
        aggregate(server, replies)
    with pytest.raises(ValueError, match=r"replies must be of clients of the round, \(0, 1, 3\), got \[2\]"):
        aggregate_sum(server, total, [0, 1, 2])
    with pytest.raises(ValueError, match=r"a sum must have the numbers {'block0': 43} of the model, got {'block0': 5}"):
        aggregate_sum(server, {name: part[:5] for name, part in total.items()}, [0, 1, 3])
    assert server.round == 0 and server.claims(DELTA)[0].epsilon == 0
    shown = ServerSide(network(), method, schedule=SCHEDULE, **common(federation=FEDERATION))
    with pytest.raises(ValueError, match="aggregation must be 'sum' for a sum of messages"):
        aggregate_sum(shown, total, [0, 1, 3])
    adaptive = Federated(client=sgd(), server=PrivateAverage(defense=adaptive_clipping(**NOISY)))
    with pytest.raises(ValueError, match="'adaptive_clipping' must plan a round without the update of the step before"):
        client_of(0, adaptive)
    infinite = {name: part.astype("float32") * float("inf") for name, part in total.items()}
    with pytest.raises(ValueError, match="a sum must be of finite numbers"):
        aggregate_sum(server, infinite, [0, 1, 3])


# --- a server that goes on


SERVERS: dict[str, tuple[Federated, Federation]] = {
    "fed_avg": (fed_avg(**NOISY), FEDERATION),
    "scaffold": (scaffold(**NOISY), FEDERATION),
    "dp_fed_avg": (dp_fed_avg(update_norm=0.05, **NOISY), FEDERATION),
    "adaptive": (
        Federated(client=sgd(), server=PrivateAverage(defense=adaptive_clipping(clip_norm=0.05, **NOISY))),
        FEDERATION,
    ),
    "poisson": (
        dp_fed_avg(update_norm=0.05, **NOISY),
        replace(FEDERATION, participation=0.6, participants="poisson"),
    ),
    "sum": (dp_fed_avg(update_norm=0.05, **NOISY), OF_SUM),
}


@pytest.mark.long
@subtests("name", list(SERVERS))
def test_a_server_in_a_process_for_every_round_goes_on_from_its_file(name, tmp_path):
    method, federation = SERVERS[name]
    schedule = None if federation.participants == "poisson" else EVERYBODY
    settings: dict[str, Any] = {"schedule": schedule, "key": 7, **common(federation=federation)}
    whole = ServerSide(network(), method, **settings)
    pairs = [{c: client_of(c, method, federation=federation) for c in range(4)} for _ in range(2)]
    again = whole
    for number in range(3):
        again = ServerSide(network(), method, checkpoint=tmp_path / name, **settings)
        assert again.round == number and again.clients == whole.clients
        for server, clients in ((whole, pairs[0]), (again, pairs[1])):
            replies = {c: local_round(clients[c], number, server.arrays) for c in server.clients}
            if federation.shows_messages:
                aggregate(server, replies)
            else:
                aggregate_sum(server, summed([*replies.values()]), [*replies])
        for part, same in zip(whole.arrays.values(), again.arrays.values(), strict=True):
            assert (part == same).all()
    ended = ServerSide(network(), method, checkpoint=tmp_path / name, **settings)
    assert ended.clients == () and ended.losses == whole.losses
    if method.unit == "client":
        assert [claim.epsilon for claim in ended.claims(DELTA)] == [claim.epsilon for claim in whole.claims(DELTA)]
        assert "nobody else goes on from a copy of the run's checkpoint" in again.claims(DELTA)[0].assumes


def test_a_server_with_keys_of_the_operating_system_keeps_its_schedule_and_draws_fresh_noise(tmp_path):
    federation = replace(FEDERATION, rounds=30, participation=0.5, participants="poisson")
    method = dp_fed_avg(**NOISY)
    settings = common(federation=federation)
    first = ServerSide(network(), method, checkpoint=tmp_path / "server", **settings)
    second = ServerSide(network(), method, checkpoint=tmp_path / "server", **settings)
    assert first._federation.schedule == second._federation.schedule
    replies = {c: local_round(client_of(c, method, federation=federation), 0, first.arrays) for c in first.clients}
    # The first process dies before its file is written: nothing of the round has left it.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FederationFile, "save", lambda *arguments, **options: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            aggregate(first, replies)
    assert torch.equal(LAYOUT.read(first._federation.setup.model), LAYOUT.read(network()))
    for use in (lambda: first.arrays, lambda: aggregate(first, replies)):
        with pytest.raises(
            ValueError, match="must be written before its global model leaves, and the last write failed"
        ):
            use()
    moved = aggregate(second, replies)
    assert second.round == 1 and (moved["parameters"] != LAYOUT.read(network()).numpy()).any()
    assert second._federation.setup.ledgers[0].steps == 1 and not second._federation.setup.ledgers[0].unrecorded
    assert (LAYOUT.read(first._federation.setup.model).numpy() != moved["parameters"]).any()


def test_a_file_of_a_server_belongs_to_its_settings(tmp_path):
    ServerSide(network(), fed_avg(**NOISY), checkpoint=tmp_path / "server", **common(federation=FEDERATION))
    other = fed_avg(noise_multiplier=2.0)
    with pytest.raises(ValueError, match="another run"):
        ServerSide(network(), other, checkpoint=tmp_path / "server", **common(federation=FEDERATION))
