"""Attacks on a client of a federated training: by its messages, by its local steps, and by the models of every round.

Membership attacks on a client are asked about its own records, and about non-members with its class histogram: a split
by class would otherwise be told from the classes alone. Their claim is that client's own.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from leakbench.attacks.core import Attack, ClassScores, Examples, Knows, MembershipScores, NotApplicable, SeenModels
from leakbench.defenses.core import (
    Claim,
    Federated,
    Identity,
    LargestEntries,
    Layout,
    Loss,
    Reachable,
    Rescale,
    Run,
    Step,
    keyed,
)
from leakbench.defenses.core.privacy.ledger import Ledger
from leakbench.defenses.core.training.transcript import Transcript

from .. import progress_events
from ..catalog import methods as catalog
from ..plan.build import recipe_of
from ..plan.cells import Cell
from ..plan.request import seed_of_data
from ..plan.threat_models import ThreatModel, every_step, last_update
from ..scoring.client_property import score_client_property
from ..scoring.truth import GroundTruth
from ..targets.candidates import Candidates, content_order, copied, refuse_comparison, repeated_alone
from ..targets.client_messages import ClientMessages, model_queries, models_of
from ..targets.observe import PublicKnowledge, RunView, participation
from ..targets.replay import StepReplay
from .federated_run import ClientsRun
from .membership import data_flags, scored_membership
from .outcome import Finding, candidate_pools, examples_of, join, pick


def client_membership(model: ClientsRun, cell: Cell, row: ThreatModel) -> Finding:
    """Runs a membership attack on a client, or on all of them by the models of every round.

    Raises:
        NotApplicable: no claim for records covers what the attack sees, or no non-members have the client's classes.
    """
    requested = cell.request.requested_attack
    attack = catalog.attack(requested.name)
    knows = attack.requires.knows
    if row.of_clients == "models":
        examples = join(*candidate_pools(model.splits, model.request.training.candidates, model.device))
        members = model.members.ids
    else:
        refuse_other_units(model)
        _refuse_too_long(model)
        examples, members = candidates_of_client(model, last=row.of_clients == "last message")

    def asked_about(chosen: Examples, purpose: str) -> MembershipScores:
        candidates = Candidates.draw(chosen, cell.request.seed_for(f"{purpose} {cell.id}"))
        target = _target(model, row, candidates, knows)
        # The same generator at every call: scores alone and among others may differ by their inputs, not by chance.
        generator = keyed(cell.request.seed_for(f"attack {cell.id}"))
        return candidates.answers(attack(target, generator, **copy.deepcopy(requested.settings)))

    with progress_events.named_activity(_words(model, attack)):
        result = asked_about(examples, "candidates")
        # Without noise there is nothing to cancel: a remainder alone reveals participation.
        if Knows.OTHERS in knows and _noisy(model):
            generator = keyed(cell.request.seed_for(f"alone {cell.id}"))
            scored = result.scores[torch.searchsorted(result.ids, examples.ids)]
            place = content_order(examples).argsort()
            for position in repeated_alone(scored, torch.isin(examples.ids, members), generator):
                alone = asked_about(pick(examples, position[None]), f"alone {int(place[position])}")
                refuse_comparison(requested.name, result, alone)
    truth = GroundTruth(members=members, candidates=examples.ids)
    return scored_membership(model, knows, result, truth, _claim_against(model, row), _flags(model, row, knows))


def client_property(model: ClientsRun, cell: Cell) -> Finding:
    """Runs an attack on the classes of every client that sent a message.

    Raises:
        NotApplicable: the noise is the server's, which is then trusted with the messages.
    """
    requested = cell.request.requested_attack
    attack = catalog.attack(requested.name)
    _refuse_trusted_server(model)
    _refuse_too_long(model)
    columns: dict[str, list[Any]] = {name: [] for name in ("client", "class", "score", "held", "named", "examples")}
    classes = model.splits.classes
    answers: dict[int, ClassScores] = {}
    with progress_events.named_activity(_words(model, attack)):
        _ = model.run
        clients = sorted(model.watched.replies)
        # Shuffled: a split by class deals class 0 to client 0, so an attack that counts its calls would name all.
        order = torch.randperm(len(clients), generator=keyed(cell.request.seed_for(f"order of clients {cell.id}")))
        for client in [clients[place] for place in order.tolist()]:
            target = _messages(model, client, None, attack.requires.knows).target()
            # The same generator for all clients, so that they are attacked with the same public examples.
            generator = keyed(cell.request.seed_for(f"attack {cell.id}"))
            answers[client] = attack(target, generator, **copy.deepcopy(requested.settings))
        for client, answer in sorted(answers.items()):
            columns["client"] += [client] * classes
            columns["class"] += range(classes)
            columns["score"] += answer.scores.tolist()
            columns["held"] += model.histograms[client].tolist()
            columns["named"] += answer.named.tolist()
            columns["examples"] += [model.sizes[client]] * classes
    return Finding(score_client_property(columns), columns)


def class_matched(
    client_counts: Int[Tensor, " classes"], inside: Examples, outside: Examples, *, limit: int | None, seed: int
) -> tuple[Examples, Examples]:
    """Returns as many examples of each class from both pools, with a given class histogram up to rounding.

    Args:
        client_counts: number of examples of each class.
        inside: pool of members.
        outside: pool of non-members.
        limit: largest number from either; None for as many as possible.
        seed: of the choice.

    Raises:
        NotApplicable: a class of the client is missing in a pool, or too rare for one example of any class.
    """
    classes, total = len(client_counts), int(client_counts.sum())
    counts = [torch.bincount(pool.labels.cpu(), minlength=classes) for pool in (inside, outside)]
    present = client_counts.cpu() > 0
    least = torch.minimum(*counts)
    if (missing := (present & (least == 0)).nonzero().flatten().tolist()) or not total:
        raise NotApplicable(
            "non-members must have the classes of the attacked client, and there are none of class "
            f"{', '.join(map(str, missing))}; set task.non_member"
        )
    scale = min(1.0, (limit or total) / total, float((least[present] / client_counts.cpu()[present]).min()))
    drawn = (scale * client_counts.cpu().double() + 1e-9).floor().long()
    if not int(drawn.sum()):
        raise NotApplicable(
            f"non-members with the classes of the attacked client are too few: {scale:.2g} of its {total} examples; "
            "set task.non_member"
        )
    generator = keyed(seed)
    chosen = []
    for pool in (inside, outside):
        order = torch.randperm(len(pool), generator=generator)
        labels = pool.labels.cpu()[order]
        parts = [order[labels == number][: int(count)] for number, count in enumerate(drawn)]
        chosen.append(pick(pool, torch.cat(parts)))
    return chosen[0], chosen[1]


def candidates_of_client(model: ClientsRun, *, last: bool = False) -> tuple[Examples, Tensor]:
    """Returns candidates of an attack on the attacked client, members first, and the members' ids.

    Args:
        model: the clients.
        last: whether members are the participants of the client's last local step.
    """
    client = model.attacked
    positions = model.shards[client]
    if last:
        data = model.private_side(client)
        positions = positions[data.sampling.indices(_last_step(model), len(positions), data.sampler_key)]
    own = pick(model.uninserted, positions)
    # The negative control trains on other examples: members of its test took part in nothing.
    inside = model.members if model.request.never_saw else own
    client_counts = torch.bincount(own.labels.cpu(), minlength=model.splits.classes)
    seed = seed_of_data(model.splits.digest, f"candidates of client {client} of {model.clients_digest}")
    outside = examples_of(model.splits.non_member, model.device)
    pools = class_matched(client_counts, inside, outside, limit=model.request.training.candidates, seed=seed)
    return join(*pools), pools[0].ids


def _target(model: ClientsRun, row: ThreatModel, candidates: Candidates, knows: Knows) -> Any:
    """Returns the target of a membership attack.

    Raises:
        NotApplicable: the client sent no message, or took no local step.
    """
    if row.of_clients == "messages":
        if model.attacked not in model.watched.replies:
            raise NotApplicable(f"client {model.attacked} is attacked, and none of its messages was received")
        return _messages(model, model.attacked, candidates, knows).target()
    if row.of_clients == "models":
        knowledge, final = knowledge_of(model, knows), copy.deepcopy(model.run.model)
        layout = Layout.of(model.run.model)
        return SeenModels(
            models=models_of(model.watched.models, final, layout, knowledge),
            candidates=candidates.given,
            final=model_queries(final, knowledge),
        )
    if row.of_clients == "last message":
        return last_update(_run_view(model, candidates, knows, _steps_until_the_last_message(model)))
    if not model.watched.steps:
        raise NotApplicable(f"client {model.attacked} is attacked, and took no local step")
    return every_step(_run_view(model, candidates, knows, model.watched.steps))


def _messages(model: ClientsRun, client: int, candidates: Candidates | None, knows: Knows) -> ClientMessages:
    """Returns a client's messages as an attacker with this knowledge sees them."""
    run, training = model.run, model.watched
    recipe = recipe_of(model.request.training, model.splits)
    _, loss = _network(model)
    return ClientMessages(
        training.replies.get(client, []),
        training.models,
        model.private_side(client),
        final=copy.deepcopy(run.model),
        method=run.method,
        recipe=recipe,
        loss=loss,
        layout=Layout.of(run.model),
        knowledge=knowledge_of(model, knows),
        candidates=candidates,
        informed=Knows.OTHERS in knows,
    )


def _network(model: ClientsRun) -> tuple[nn.Module, Loss]:
    """Returns the network in training, as the client rule changes it, and its loss."""
    return model.run.method.rule.network(model.run.model, recipe_of(model.request.training, model.splits).loss)


def knowledge_of(model: ClientsRun, knows: Knows) -> PublicKnowledge:
    """Returns an attacker's own copy of the public knowledge."""
    public = model.public_knowledge
    population = public.population if Knows.POPULATION in knows else None
    return replace(public, population=None if population is None else copied(population))


def _run_view(model: ClientsRun, candidates: Candidates, knows: Knows, steps: list[Step]) -> RunView:
    """Returns local steps of the attacked client as the view of a central run.

    Raises:
        NotApplicable: the client rule trains another network than the model.
    """
    run, data = model.run, model.private_side(model.attacked)
    if _network(model)[0] is not run.model:
        raise NotApplicable(
            f"local steps of {run.method.name} take the gradient of another loss than the model's, which attacks on "
            "steps recompute"
        )
    transcript = Transcript("updates", Layout.of(run.model), steps=steps)
    own = Run(
        model=run.model,
        ledger=run.ledgers[data.number],
        transcript=transcript,
        state=None,
        seed=run.seed,
        sampler_key=data.sampler_key,
        engine=run.engine,
        noise=run.noise,
        augmentation=recipe_of(model.request.training, model.splits).augmentation,
    )
    replay = StepReplay(own, data.examples, data.sampling, model.public_knowledge.loss)
    return RunView(
        own,
        knowledge_of(model, knows),
        data.examples,
        data.sampling,
        candidates,
        Knows.OTHERS in knows,
        replay=replay,
    )


def _last_step(model: ClientsRun) -> int:
    """Returns the number of the local step that the attacked client's last message is of."""
    return _steps_until_the_last_message(model)[-1].step


def _steps_until_the_last_message(model: ClientsRun) -> list[Step]:
    """Returns the attacked client's local steps up to that of its last message, of rounds with a single step.

    Raises:
        NotApplicable: no message of the client was received, or it does not show the step's release.
    """
    client, steps = model.attacked, model.federation.local_steps
    received = {r.number for r in model.run.rounds if client in r.clients and client not in r.missing}
    # A client may be lost after its step: nobody sees that release, although it is charged.
    sent = [place for place, step in enumerate(model.watched.steps) if step.step // steps in received]
    if not sent:
        raise NotApplicable(f"client {client} is attacked, and none of its messages was received")
    until = model.watched.steps[: sent[-1] + 1]
    _refuse_lossy_message(model.run.method, until[-1])
    return until


def _refuse_lossy_message(method: Federated, step: Step) -> None:
    """Refuses a message that does not show all of its local step's release.

    Raises:
        NotApplicable: it does not.
    """
    messages, plan = method.messages, None if step.plan is None else step.plan.plan
    whole = type(messages) is Reachable or (type(messages) is LargestEntries and not messages.sparsity)
    if plan is not None:
        plain = len(plan.blocks) == 1 and plan.moves is None and type(plan.post) in (Identity, Rescale)
        whole = whole and plain
    if not whole:
        raise NotApplicable(
            f"a message of {method.name} shows a part of its local step's release; attacks on local steps read all of "
            "it, and message_likelihood what is sent"
        )


def refuse_other_units(model: ClientsRun) -> None:
    """Refuses attacks on a record of a client where the noise is not in the local steps."""
    _refuse_trusted_server(model)
    method = model.method[0]
    if method.noise_place != "local steps":
        raise NotApplicable(
            f"the noise of {method.name} is on the whole update of a client, whose local steps have none: no claim is "
            "for one of its records"
        )


def _refuse_trusted_server(model: ClientsRun) -> None:
    method = model.method[0]
    if method.noise_place == "server":
        raise NotApplicable(
            f"the server of {method.name} is trusted: it gets messages without noise, and adds the noise itself"
        )


def _refuse_too_long(model: ClientsRun) -> None:
    """Refuses attacks on messages and local steps that were not kept; trains, unless public sizes are the reason."""
    if model.refused_parts:
        raise NotApplicable(model.refused_parts)


def _claim_against(model: ClientsRun, row: ThreatModel) -> Claim | None:
    """Returns the claim for a record that bounds an attacker of this threat model; None if the unit is a client."""
    run, delta = model.run, model.request.budget.delta
    if run.unit != "record":
        return None
    if row.of_clients == "models":
        return run.claim(delta)
    if row.of_clients == "last message":
        return run.ledgers[model.attacked].knowing(_last_step(model)).claim(delta, unit=run.unit)
    return run.claims(delta)[model.attacked]


def _noisy(model: ClientsRun) -> bool:
    """True if the attacked client's local steps have noise; by the method, whatever an attack says of its scores."""
    return model.method[0].client_defense(model.attacked).calibrated_multiplier > 0


def _flags(model: ClientsRun, row: ThreatModel, knows: Knows) -> list[str]:
    """Returns flags on how to read the scores, derived from the run and not from the attack's unverified statements."""
    flags = ["participation_known"] if row.participation_known else []
    flags += data_flags(model)
    if row.of_clients == "models":
        return flags
    run, informed, noisy = model.run, Knows.OTHERS in knows, _noisy(model)
    ledger: Ledger = run.ledgers[model.attacked]
    if informed and not noisy:
        flags.append("deterministic")
    dependent = participation(ledger.sampling) == "dependent"
    dependent |= any(entry.row is not None or entry.trial for entry in ledger.entries)
    several = row.of_clients == "messages" and run.federation.local_steps > 1
    if informed and noisy and (several or (dependent and not row.participation_known)):
        flags.append("not_most_powerful")
    # No release beside the steps is among a client's messages or local steps as attacks get them.
    if any(entry.one_off for entry in ledger.entries):
        flags.append("one_off_not_attacked")
    return flags


def _words(model: ClientsRun, attack: Attack[Any]) -> str:
    return f"{attack.name} on {model.request.defense.name}, seed {model.request.seed}"
