"""Trials of a federated suite's search: as many clients as in the private run, on public examples alone.

A trial divides public examples as the suite divides private ones, so settings for clients that are unlike are chosen
among clients that are unlike. It keeps clients, participation, local steps, expected batch B and noise multiplier of
the private run, so the noise of a step, sigma C / B, is the same although a public client has fewer examples; its
sample rate, B / n, is larger, and nothing is claimed about it.
Caveat: noise adds up over rounds. Trials of fewer rounds prefer larger learning rates than the private run would.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from leakbench.attacks.core import Examples
from leakbench.benchmarks.core import Split, Splits
from leakbench.defenses.core import (
    TOY_DIM,
    Context,
    Federated,
    Federation,
    PrivateAverage,
    Sampling,
    ToyRows,
    federate,
)
from leakbench.defenses.core.training.calibration import TOY_LAYOUT

from ..plan.build import recipe_of
from ..plan.federation import clients_of, defend_federated, divided, federation_of, lifted, schedule_of
from ..plan.pretrain import starting_model
from ..plan.request import SeedSet, TrainingRequest, seed_of_data
from ..suite.federated import FederatedTable
from ..suite.schema import TuneTable


def trial_of(tune: TuneTable, clients: FederatedTable) -> dict[str, int | None]:
    """Returns the length and the size of a trial in file form; `examples` is None for as many as private ones.

    Args:
        tune: the search.
        clients: of the private run.
    """
    return {"examples": tune.trial_examples, "rounds": tune.trial_rounds or clients.rounds}


def check_trial(request: TrainingRequest, trial: dict[str, Any], private: int, own: Split, rest: int) -> None:
    """Refuses public clients that cannot take the steps of private ones.

    Args:
        request: of the trial.
        trial: from `trial_of`.
        private: number of private examples.
        own: public examples of the clients.
        rest: number of public examples that the method may read.

    Raises:
        ValueError: the examples cannot be divided as private ones are, a client of average size has fewer than a batch,
            the sampler needs another number of them, or the method would read more than `rest`.
    """
    examples = len(own)
    clients, task = clients_of(request).clients, request.training
    if task.sampling == "full" and examples != private:
        raise ValueError(
            "trial_examples must be absent under full sampling, whose batch is all of a client's examples, got "
            f"{examples}"
        )
    if task.sampling != "full" and examples // clients < task.batch:
        raise ValueError(
            f"trial_examples must be at least {clients} clients x {task.batch}, a batch of the private run, so that a "
            f"step has the same noise, got {examples}; raise it, or lower task.batch"
        )
    try:
        parts = divided(request, own.ids, own.labels)
    except ValueError as error:
        raise ValueError(f"trial_examples must be enough for the division of the private run: {error}") from None
    federation, sampling = _shape(request, trial, examples, private)
    federation.samplings(sampling, [len(part) for part in parts])
    if fault := _shortage(lifted(request.defense, clients_of(request)), federation, rest):
        raise ValueError(
            f"must leave the public examples that {request.defense.name} reads, got {rest}: {fault}; raise "
            "task.public, lower tune.validation or tune.trial_examples, or set a smaller rank or auxiliary_size"
        )


def _shortage(method: Federated, federation: Federation, size: int) -> str:
    """Returns the effect of the size of the public pool on the plans of a method; empty for none.

    Args:
        method: at any noise multiplier.
        federation: shape of the run.
        size: number of public examples.
    """
    try:
        endless = _remarks(method, federation, ToyRows(TOY_DIM))
    except Exception:
        return ""  # for another reason, which the run reports
    try:
        lowered = _remarks(method, federation, ToyRows(TOY_DIM, size=size)) - endless
    except ValueError as error:
        return str(error)
    return f"its plan would be marked {', '.join(sorted(lowered))}" if lowered else ""


def _remarks(method: Federated, federation: Federation, public: ToyRows) -> frozenset[str]:
    """Returns the remarks on the first plans of a run, by a dry run on a toy."""
    context = Context(
        step=0,
        steps=federation.steps,
        layout=TOY_LAYOUT,
        parameters=torch.zeros(TOY_DIM),
        public=public,
        one_off=lambda plan, _: tuple(torch.ones(block.codec.size) for block in plan.blocks),
        noise_multiplier=1.0,
        round_steps=federation.local_steps,
    )
    method.messages.prepare(context)
    parts = [(method.client, context)]
    if isinstance(method.server, PrivateAverage):
        parts.append((method.server.defense, replace(context, steps=federation.rounds, round_steps=1)))
    return frozenset(mark for part, at in parts for mark in part.plan(part.start(at), at)[1].remarks)


def trained_by_clients(
    request: TrainingRequest, trial: dict[str, Any], splits: Splits, own: Examples, rest: Examples, seeds: SeedSet
) -> nn.Module:
    """Returns the global model of a trial.

    Args:
        request: the private run, at the settings of the trial.
        trial: from `trial_of`.
        splits: of its data.
        own: public examples of the clients.
        rest: public examples that the method may read.
        seeds: of the trial. Seeded even for a run with secure noise, because it holds no private data.
    """
    task = request.training
    federation, sampling = _shape(request, trial, len(own), len(splits.private))
    parts = divided(request, own.ids, own.labels)
    method = _at_noise_of_run(request, len(splits.private))
    # The same for all points; a secret schedule is drawn by the run itself.
    schedule = schedule_of(federation, [len(part) for part in parts], seed_of_data(splits.digest, "tuning schedule"))
    secret = federation.participants == "poisson" and method.noise_place == "server"
    return federate(
        starting_model(request, splits, rest),
        [(own.inputs[part], own.labels[part]) for part in parts],
        method,
        federation=federation,
        sampling=sampling,
        lr=task.lr,
        public=(rest.inputs, rest.labels),
        seed=seeds.public,
        key=seeds.noise,
        schedule=None if secret else schedule,
        recipe=replace(recipe_of(task, splits), nominal_size=None),
        execution=task.execution(own.inputs.device),
    ).model


def _shape(request: TrainingRequest, trial: dict[str, Any], examples: int, private: int) -> tuple[Federation, Sampling]:
    """Returns the federation of the private run at a trial's rounds, and the sampler at the same expected batch."""
    task = request.training
    rate = 1.0 if task.sampling == "full" else task.batch * clients_of(request).clients / examples
    return replace(federation_of(request, private), rounds=trial["rounds"]), Sampling(task.sampling, min(1.0, rate))


def _at_noise_of_run(request: TrainingRequest, private: int) -> Federated:
    """Returns the method at the noise of the private run; calibrated for clients of equal size, if it is calibrated."""
    nominal = request.training.nominal_size
    sizes = [nominal or size for size in _sizes(private, clients_of(request).clients)]
    schedule = schedule_of(federation_of(request, private), sizes, request.seed)
    return defend_federated(request, sizes, schedule)[0]


def _sizes(examples: int, clients: int) -> list[int]:
    return [len(part) for part in torch.arange(examples).tensor_split(clients)]
