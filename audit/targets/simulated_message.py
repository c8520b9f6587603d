"""Simulation of the first message that a client of a federated run sends, by the code of real runs.

The client trains at the initial global model with the defense, client rule, noise and codec of the method; the other
clients of the round change nothing of its message. The attacker is the server, or an eavesdropper with the server's
public facts: it sees the message as sent, also where noise is added later, at the server.

Each local step has all of the client's examples, or a batch of them in an order that the server knows, the same in
every pass.
"""

from __future__ import annotations

import copy
import secrets
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from leakbench.attacks.core import Examples, NotApplicable, Observation, ReleasedPart, Structure
from leakbench.defenses.core import (
    Claim,
    Execution,
    Federated,
    Federation,
    Ledger,
    NoisyPlan,
    Recipe,
    RoundSchedule,
    Sampling,
    Step,
    StepPlan,
    full,
    partition,
)
from leakbench.defenses.core.federated.client import Elsewhere, own_sampler_key
from leakbench.defenses.core.federated.federated_settings import FederatedSettings
from leakbench.defenses.core.federated.rounds import OngoingFederation, RoundOutcome
from leakbench.defenses.core.plan.layout import Layout
from leakbench.defenses.core.plan.public_data import refuse_shared

from ..scoring.truth import GroundTruth
from .candidates import copied
from .client_message import ClientMessage, SentMessage
from .local_steps import MAX_UNROLL, unknown_to_server
from .observe import PublicKnowledge, observe
from .observed_step import Observed, refuse_too_many
from .simulated_update import Shared
from .structure import structure

AFTER_THE_MESSAGE = "the server adds the noise of this method after it has received the message"
"""Reason of a claim for which the message itself has no noise."""


@dataclass(frozen=True)
class SharedMessage(Shared):
    """A simulated message, with the auditor's knowledge about it.

    Attributes:
        kind: form of the message, such as "dense".
        bytes: its length.
        unit: privacy unit of its claim, "record" or "client".
        after_the_message: whether the method's noise is added at the server, to what it has received.
        releases: number of messages that the ledger is charged for.
    """

    kind: str = ""
    bytes: int = 0
    unit: str = "record"
    after_the_message: bool = False
    releases: int = 1

    def claim(self, delta: float) -> Claim:
        """Returns the privacy guarantee of the message at `delta`, with its assumptions."""
        claim = replace(super().claim(delta), unit=self.unit)
        return replace(claim, reason=AFTER_THE_MESSAGE) if self.after_the_message else claim


def attacked_client(method: Federated) -> int:
    """Returns the number of the client whose message is attacked: the first with the least noise."""
    return min(range(len(method.budgets)), key=lambda client: method.budgets[client]) if method.budgets else 0


def without_noise(method: Federated) -> Federated:
    """Returns a method whose messages have no noise, those of clients with budgets of their own included."""
    return replace(method.with_noise(0.0) if not method.budgets else method, budgets=(0.0,) * len(method.budgets))


def sampling_of_messages(batch: int, examples: int) -> Sampling:
    """Returns the sampler of a client whose examples are all in every step, or in one step of every pass.

    Args:
        batch: examples per local step.
        examples: the client's examples.

    Raises:
        ValueError: the batch does not divide the examples.
    """
    if examples % batch:
        raise ValueError(f"batch of local steps must divide the client's {examples} examples, got {batch}")
    return full() if batch == examples else partition(batch / examples)


def simulate_message(
    model: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    method: Federated,
    *,
    local_steps: int = 1,
    batch: int | None = None,
    rounds: int = 1,
    clients: int = 1,
    lr: float = 0.1,
    recipe: Recipe | None = None,
    public_knowledge: PublicKnowledge,
    population: Examples | None = None,
    prior: Examples | None = None,
    seed: int = 0,
    key: int | None = None,
    exact: bool = False,
    execution: Execution | None = None,
    max_unroll: int = MAX_UNROLL,
) -> SharedMessage:
    """Simulates the message of one client in the first round, with a privacy ledger for its examples.

    Args:
        model: the initial global model; not modified.
        inputs: all examples of the client [b, *shape].
        labels: their labels [b], int64.
        method: with its noise multiplier set; `without_noise` shows the protection by the release alone.
        local_steps: local steps of a round, tau.
        batch: examples per local step, in their order; None for all.
        rounds: planned length, used by schedules.
        clients: number of clients.
        lr: learning rate of the local steps.
        recipe: momentum, schedule of the learning rate and loss of the local steps.
        public_knowledge: shapes, input range, loss, and a copy of the public examples if the attacker gets one.
        population: public examples, which the method may read.
        prior: candidates for the first record, for an attacker who has the other records and picks one of them.
        seed: key of the public randomness.
        key: secret key of noise and sampler; drawn from the operating system if None.
        exact: whether noise is exact, from the operating system.
        execution: engine, memory and device.
        max_unroll: largest number of local steps that an attack may differentiate through.

    Returns:
        The server's view, the ground truth, and the ledger.

    Raises:
        ValueError: as `federate`; a model with dropout; a recipe or plans that no server can simulate.
        NotApplicable: a prior for a message from which the other records cannot be subtracted.
    """
    recipe = recipe or Recipe(loss=public_knowledge.loss)
    if reason := why_no_message(recipe):
        raise ValueError(reason)
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            raise ValueError(f"model must have no dropout for attacks on a message, got '{name}'; set its p to 0")
    batch = batch or len(inputs)
    sampling = sampling_of_messages(batch, len(inputs))
    client = attacked_client(method)
    # The key of a given run decides its noise; without one, a key is needed here for the order of the examples alone.
    order_key = secrets.randbits(256) if key is None else key
    shard = _dealt(inputs, labels, sampling, local_steps, own_sampler_key(order_key, client))
    shards: list[Any] = [Elsewhere(len(inputs))] * clients
    shards[client] = shard
    if population is not None:
        refuse_shared(inputs, population.inputs)
    everybody = tuple(range(clients))
    settings = FederatedSettings(
        method=method,
        federation=Federation(rounds=rounds, local_steps=local_steps, participation=1.0),
        sampling=sampling,
        lr=lr,
        seed=seed,
        key=order_key,
        exact=exact,
        # Everybody in every round: noise that is correlated over rounds is then whole.
        schedule=RoundSchedule((everybody,) * rounds),
        recipe=recipe,
        execution=execution or Execution(),
        keep_messages=False,
        progress=None,
    )
    pool = None if population is None else (population.inputs, population.labels)
    run = _ObservedFederation(copy.deepcopy(model), shards, pool, settings)
    return run.shared(client, batch, (inputs, labels), public_knowledge, population, prior, max_unroll)


def why_no_message(recipe: Recipe) -> str:
    """Returns the reason why messages of local steps under a recipe cannot be simulated; empty if they can."""
    if recipe.optimizer != "sgd":
        name = recipe.optimizer if isinstance(recipe.optimizer, str) else "a function"
        return f"messages are simulated of local steps by SGD, with or without momentum, got {name}"
    if recipe.augmentation is not None:
        return "messages are simulated of local steps without augmentation, got views of each example"
    return ""


class _ObservedFederation(OngoingFederation):
    """A federated run of which one client takes the first round, and its message is kept with its plans."""

    update_plans: tuple[StepPlan, ...] = ()

    def shared(
        self,
        number: int,
        batch: int,
        own: tuple[Tensor, Tensor],
        public_knowledge: PublicKnowledge,
        population: Examples | None,
        prior: Examples | None,
        max_unroll: int,
    ) -> SharedMessage:
        """Takes a client's first round and returns its message as a target."""
        client, device = self.state.clients[number], self.state.parameters.device
        inputs, labels = (part.to(device) for part in own)
        outcome = self.opened()
        self._refuse_unknown_plans(number, outcome)
        self.take_part(client, outcome)
        sent = self._sent(number, batch, outcome)
        known = public_knowledge
        if known.population is not None:
            known = replace(known, population=copied(known.population))
        target = ClientMessage(sent, max_unroll=max_unroll)
        observation = _observed(target, sent, known, inputs, labels, prior)
        result = self.result()
        after = self.settings.method.noise_place == "server"
        # Local steps are charged to an account of their own where their releases are not the guarantee's.
        ledger: Ledger = client.steps.ledger if after else client.account.ledger
        public = None if population is None else population.inputs
        return SharedMessage(
            observation,
            GroundTruth(
                inputs=inputs,
                labels=labels,
                low=public_knowledge.low,
                high=public_knowledge.high,
                floor=None if public is None else public.mean(dim=0),
                public=public,
                public_labels=None if population is None else population.labels,
                prior=None if prior is None else prior.inputs.clone(),
            ),
            ledger,
            self.setup.engine.name,
            noise="none" if after else result.noise,
            public_used=result.public_used,
            remarks=result.remarks,
            unverified=result.unverified,
            kind=sent.message.kind,
            bytes=sent.message.bytes,
            unit=self.settings.method.unit,
            after_the_message=after,
        )

    def _refuse_unknown_plans(self, number: int, outcome: RoundOutcome) -> None:
        """Refuses local steps whose plans a server cannot know from their sum, before a step is taken."""
        client, round = self.state.clients[number], outcome.round
        self.trainer.enter(client, round)
        context = client.stepper.context.at(0, parameters=round.parameters.clone())
        if round.local_steps == 1:
            return
        if problem := unknown_to_server(client.stepper.defense, client.stepper.state, context, round.local_steps):
            raise ValueError(problem)

    def _released(self, *arguments: Any, **named: Any) -> Any:
        delta, self.update_plans = super()._released(*arguments, **named)
        return delta, self.update_plans

    def _sent(self, number: int, batch: int, outcome: RoundOutcome) -> SentMessage:
        """Returns the message with the public facts of its round."""
        settings, setup, client = self.settings, self.setup, self.state.clients[number]
        update = settings.method.update
        plans = [NoisyPlan(plan, update.calibrated_multiplier) for plan in self.update_plans] if update else []
        for plan in outcome.plans[number]:
            if plan.plan.trial is not None:
                raise ValueError("messages are simulated of local steps that stand, and a plan tries its step first")
        return SentMessage(
            message=outcome.messages[number],
            method=settings.method,
            round=outcome.round,
            plans=outcome.plans[number],
            update_plan=plans[0] if plans else None,
            network=setup.network,
            model=setup.model,
            loss=setup.engine.loss,
            layout=setup.engine.layout,
            momentum=settings.recipe.momentum,
            expected_batch=client.expected_batch,
            batch=batch,
            size=client.size,
        )


def _observed(
    target: ClientMessage,
    sent: SentMessage,
    known: PublicKnowledge,
    inputs: Tensor,
    labels: Tensor,
    prior: Examples | None,
) -> Observation:
    """Returns the target of an attack on a message; of a single step whose sums were sent, that of its step."""
    granted: dict[str, Any] = {"labels": labels, "batch_size": len(inputs)}
    layout = Layout.of(target.model)
    if (exact := target.exact_step) is not None and sent.network is sent.model:
        plan, sums = exact
        step = Step(0, target.start, plan.noise_multiplier, target.expected_batch, sent.batch / sent.size, plan, sums)
        if prior is not None:
            observed = Observed(step, target.model, layout, known.loss)
            granted |= {"prior": prior, "remainder": observed.without(inputs[1:], labels[1:])}
        return observe(step, target.model, layout, known, **granted)
    if prior is not None:
        raise NotApplicable("a prior is for a message of one step's sums: from others no record can be subtracted")
    words = f"a message of {target.steps} local steps" if target.steps > 1 else "the message of a local step"

    def limited(answer: Any) -> Any:
        def answer_about(inputs: Tensor, labels: Tensor, *share: Tensor) -> Tensor:
            refuse_too_many(len(inputs), layout.dim)
            return answer(inputs, labels, *share)

        return answer_about

    def contributed(inputs: Tensor, labels: Tensor) -> Tensor:
        if target.steps > 1:
            raise NotApplicable(f"{words} is no sum over examples: what one adds depends on the steps before")
        return target.contributions(inputs, labels)

    def equations() -> Structure:
        first = structure(target.plan, target.model, layout, target.start, known.loss, known.input_shape)
        if target.is_gradient:
            return first
        part = ReleasedPart(start=0, stop=target.released.numel(), kind="other", of_gradient=False, words=words)
        return replace(first, parts=(part,))

    several = target.steps > 1
    return Observation(
        released=target.released,
        simulate=limited(target.simulate),
        surrogate=limited(target.surrogate) if several else None,
        contributions_between=limited(target.contributions) if several else None,
        contributions=limited(contributed),
        residual=lambda predicted: target.residual(predicted),
        logits=lambda inputs: target.logits(inputs),
        input_shape=known.input_shape,
        input_low=known.low,
        input_high=known.high,
        classes=known.classes,
        step=0,
        expected_batch=target.expected_batch,
        labels=labels.clone(),
        batch_size=len(inputs),
        population=known.population,
        noise_std=target.noise_std,
        structure=equations,
    )


def _dealt(inputs: Tensor, labels: Tensor, sampling: Sampling, steps: int, key: int) -> tuple[Tensor, Tensor]:
    """Returns the examples in an order in which the sampler takes them as they were given, batch after batch."""
    if sampling.kind == "full":
        return inputs, labels
    positions = [sampling.indices(step, len(inputs), key) for step in range(sampling.steps_per_epoch)]
    order = torch.cat(positions).argsort().to(inputs.device)
    return inputs[order], labels[order]
