"""A federated training as a subject: utility, messages and epsilons of its clients, its rounds, its final model.

Attacks on global models are asked about the union of the clients' records, attacks on messages and local steps about
those of one client (`client_attacks.py`). The claim of a record is that of the client with the largest epsilon.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from leakbench.attacks.core import Controls, Knows
from leakbench.defenses.core import Claim, Ledger, assumptions, full, keyed

from .. import progress_events
from ..catalog import methods as catalog
from ..plan.artifact import Artifacts
from ..plan.cells import Cell
from ..plan.federation import own_multiplier
from ..plan.threat_models import OfClients, threat_model
from ..scoring.clients import client_accuracies, score_clients
from ..scoring.federation import score_federation
from ..scoring.rounds import score_rounds
from ..scoring.truth import GroundTruth
from ..scoring.utility import losses, score_utility
from ..targets.candidates import Candidates, copied
from ..targets.observe import FinalView, logits_of
from .chosen_rounds import membership_at_chosen_models
from .client_attacks import client_membership, client_property
from .federated_run import ClientsRun
from .membership import data_flags, scored_membership
from .outcome import Finding, Outcome, candidate_pools, column, finite_claim, join


class FederatedModel:
    """The subject of all cells that attack, or measure, the same federated training."""

    def __init__(self, cells: tuple[Cell, ...], device: torch.device, artifacts: Artifacts | None = None) -> None:
        """Takes the cells of a run and loads its data; trains nothing yet."""
        attacks = [catalog.attack(name) for name in {c.request.attack.name for c in cells if c.request.attack}]
        rows = [threat_model(attack.kind, attack.requires.access) for attack in attacks]
        # Messages and steps take memory: they are kept only if an attack of the job sees them.
        shown_parts: set[OfClients] = {row.of_clients for row in rows if row is not None}
        self.model = ClientsRun(cells[0].request.of_training(), device, shown_parts)

    def outcome(self, cell: Cell) -> Outcome:
        """Computes a cell; trains first unless an earlier cell did."""
        if self.model.request.control == "public_only":
            return self._public_only()
        if _chooses_models(cell):
            outcome = membership_at_chosen_models(self.model, cell)
            return replace(outcome, task=self._resolved | outcome.task)
        answer = _KINDS[cell.kind](self.model, cell)
        model, run = self.model, self.model.run
        claim = run.claim(model.request.budget.delta)
        flags = [*answer.flags, *_diverged(run.model)]
        if model.method[1]:
            flags.append("noise_matched")
        if model.request.training.tuning_digest:
            flags.append("tuned_on_public")
        if run.public_used and model.splits.in_distribution_public:
            flags.append("public_in_distribution")
        # By the executed plans of every client. The noise itself is not measured here.
        if math.isfinite(claim.epsilon) and model.request.budget.overspent(claim):
            flags.append("claim_violated")
        return Outcome(
            metrics=answer.metrics,
            task=self._resolved,
            claim=finite_claim(asdict(claim)),
            noise_multiplier=own_multiplier(model.method[0]),
            noise=run.noise,
            engine=run.engine,
            flags=[*flags, *run.remarks],
            arrays=answer.arrays,
        )

    def _public_only(self) -> Outcome:
        """Measures the network that was trained on the public examples alone; no private example was read."""
        model, network = self.model, self.model.public_only
        finding = _utility_of(model, network)
        claim = _claim_of_nothing(model)
        flags = [*_diverged(network), "pretrained_on_public"]
        if model.splits.in_distribution_public:
            flags.append("public_in_distribution")
        return Outcome(
            metrics=finding.metrics,
            task=self._resolved | {"steps": 0},
            claim=finite_claim(asdict(claim)),
            flags=flags,
            arrays=finding.arrays,
        )

    @cached_property
    def _resolved(self) -> dict[str, Any]:
        model, splits = self.model, self.model.splits
        sampling, steps = model.sampling
        return {
            "digest": splits.digest,
            "private": len(model.members),
            "trained_on": len(model.uninserted),
            "non_member": len(splits.non_member),
            "public": len(splits.public),
            "tested_on": len(model.test),
            "input_shape": list(splits.input_shape),
            "public_in_distribution": splits.in_distribution_public,
            "steps": steps,
            "sample_rate": sampling.rate,
            "parameters": sum(p.numel() for p in model.network.parameters()),
            "client_sizes": model.sizes,
            "clients_digest": model.clients_digest,
            "schedule_of": {"seed": model.schedule_seed},
        }


def _chooses_models(cell: Cell) -> bool:
    """True for an attack of an active server."""
    requested = cell.request.attack
    return requested is not None and Controls.MODEL in catalog.attack(requested.name).requires.controls


def utility(model: ClientsRun, cell: Cell) -> Finding:
    """Measures the global model on held-out examples, and on those of each client's classes."""
    return _utility_of(model, model.run.model)


def federation(model: ClientsRun, cell: Cell) -> Finding:
    """Counts rounds and bytes of every client, and computes its epsilon."""
    run, delta = model.run, model.request.budget.delta
    clients = range(len(model.sizes))
    logits = logits_of(run.model, model.test.inputs)
    right = (logits.argmax(dim=1) == model.test.labels) & ~logits.isnan().any(dim=1)
    columns = {
        "client": list(clients),
        "examples": model.sizes,
        "rounds": [sum(client in record.bytes_down for record in run.rounds) for client in clients],
        "messages": [sum(client in record.bytes_up for record in run.rounds) for client in clients],
        "bytes_up": [run.bytes_up(client) for client in clients],
        "bytes_down": [run.bytes_down(client) for client in clients],
        "epsilon": [claim.epsilon for claim in run.claims(delta)],
        "accuracy": client_accuracies(right.cpu(), model.test.labels.cpu(), model.histograms.cpu()).tolist(),
    }
    return Finding(score_federation(columns), columns)


def rounds(model: ClientsRun, cell: Cell) -> Finding:
    """Lists accuracy, loss, bytes so far, drift and losses of every round."""
    run = model.run
    columns = {
        "round": [record.number for record in run.rounds],
        "accuracy": [measure.accuracy for measure in model.rounds],
        "loss": [measure.loss for measure in model.rounds],
        "bytes_up": list(accumulate(sum(record.bytes_up.values()) for record in run.rounds)),
        "bytes_down": list(accumulate(sum(record.bytes_down.values()) for record in run.rounds)),
        "drift": [measure.drift for measure in model.rounds],
        "clients": [list(record.clients) for record in run.rounds],
        "lost": [sorted(record.missing) for record in run.rounds],
    }
    return Finding(score_rounds(columns, summed=not model.shows_messages), columns)


def membership(model: ClientsRun, cell: Cell) -> Finding:
    """Runs an attack, and scores how well it separates members: of any client by global models, else of one client.

    Raises:
        ValueError: federated runs do not offer its access.
    """
    requested = cell.request.requested_attack
    attack = catalog.attack(requested.name)
    row = threat_model(attack.kind, attack.requires.access)
    if row is None or row.of_clients == "nothing":
        raise ValueError(f"{attack.name} needs {attack.requires.access.name} access, which federated runs do not offer")
    if row.of_clients != "final model" or row.build is None:
        return client_membership(model, cell, row)
    knows = attack.requires.knows
    examples = join(*candidate_pools(model.splits, model.request.training.candidates, model.device))
    candidates = Candidates.draw(examples, cell.request.seed_for(f"candidates {cell.id}"))
    public = model.public_knowledge
    population = public.population if Knows.POPULATION in knows else None
    view = FinalView(
        attackers_model=copy.deepcopy(model.run.model),
        attackers_knowledge=replace(public, population=None if population is None else copied(population)),
        given=candidates.given,
    )
    generator = keyed(cell.request.seed_for(f"attack {cell.id}"))
    with progress_events.named_activity(f"{attack.name} on {model.request.defense.name}, seed {model.request.seed}"):
        result = candidates.answers(attack(row.build(view), generator, **copy.deepcopy(requested.settings)))
    truth = GroundTruth(members=model.members.ids, candidates=examples.ids)
    # A claim for a client says nothing of a single record under the same relation.
    claim = model.run.claim(model.request.budget.delta) if model.run.unit == "record" else None
    return scored_membership(model, knows, result, truth, claim, data_flags(model))


_KINDS: dict[str, Callable[[ClientsRun, Cell], Finding]] = {
    "utility": utility,
    "federation": federation,
    "rounds": rounds,
    "membership": membership,
    "client_property": client_property,
}


def _utility_of(model: ClientsRun, network: nn.Module) -> Finding:
    test = model.test
    logits = logits_of(network, test.inputs)
    # NaN sorts above every number, so argmax would return a class: -1, an invalid label, counts as wrong.
    predicted = logits.argmax(dim=1).masked_fill(logits.isnan().any(dim=1), -1)
    columns = {
        "id": column(test.ids),
        "label": column(test.labels),
        "loss": column(losses(logits, test.labels)),
        "predicted": column(predicted),
    }
    right = (predicted == test.labels).cpu()
    of_clients = score_clients(client_accuracies(right, test.labels.cpu(), model.histograms.cpu()))
    return Finding(score_utility(logits, test.labels) | of_clients, columns)


def _claim_of_nothing(model: ClientsRun) -> Claim:
    """Returns the claim of a network that no private example has touched: epsilon 0."""
    claim = Ledger(model.sampling[0]).claim(model.request.budget.delta, unit="record")
    # Nothing was sampled, so the sampler's key is no assumption.
    return replace(claim, assumes=assumptions("none", full(), key_given=False, public_used=True))


def _diverged(network: nn.Module) -> list[str]:
    finite = all(bool(torch.isfinite(p).all()) for p in network.parameters())
    return [] if finite else ["diverged"]
