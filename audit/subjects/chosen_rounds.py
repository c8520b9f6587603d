"""Membership of a client's records, asked by an active server: rounds at models that the attack chooses.

The attacked client answers as in any round of its training, with its own sampler, bound, noise, codec and ledger; the
others send nothing. The claim is that of the rounds that the attack has opened, and no training is needed.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import asdict, replace

import torch
from torch import Tensor

from leakbench.attacks.core import (
    AccessError,
    ActiveServer,
    Examples,
    Knows,
    MembershipScores,
    NotApplicable,
    SeenMessage,
    Target,
)
from leakbench.defenses.core import FederatedRun, Layout, RoundSchedule, keyed

from .. import progress_events
from ..catalog import methods as catalog
from ..plan.build import recipe_of
from ..plan.cells import Cell
from ..plan.federation import at_chosen_models, clients_of, own_multiplier
from ..scoring.truth import GroundTruth
from ..targets.candidates import Candidates, content_order, refuse_comparison, repeated_alone
from ..targets.chosen_models import ChosenModels, SentModel
from ..targets.client_messages import ClientData, ClientMessages
from ..targets.observe import participation
from .client_attacks import candidates_of_client, knowledge_of, refuse_other_units
from .federated_run import ClientsRun
from .membership import data_flags, scored_membership
from .outcome import Finding, Outcome, finite_claim, pick


class AskedClient:
    """The attacked client, from whose rounds an active server's target is built."""

    def __init__(
        self, model: ClientsRun, candidates: Candidates, knows: Knows, key: int | None, original: AskedClient | None
    ) -> None:
        """Starts the client; nothing is released yet.

        Args:
            model: the clients and their method.
            candidates: of the membership test.
            knows: side knowledge of the attack.
            key: secret key of sampler and noise; None for keys of the operating system.
            original: client under the same key, whose releases are repeated; None for releases of its own.

        Raises:
            NotApplicable: the client rule trains another network than the model.
        """
        self._model, self._candidates, self._knows, self._original = model, candidates, knows, original
        self._sent: list[Tensor] = []
        self._client, self._calls = model.attacked, clients_of(model.request).chosen_models or 1
        federation = at_chosen_models(model.federation, self._calls)
        everybody = tuple(number for number, size in enumerate(model.sizes) if size)
        settings = replace(model.settings(federation, key), schedule=RoundSchedule((everybody,) * self._calls))
        self._training = model.started(settings, {"messages"}, self._client)
        self._answered = 0
        network, self._loss = settings.method.rule.network(self._training.setup.model, settings.recipe.loss)
        if network is not self._training.setup.model:
            raise NotApplicable(
                f"a client of {settings.method.name} trains another network than the model, and chosen models are its"
            )
        self._knowledge = knowledge_of(model, knows)
        self._models = ChosenModels(network, self._knowledge, self._calls)

    def target(self) -> ActiveServer:
        """Returns the target of the attack."""
        return self._models.target(
            self.release,
            noise_multiplier=own_multiplier(self._model.method[0]) or 0.0,
            population=self._knowledge.population,
            informed=True,
            candidates=self._candidates.given,
        )

    def release(self, parameters: SentModel, block: Mapping[str, Tensor] | None = None) -> Target:
        """Returns the client's message at a model of the server's choice."""
        if block is not None:
            raise NotApplicable("membership is asked of the client's own network, and a block was put in front of it")
        chosen = self._models.flat(parameters)
        self._refuse_other_models(chosen)
        if self._answered < self._models.made:
            raise AccessError("a release of this client has failed, and its round must not be taken again")
        self._models.begin()
        self._sent.append(chosen)
        training, earlier = self._training, len(self._training.replies.get(self._client, []))
        training.state.parameters = chosen
        outcome = training.opened()
        training.take_part(training.state.clients[self._client], outcome)
        training.end(outcome)
        self._answered += 1
        if training.outgrew:
            raise NotApplicable(training.outgrew)
        replies = training.replies.get(self._client, [])
        if len(replies) == earlier:
            raise NotApplicable("the client's message at this model is not finite, and is not sent")
        return self._seen()

    def _refuse_other_models(self, chosen: Tensor) -> None:
        """Refuses models in a repetition that were not sent before: two releases under one noise show their difference.

        Raises:
            ValueError: it is a repetition, and the original call sent another model.
        """
        if self._original is None:
            return
        place, sent = len(self._sent), self._original._sent
        if place >= len(sent) or not torch.equal(sent[place], chosen):
            raise ValueError(
                "an attack on a single candidate must send the models that it sent for all candidates: a repetition "
                "has the same noise, which would cancel between releases at two models"
            )

    def _seen(self) -> SeenMessage:
        model, training = self._model, self._training
        own, positions = training.state.clients[self._client], model.shards[self._client]
        data = ClientData(
            self._client, pick(model.uninserted, positions), own.sampling, own.sampler_key, own.expected_batch
        )
        messages = ClientMessages(
            training.replies[self._client][-1:],
            training.models[-1:],
            data,
            final=copy.deepcopy(training.setup.model),
            method=training.settings.method,
            recipe=recipe_of(model.request.training, model.splits),
            loss=self._loss,
            layout=Layout.of(training.setup.model),
            knowledge=self._knowledge,
            candidates=self._candidates,
            informed=Knows.OTHERS in self._knows,
        )
        (message,) = messages.target().messages
        return message

    @property
    def releases(self) -> int:
        """Number of messages so far."""
        return self._models.made

    def result(self) -> FederatedRun:
        """Returns the client's rounds so far, with its ledger.

        Raises:
            ValueError: the attack opened no round, or a release failed, whose failure may tell something.
        """
        if not self._models.made:
            raise ValueError("an attack of an active server must send a model, and this one sent none")
        if self._answered < self._models.made:
            raise ValueError("every release of a client must end its round, and one of them failed")
        return self._training.result()


def membership_at_chosen_models(model: ClientsRun, cell: Cell) -> Outcome:
    """Runs a membership attack of an active server on the attacked client.

    Raises:
        NotApplicable: no claim for records covers what the attack sees, or no non-members have the client's classes.
        ValueError: its scores compare candidates, or it sent no model.
    """
    requested, delta = cell.request.requested_attack, model.request.budget.delta
    attack = catalog.attack(requested.name)
    knows = attack.requires.knows
    refuse_other_units(model)
    examples, inside = candidates_of_client(model)
    clients: list[AskedClient] = []
    # A key for each attack: another may send other models, and noise that they share would cancel between them.
    key = None if model.request.secure else cell.request.seed_for(f"noise of chosen models {cell.id}")

    def asked_about(chosen: Examples, purpose: str) -> MembershipScores:
        candidates = Candidates.draw(chosen, cell.request.seed_for(f"{purpose} {cell.id}"))
        clients.append(AskedClient(model, candidates, knows, key, clients[0] if clients else None))
        # The same generator, and the same noise, at every call: a repetition is the same release again.
        generator = keyed(cell.request.seed_for(f"attack {cell.id}"))
        return candidates.answers(attack(clients[-1].target(), generator, **copy.deepcopy(requested.settings)))

    noisy = model.method[0].client_defense(model.attacked).calibrated_multiplier > 0
    with progress_events.named_activity(f"{attack.name} on {model.request.defense.name}, seed {model.request.seed}"):
        result = asked_about(examples, "candidates")
        if Knows.OTHERS in knows and noisy and not model.request.secure:
            generator = keyed(cell.request.seed_for(f"alone {cell.id}"))
            scored = result.scores[torch.searchsorted(result.ids, examples.ids)]
            place = content_order(examples).argsort()
            for position in repeated_alone(scored, torch.isin(examples.ids, inside), generator):
                alone = asked_about(pick(examples, position[None]), f"alone {int(place[position])}")
                refuse_comparison(requested.name, result, alone)
    run = clients[0].result()
    claim = run.claims(delta)[model.attacked]
    truth = GroundTruth(members=inside, candidates=examples.ids)
    finding: Finding = scored_membership(model, knows, result, truth, claim, _flags(model, knows, noisy))
    flags = [*finding.flags, *(["noise_matched"] if model.method[1] else [])]
    return Outcome(
        metrics=finding.metrics,
        task={"releases": clients[0].releases},
        claim=finite_claim(asdict(claim)),
        noise_multiplier=own_multiplier(model.method[0]),
        noise=run.noise,
        engine=run.engine,
        flags=[*flags, *run.remarks],
        arrays=finding.arrays,
    )


def _flags(model: ClientsRun, knows: Knows, noisy: bool) -> list[str]:
    """Returns flags on how to read the scores."""
    flags = data_flags(model)
    if Knows.OTHERS not in knows:
        return flags
    if not noisy:
        return [*flags, "deterministic"]
    exact = model.federation.local_steps == 1 and participation(model.sampling[0]) != "dependent"
    return flags if exact else [*flags, "not_most_powerful"]
