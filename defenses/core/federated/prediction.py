"""Predicted ledgers of a federated run, and noise calibrated to its worst client.

The plans of every client's scheduled steps are executed on empty batches over a toy layout, as in
`training/calibration.py`. Clients with the same sampler and the same rounds share a dry run.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from ..plan.defense import Defense
from ..plan.noise_correlation import StrategyRow
from ..plan.public_data import ToyRows
from ..privacy.ledger import Ledger
from ..privacy.sampling import Sampling, fixed
from ..training.calibration import TOY_DIM, calibrate, rehearsal
from ..training.step import Account
from .federated_settings import refuse_unfit
from .method import Federated
from .private_average import ClientAccounts, refuse_as_server
from .schedule import Federation, RoundSchedule, refuse_cut_stream
from .secure_sum import NoiseShares, refuse_small_rounds, shares_of


def predict_federated(
    method: Federated, sizes: Sequence[int], *, federation: Federation, sampling: Sampling, schedule: RoundSchedule
) -> tuple[Ledger, ...]:
    """Returns the ledger that every client of a run will have, from dry runs without data.

    Args:
        method: with its noise multiplier set.
        sizes: public number of every client's examples; 0 for a client without data.
        federation: shape of the run.
        sampling: sampler of a client's records.
        schedule: participants and losses of the rounds.

    Raises:
        ValueError: for a method, a shape or a schedule that a run would refuse.
    """
    method.check(len(sizes))
    refuse_unfit(method, federation)
    clients = range(len(sizes))
    populated = [client for client in clients if sizes[client]]
    schedule.check(federation, populated)
    own = federation.samplings(sampling, sizes)
    if not federation.shows_messages and method.noise_place != "server":
        refuse_small_rounds(federation, len(populated), hidden=False)
    if method.noise_place == "local steps":
        whole = schedule.whole(populated)
        known: dict[object, Ledger] = {}
        ledgers = []
        for client in clients:
            steps_by_round = [
                (number, schedule.steps_of(client, number, federation.local_steps))
                for number in schedule.rounds_of(client)
            ]
            key = (own[client], method.client_defense(client).noise_multiplier, tuple(steps_by_round))
            if key not in known:
                defense = method.client_defense(client)
                known[key] = _of_records(method, defense, own[client], federation, steps_by_round, whole=whole)
            ledgers.append(Ledger(own[client], list(known[key].entries)))
        return tuple(ledgers)
    if method.noise_place == "update":
        sent = [
            [number for number in schedule.rounds_of(client) if (number, client) not in schedule.lost]
            for client in clients
        ]
        return tuple(_of_rounds(method.private_part, fixed(1.0), federation, rounds) for rounds in sent)
    schedule.check_of_clients(federation, given=False)
    shares = None if federation.shows_messages else shares_of(federation, len(populated))
    own_rounds = federation.participants == "fixed"
    refuse_as_server(method.private_part, federation.rounds, own_rounds=own_rounds, shared=shares is not None)
    of_clients = federation.sampling_of_clients(len(populated))
    everyone = range(federation.rounds)
    return tuple(
        _of_rounds(
            method.private_part,
            of_clients,
            federation,
            schedule.rounds_of(client) if own_rounds else everyone,
            shares=shares,
        )
        if sizes[client]
        else Ledger(sampling)
        for client in clients
    )


def calibrate_federated(
    method: Federated,
    sizes: Sequence[int],
    *,
    federation: Federation,
    sampling: Sampling,
    schedule: RoundSchedule,
    epsilon: float | None = None,
    delta: float | None = None,
    advantage: float | None = None,
    tpr: float | None = None,
    fpr: float | None = None,
) -> Federated:
    """Returns the method with the smallest noise multiplier that proves a target for its worst client.

    The noise is that of the client with the largest planned number of rounds under its sampler; losses are not counted
    on. All other clients, and the worst one if it is lost, prove more.

    Args:
        method: its noise multiplier, if set, is replaced.
        sizes: as for `predict_federated`.
        federation: shape of the run.
        sampling: sampler of a client's records.
        schedule: participants of the rounds.
        epsilon: target at `delta`, in nats.
        delta: in (0, 1).
        advantage: largest TPR - FPR of any membership test.
        tpr: largest true positive rate at `fpr`.
        fpr: false positive rate.

    Raises:
        ValueError: for budgets that clients have chosen, a schedule without clients, or a target that no noise proves.
    """
    target: dict[str, Any] = {"epsilon": epsilon, "delta": delta, "advantage": advantage, "tpr": tpr, "fpr": fpr}
    if method.budgets:
        raise ValueError("budgets must be empty for a calibration, got some: clients have chosen their noise")
    rounds = [len(schedule.rounds_of(client)) for client in range(len(sizes))]
    if not any(rounds):
        raise ValueError("schedule must have a client in some round, got none")
    part, cases, claimed_share = method.private_part, [], 1.0
    if method.noise_place == "update":
        cases.append((fixed(1.0), max(rounds), ()))
    elif method.noise_place == "server":
        populated = sum(1 for size in sizes if size)
        if not federation.shows_messages:
            claimed_share = shares_of(federation, populated).claimed_share
        fixed_rounds = federation.participants == "fixed"
        cases.append(
            (federation.sampling_of_clients(populated), max(rounds) if fixed_rounds else federation.rounds, ())
        )
    else:
        most: dict[Sampling, int] = {}
        for own, count in zip(federation.samplings(sampling, sizes), rounds, strict=True):
            most[own] = max(count, most.get(own, 0))
        releases = method.rule.releases(TOY_DIM)
        cases += [(own, count * federation.local_steps, releases * count) for own, count in most.items() if count]
    multipliers = [
        calibrate(part, **target, sampling=own, steps=steps, before=before).calibrated_multiplier
        for own, steps, before in cases
    ]
    return method.with_noise(max(multipliers) / claimed_share)


def _of_records(
    method: Federated,
    defense: Defense,
    sampling: Sampling,
    federation: Federation,
    rounds: Sequence[tuple[int, int]],
    *,
    whole: bool,
) -> Ledger:
    """Returns the ledger of a client whose records are the unit.

    Args:
        method: for the releases of its rule.
        defense: the client's.
        sampling: the client's.
        federation: shape of the run.
        rounds: (number, local steps) of the client's rounds.
        whole: whether every client takes every step of every round.

    Raises:
        ValueError: for a stream of correlated noise that a missed round would cut.
    """
    account = Account(Ledger(sampling))
    begun, tau = False, federation.local_steps
    epoch = sampling.steps_per_epoch
    stepper, execute, parameters = rehearsal(
        defense, account, steps=federation.steps, public=ToyRows(TOY_DIM), steps_per_epoch=epoch, round_steps=tau
    )
    for number, steps in rounds:
        if not steps:
            continue
        if not begun:
            stepper.start()
            begun = True
        for plan in method.rule.releases(parameters.numel()):
            account.charge(plan, step=number * tau, one_off=True)
        for step in range(number * tau, number * tau + steps):
            plan = stepper.take(step, parameters.clone(), execute, account).plan
            refuse_cut_stream(None if plan is None else plan.plan.correlated, tau, whole=whole)
            parameters -= stepper.update
            stepper.judge(execute, account)
    return account.ledger


def rows_of_a_round(defense: Defense, sampling: Sampling, federation: Federation) -> tuple[StrategyRow, ...]:
    """Returns the positions in streams of correlated noise of a client's first round, by a dry run on a toy.

    Args:
        defense: of the client, with its noise multiplier set.
        sampling: of the client.
        federation: shape of the run.
    """
    account = Account(Ledger(sampling))
    steps, tau, epoch = federation.steps, federation.local_steps, sampling.steps_per_epoch
    stepper, execute, parameters = rehearsal(
        defense, account, steps=steps, public=ToyRows(TOY_DIM), steps_per_epoch=epoch, round_steps=tau
    )
    rows: list[StrategyRow] = []
    try:
        stepper.start()
        _, plan = defense.plan(copy.copy(stepper.state), stepper.context)
        if plan.correlated is None:
            return ()
        for step in range(tau):
            noisy = stepper.take(step, parameters.clone(), execute, account).plan
            if noisy is not None and noisy.plan.correlated is not None:
                rows.append(noisy.plan.correlated)
    except Exception:
        # The toy may be too small for a method's settings, as for a rank: the run tries them, and reports their error.
        return ()
    return tuple(rows)


def _of_rounds(
    defense: Defense,
    sampling: Sampling,
    federation: Federation,
    rounds: Sequence[int],
    *,
    shares: NoiseShares | None = None,
) -> Ledger:
    """Returns the ledger of a client that is the unit, from a dry run of its rounds."""
    ledger = Ledger(sampling)
    account = ClientAccounts(Ledger(sampling), charged=[Account(ledger)], shares=shares)
    epoch = sampling.steps_per_epoch
    stepper, execute, parameters = rehearsal(
        defense, account, steps=federation.rounds, public=ToyRows(TOY_DIM), steps_per_epoch=epoch
    )
    stepper.start()
    for number in rounds:
        stepper.take(number, parameters.clone(), execute, account)
    return ledger
