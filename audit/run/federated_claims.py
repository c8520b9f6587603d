"""Claims of federated records, and of each of their clients, predicted again from sizes, rounds, schedule and noise."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any, cast

from leakbench.defenses.core import Claim, Federation, RoundSchedule, Sampling, predict_federated
from leakbench.defenses.core.federated.run import relation_of
from leakbench.leaderboard.records.record import Record
from leakbench.leaderboard.records.task import TrainingTask, UpdateTask

from ..catalog.plugins import is_path
from ..plan.federation import at_chosen_models, lifted, own_multiplier, schedule_of
from ..plan.request import RequestedMethod
from ..suite.federated import FederatedTable
from ..targets.simulated_message import attacked_client, sampling_of_messages


def proved_by_clients(record: Record, task: TrainingTask, delta: float) -> Claim:
    """Returns the claim of the worst client that a record's rounds prove.

    Args:
        record: with a noise multiplier.
        task: of the same, with clients.
        delta: of the claim.

    Raises:
        TypeError, ValueError: for untrusted content that is no federated training.
    """
    if record.active_server:
        return _proved_by_chosen(record, task, delta)
    return max(_proved_by_each(record, task, delta), key=lambda claim: claim.epsilon)


def _proved_by_chosen(record: Record, task: TrainingTask, delta: float) -> Claim:
    """Returns the claim of a client that took part in as many rounds as the record says, at models of the server."""
    if record.noise_multiplier is None or not task.client_sizes:
        raise ValueError("a record of chosen models must have client_sizes and a noise multiplier")
    clients = FederatedTable.model_validate(json.loads(json.dumps(task.federated, default=dict)))
    chosen = json.loads(record.to_json())["defense"]
    method = lifted(RequestedMethod(kind="defenses", name=chosen["name"], settings=chosen["settings"]), clients)
    if own_multiplier(method) is None:
        method = method.with_noise(record.noise_multiplier)
    sampling, rounds = Sampling(cast(Any, task.sampling), task.sample_rate), _releases(task)
    if rounds > (most := clients.chosen_models or 1):
        raise ValueError(f"releases of a record must be at most the {most} that its clients allow, got {rounds}")
    nominal = task.get("nominal_size")
    sizes = [size and (nominal or size) for size in task.client_sizes]
    federation = at_chosen_models(clients.federation(sampling.steps_per_epoch), rounds)
    everybody = tuple(number for number, size in enumerate(sizes) if size)
    ledgers = predict_federated(
        method, sizes, federation=federation, sampling=sampling, schedule=RoundSchedule((everybody,) * rounds)
    )
    claims = [ledgers[client].claim(delta, unit=method.unit) for client in _attacked(record, task, clients, delta)]
    least = min(claims, key=lambda claim: claim.epsilon)
    return replace(least, relation=relation_of(least.relation, method, federation, size_public=nominal is None))


def _attacked(record: Record, task: TrainingTask, clients: FederatedTable, delta: float) -> list[int]:
    """Returns the attacked client: that of the suite, or all with the largest epsilon of the training, of which one is.

    Raises:
        ValueError: the suite's has no examples.
    """
    if isinstance(clients.attacked, int):
        if not task.client_sizes[clients.attacked]:
            raise ValueError(f"client {clients.attacked} is attacked, and has no examples")
        return [clients.attacked]
    epsilons = [claim.epsilon for claim in _proved_by_each(record, task, delta)]
    largest = max(epsilons) * (1 - 1e-6)
    return [client for client, epsilon in enumerate(epsilons) if epsilon >= largest and task.client_sizes[client]]


def unproved_clients(record: Record, epsilons: Sequence[float], *, tolerance: float) -> str:
    """Returns the reason why epsilons of clients do not follow from a record's rounds; empty if they do.

    Args:
        record: of kind "federation", in whose claim no fault is found.
        epsilons: of the clients by number, in nats; of the record's arrays.
        tolerance: relative.

    Raises:
        TypeError, ValueError: for untrusted content that is no federated training.
    """
    claim, task = record.claim, record.task
    if not isinstance(task, TrainingTask) or is_path(record.defense.name):  # which would be executed
        return ""
    if claim is None or record.noise_multiplier is None:
        proves_nothing = all(math.isinf(epsilon) for epsilon in epsilons)
        return "" if proves_nothing else "epsilons of its clients follow from no claim and no noise multiplier"
    proved = [own.epsilon for own in _proved_by_each(record, task, claim.delta)]
    if len(epsilons) != len(proved):
        return f"its arrays have {len(epsilons)} clients, and its task has {len(proved)}"
    for client, (epsilon, least) in enumerate(zip(epsilons, proved, strict=True)):
        if not epsilon >= least * (1 - tolerance):  # false for NaN
            return f"epsilon {epsilon:.4g} of client {client} does not follow from its steps, which prove {least:.4g}"
    return ""


def _proved_by_each(record: Record, task: TrainingTask, delta: float) -> tuple[Claim, ...]:
    """Returns the claim of every client that a record's rounds prove."""
    sizes = task.client_sizes
    nominal = task.get("nominal_size")
    public = tuple(size and (nominal or size) for size in sizes)
    seed = (task.schedule_of or {}).get("seed")
    if not isinstance(seed, int) or not sizes or record.noise_multiplier is None:
        raise ValueError("a federated record must have client_sizes and the seed of its schedule")
    if min(sizes) < 0 or sum(sizes) != task.trained_on:
        raise ValueError(f"client_sizes must add up to the {task.trained_on} examples of the training, got {sizes}")
    defense = json.dumps(json.loads(record.to_json())["defense"], sort_keys=True)
    sampling = Sampling(cast(Any, task.sampling), task.sample_rate)
    table = json.dumps(task.federated, sort_keys=True, default=dict)
    return _predicted(defense, record.noise_multiplier, table, public, sampling, seed, delta, nominal is None)


def proved_by_message(record: Record, task: UpdateTask, delta: float) -> Claim:
    """Returns the claim of a client's first message that its local steps prove.

    Args:
        record: with a noise multiplier.
        task: of the same, with a message.
        delta: of the claim.

    Raises:
        TypeError, ValueError: for untrusted content that is no message.
    """
    message = dict(task.message or {})
    clients, rounds, steps = (message.get(name) for name in ("clients", "rounds", "local_steps"))
    if not (isinstance(clients, int) and isinstance(rounds, int) and isinstance(steps, int)):
        raise ValueError("a message must have clients, rounds and local_steps")
    if record.noise_multiplier is None:
        raise ValueError("a record of a message must have a noise multiplier")
    table = FederatedTable.model_validate(message)
    if table.aggregation is not None:
        raise ValueError("a record of a message must be of a run that shows messages, got aggregation = 'sum'")
    defense = json.dumps(json.loads(record.to_json())["defense"], sort_keys=True)
    batch = task.batch if task.local is None else task.local["batch"]
    sizes = batch, task.batch, _releases(task)
    return _predicted_message(defense, record.noise_multiplier, table.model_dump_json(), sizes, delta)


def _releases(task: TrainingTask | UpdateTask) -> int:
    """Returns the number of messages at models of an active server; 1 for other attackers."""
    releases = task.get("releases", 1)
    if not isinstance(releases, int) or isinstance(releases, bool) or releases < 1:
        raise ValueError(f"releases of a record must be at least 1, got {releases!r}")
    return releases


@cache
def _predicted_message(defense: str, sigma: float, table: str, sizes: tuple[int, int, int], delta: float) -> Claim:
    batch, examples, releases = sizes
    clients = FederatedTable.model_validate_json(table)
    chosen = json.loads(defense)
    method = lifted(RequestedMethod(kind="defenses", name=chosen["name"], settings=chosen["settings"]), clients)
    if own_multiplier(method) is None:
        method = method.with_noise(sigma)
    if method.noise_place == "server":
        raise ValueError(f"a message must have noise to prove an epsilon, and '{method.name}' adds it at the server")
    client, sampling = attacked_client(method), sampling_of_messages(batch, examples)
    ledgers = predict_federated(
        method,
        [examples] * clients.clients,
        federation=Federation(rounds=clients.rounds, local_steps=clients.local_steps or 1, participation=1.0),
        sampling=sampling,
        schedule=RoundSchedule(((client,),) + ((),) * (clients.rounds - 1)),
    )
    entries = ledgers[client].entries * releases
    return replace(ledgers[client], entries=entries).claim(delta, unit=method.unit)


@cache
def _predicted(
    defense: str,
    sigma: float,
    table: str,
    sizes: tuple[int, ...],
    sampling: Sampling,
    seed: int,
    delta: float,
    size_public: bool,
) -> tuple[Claim, ...]:
    clients = FederatedTable.model_validate_json(table)
    chosen = json.loads(defense)
    method = lifted(RequestedMethod(kind="defenses", name=chosen["name"], settings=chosen["settings"]), clients)
    if own_multiplier(method) is None:
        method = method.with_noise(sigma)
    federation = clients.federation(sampling.steps_per_epoch)
    ledgers = predict_federated(
        method,
        list(sizes),
        federation=federation,
        sampling=sampling,
        schedule=schedule_of(federation, list(sizes), seed),
    )
    claims = [ledger.claim(delta, unit=method.unit) for ledger in ledgers]
    relations = [relation_of(claim.relation, method, federation, size_public=size_public) for claim in claims]
    return tuple(replace(claim, relation=relation) for claim, relation in zip(claims, relations, strict=True))
