"""Federated trainings as requested: the clients' examples, the lifted method, its schedule, its calibrated noise.

A central defense becomes the local steps of FedAvg. For `unit = "client"` it becomes the server's average of updates,
and clients take plain SGD steps.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Any

from jaxtyping import Int64
from torch import Tensor

from leakbench.benchmarks.core import Splits, client_splits
from leakbench.defenses.core import (
    Defense,
    Federated,
    Federation,
    PrivateAverage,
    RoundSchedule,
    Sampling,
    Whole,
    calibrate_federated,
    clip,
    draw_schedule,
    predict_federated,
    unbounded,
)
from leakbench.defenses.core.federated.federated_settings import FederatedSettings
from leakbench.defenses.core.federated.prediction import rows_of_a_round
from leakbench.defenses.core.federated.private_average import refuse_as_server
from leakbench.defenses.core.federated.schedule import refuse_cut_stream
from leakbench.defenses.core.federated.secure_sum import hides_members, refuse_small_rounds

from ..catalog import methods as catalog
from ..suite.errors import SuiteError
from ..suite.federated import FederatedTable
from ..suite.suite import DefenseChoice, Suite
from ..targets.local_steps import why_unknown
from ..targets.simulated_message import why_no_message
from .build import planned
from .request import Budget, RequestedMethod, TrainingRequest
from .splits_cache import load_data


def clients_of(request: TrainingRequest) -> FederatedTable:
    """Returns the clients and rounds of a federated request.

    Raises:
        ValueError: it is central training.
    """
    if request.training.federated is None:
        raise ValueError("a request of central training has no clients")
    return request.training.federated


def divided(
    request: TrainingRequest, ids: Int64[Tensor, " examples"], labels: Int64[Tensor, " examples"]
) -> list[Int64[Tensor, "_"]]:
    """Returns the positions of each client's examples.

    Args:
        request: of a federated training.
        ids: of the training examples.
        labels: of the same.
    """
    table = clients_of(request)
    return client_splits(ids.cpu(), labels.cpu(), table.clients, seed=request.seed, **table.division)


def federation_of(request: TrainingRequest, examples: int) -> Federation:
    """Returns the shape of a request's run.

    Args:
        request: of a federated training.
        examples: training examples of all clients.
    """
    return clients_of(request).federation(planned(request, examples)[0].steps_per_epoch)


def at_chosen_models(federation: Federation, rounds: int) -> Federation:
    """Returns rounds of the same local steps in which an active server sends the models, and all clients are asked.

    Args:
        federation: shape of the run.
        rounds: number of models.
    """
    return replace(federation, rounds=rounds, participation=1.0, participants="fixed", dropout=0.0)


def lifted(method: RequestedMethod, table: FederatedTable) -> Federated:
    """Returns the federated method of a requested defense, before its noise is set.

    Args:
        method: a federated method, or a central defense.
        table: decides the place of a central defense.
    """
    built = catalog.method(method.name, method.settings)
    return built if isinstance(built, Federated) else _lifted(built, table)


def _lifted(defense: Defense, table: FederatedTable) -> Federated:
    if table.unit == "record":
        return Federated(client=defense, name=defense.name)
    plain = Defense(Whole(bound=unbounded()), noise_multiplier=0.0)
    return Federated(client=plain, server=PrivateAverage(defense=defense), name=defense.name)


def draws_noise(method: RequestedMethod) -> bool:
    """True for a federated method with noise of its own, whatever the budget."""
    built = catalog.method(method.name, method.settings)
    return isinstance(built, Federated) and (bool(built.budgets) or (built.noise_multiplier or 0.0) > 0)


def own_multiplier(method: Federated) -> float | None:
    """Returns the noise multiplier of a method; the least of clients with budgets of their own."""
    return min(method.budgets) if method.budgets else method.noise_multiplier


def defend_federated(request: TrainingRequest, sizes: list[int], schedule: RoundSchedule) -> tuple[Federated, bool]:
    """Returns the federated method at its budget's noise, and whether that noise was matched instead of calibrated.

    A method without a bound proves nothing at any noise; it gets the noise that DP-SGD would need, as in central runs.

    Args:
        request: of a federated training.
        sizes: number of every client's examples.
        schedule: participants of the rounds.
    """
    method, budget = lifted(request.defense, clients_of(request)), request.budget
    if method.budgets or method.noise_multiplier is not None or not budget.draws_noise:
        return method, False
    if budget.noise_multiplier is not None:
        return method.with_noise(float(budget.noise_multiplier)), False
    examples = sum(sizes)
    run: dict[str, Any] = {
        "sizes": sizes,
        "federation": federation_of(request, examples),
        "sampling": planned(request, examples)[0],
        "schedule": schedule,
    }
    target: dict[str, Any] = dict(budget.wanted)
    ledgers = predict_federated(method.with_noise(1.0), **run)
    if not any(entry.reason for ledger in ledgers for entry in ledger.entries):
        return calibrate_federated(method, **run, **target), False
    bounded = _lifted(Defense(Whole(bound=clip(1.0))), clients_of(request))
    return method.with_noise(calibrate_federated(bounded, **run, **target).noise_multiplier or 0.0), True


def hides_messages(table: FederatedTable, attack: str) -> str:
    """Returns the reason why an attack on messages of single clients is not offered; empty where they are seen.

    Args:
        table: of the suite.
        attack: name of the attack.
    """
    if table.aggregation is None:
        return ""
    return f"{attack} reads the messages of a client, and aggregation = 'sum' shows the server their sum alone"


def schedule_of(federation: Federation, sizes: list[int], seed: int) -> RoundSchedule:
    """Returns a schedule that is drawn with a public seed.

    Args:
        federation: shape of the run.
        sizes: number of every client's examples.
        seed: public seed of the schedule.
    """
    populated = [client for client, size in enumerate(sizes) if size]
    return draw_schedule(federation, populated, seed=seed, key=seed)


def check_federation(suite: Suite, splits: Splits) -> None:
    """Refuses clients that the data cannot be divided among, and samplers that do not fit local steps.

    Args:
        suite: with its overrides and selection.
        splits: of its first seed.

    Raises:
        SuiteError: named by the key of the table.
    """
    table, pool = suite.federated, splits.private
    if table is None:
        return
    where = f"{suite.source}: federated"
    if table.clients > len(pool):
        raise SuiteError(f"{where}.clients: must be at most {len(pool)}, the private examples, got {table.clients}")
    try:
        parts = client_splits(pool.ids, pool.labels, table.clients, seed=suite.seeds[0], **table.division)
    except ValueError as error:
        raise SuiteError(f"{where}: {error}") from None
    sizes = [len(part) for part in parts]
    for task_of, task in [("task", suite.task), *((c.name, suite.task_for(c)) for c in suite.defense_grid())]:
        size = task.nominal_size or len(pool) / table.clients
        if task.batch > size:
            raise SuiteError(
                f"{suite.source}: {task_of}.batch: must be at most {size:g}, the examples of a client of average size, "
                f"got {task.batch}"
            )
        sampling = Sampling(task.sampling, 1.0 if task.sampling == "full" else task.batch / size)
        try:
            table.federation(sampling.steps_per_epoch).samplings(sampling, sizes)
        except ValueError as error:
            raise SuiteError(f"{where}: {error}") from None


def cannot_federate(suite: Suite, choice: DefenseChoice) -> str:
    """Returns the reason why a defense cannot be trained by a suite's clients; empty if it can.

    Args:
        suite: with a `[federated]` table.
        choice: its defense.
    """
    table, task = suite.federated, suite.task_for(choice)
    if table is None:
        return ""
    method = RequestedMethod(kind="defenses", name=choice.name, settings=choice.settings)
    try:
        built = _known(method.name, json.dumps(method.settings), table.model_dump_json())
    except catalog.MissingExtra as error:
        return str(error)
    except (Exception, SystemExit):
        return ""  # the failure is recorded in its cells
    try:
        noisy = built if built.budgets or built.noise_multiplier is not None else built.with_noise(1.0)
        noisy.check(table.clients)
        FederatedSettings(
            method=noisy,
            federation=table.federation(1),
            sampling=Sampling("poisson", 0.5),
            lr=task.lr,
            seed=0,
            key=0,
            exact=False,
            schedule=None,
            recipe=replace(task.recipe, nominal_size=None),
            execution=task.execution(),
            keep_messages=False,
            progress=None,
        )
        size = task.nominal_size or _examples(suite) / table.clients
        sampling = Sampling(task.sampling, 1.0 if task.sampling == "full" else min(1.0, task.batch / size))
        fault = _fault_of_noise(method.name, json.dumps(method.settings), table.model_dump_json(), sampling)
    except ValueError as error:
        fault = str(error)
    return f"{choice.name} does not fit these clients: {fault}" if fault else ""


def _examples(suite: Suite) -> int:
    """Returns the number of private examples of a suite."""
    task = suite.task
    return task.private or len(load_data(task.data, suite.seeds[0], task.sizes).private)


@cache
def _fault_of_noise(name: str, settings: str, table: str, sampling: Sampling) -> str:
    """Returns the reason why rounds would cut a method's noise, by dry runs without data; empty if they do not.

    Args:
        name: of a defense.
        settings: its own, as JSON.
        table: clients and rounds, as JSON.
        sampling: of a client of average size.
    """
    clients, method = FederatedTable.model_validate_json(table), _known(name, settings, table)
    noisy = method if method.budgets or method.noise_multiplier is not None else method.with_noise(1.0)
    federation = clients.federation(sampling.steps_per_epoch)
    try:
        if not federation.shows_messages:
            hidden = noisy.noise_place == "server" and hides_members(federation)
            refuse_small_rounds(federation, clients.clients, hidden=hidden)
        if isinstance(noisy.server, PrivateAverage):
            own_rounds, shared = federation.participants == "fixed", not federation.shows_messages
            refuse_as_server(noisy.server.defense, federation.rounds, own_rounds=own_rounds, shared=shared)
        elif noisy.noise_place == "local steps":
            everybody = federation.senders(clients.clients, hidden=False) == clients.clients
            whole = everybody and federation.participants == "fixed" and not federation.dropout
            for row in rows_of_a_round(noisy.client_defense(0), sampling, federation):
                refuse_cut_stream(row, federation.local_steps, whole=whole)
    except ValueError as error:
        return str(error)
    except Exception:
        return ""  # the failure is recorded in its cells
    return ""


def check_message(suite: Suite) -> None:
    """Refuses a shared message whose local steps end within a pass over the client's examples.

    Args:
        suite: with its overrides and selection.

    Raises:
        SuiteError: named by the key of the table.
    """
    share, table = suite.share, suite.federated
    if share is None or table is None or share.local is None:
        return
    passes, steps = share.batch // share.local.batch, message_of(suite)["local_steps"]
    if steps % passes:
        # An example is charged for a step in each pass.
        raise SuiteError(
            f"{suite.source}: share.local.batch: must make whole passes over the client's {share.batch} examples in "
            f"{steps} local steps, got {share.local.batch}, {passes} steps a pass"
        )


def message_of(suite: Suite) -> dict[str, Any]:
    """Returns the federated run whose first message a suite attacks, as plain content.

    Args:
        suite: with [share] and [federated].

    Raises:
        ValueError: it lacks one of them.
    """
    share, table = suite.share, suite.federated
    if share is None or table is None:
        raise ValueError("a message must be of a suite with [share] and [federated]")
    a_pass = 1 if share.local is None else share.batch // share.local.batch
    steps = table.federation(a_pass).local_steps
    content = {"clients": table.clients, "rounds": table.rounds, "local_steps": steps, "unit": table.unit}
    # Absent for a single release, so that ids of messages stay unchanged.
    return content | ({} if table.chosen_models is None else {"chosen_models": table.chosen_models})


def sends_noise(suite: Suite, choice: DefenseChoice, budget: Budget) -> bool:
    """True if the messages of a defense have noise of the budget, or of the defense itself."""
    method = RequestedMethod(kind="defenses", name=choice.name, settings=choice.settings)
    if suite.federated is None:
        return budget.draws_noise
    return lifted(method, suite.federated).noise_place != "server" and (budget.draws_noise or draws_noise(method))


def cannot_send(suite: Suite, choice: DefenseChoice) -> str:
    """Returns the reason why a defense's messages cannot be simulated, found by planning on a toy; empty if they can.

    Args:
        suite: with a `[federated]` table.
        choice: its defense.
    """
    table, share = suite.federated, suite.share
    if table is None or share is None:
        return ""
    recipe = suite.task_for(choice).recipe
    if reason := why_no_message(recipe):
        return reason
    try:
        built = _known(choice.name, json.dumps(choice.settings), table.model_dump_json())
        a_pass = 1 if share.local is None else share.batch // share.local.batch
        steps = message_of(suite)["local_steps"]
        return why_unknown(built.client, steps, a_pass, round_steps=steps)
    except (Exception, SystemExit):
        return ""  # the failure is recorded in its cells


@cache
def _known(name: str, settings: str, table: str) -> Federated:
    method = RequestedMethod(kind="defenses", name=name, settings=json.loads(settings))
    return lifted(method, FederatedTable.model_validate_json(table))
