"""The loop of federated training: schedule, broadcast, local training, messages, average; a ledger for every client.

All clients train one after another on one network with one engine, which is checked once. The schedule is drawn before
the run, and nothing that is measured is fed back. A client that has no data, is lost or sends non-finite numbers is
named and costs the others nothing: weights are renormalised over the replies, and its own states are those before the
round, while the steps that it took stay charged.

Guarantee:
    As in `method.py` and `run.py`. Amplification by the schedule, which is public, and by iteration is not claimed:
    local iterates are unseen, so the charge of every local step is an upper bound.
"""

from __future__ import annotations

import copy
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..gradients.augmentation import draws, global_draws
from ..gradients.checks.batch_norm import into_training_mode
from ..gradients.checks.model_checks import Untrained
from ..gradients.checks.synthetic_examples import Domains
from ..gradients.executor import Engine, Release, release_rows
from ..gradients.power_iteration import buffers_of_power_iterations
from ..plan.defense import Context, NoisyPlan, State
from ..plan.public_data import GradientBatch, PublicGradients, refuse_shared
from ..privacy.ledger import Ledger
from ..privacy.sampling import Sampling, fixed
from ..randomness.keys import global_generators
from ..randomness.noise import NoiseSource
from ..training.assumptions import unverified
from ..training.labelled import LabelledData, as_tensors, fitting
from ..training.settings import Execution, Recipe
from ..training.step import Account, Stepper
from .client import Client, own_noise, own_sampler_key
from .local_training import LocalResult, LocalTrainer
from .messages import Message, with_extras
from .method import Federated
from .private_average import PrivateAverage, PrivateServer, context_of_server, stacked
from .public_pool import SharedPublic
from .round import Reply, Round
from .run import FederatedRun, RoundRecord
from .schedule import Federation, RoundSchedule, drawn
from .server_view import ForeseenPlans


def federate(
    model: nn.Module,
    shards: Sequence[LabelledData | None],
    method: Federated,
    *,
    federation: Federation,
    sampling: Sampling,
    lr: float = 0.1,
    public: LabelledData | None = None,
    seed: int | None = None,
    key: int | None = None,
    exact: bool = False,
    schedule: RoundSchedule | None = None,
    recipe: Recipe | None = None,
    execution: Execution | None = None,
    keep_messages: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> FederatedRun:
    """Trains a model in place on the data of several clients.

    Args:
        model: as for `train`.
        shards: private data of each client, as for `train`; None for a client without data.
        method: with its noise multiplier set.
        federation: rounds, local steps, participation and weights.
        sampling: sampler of a client's records in a local step.
        lr: learning rate of the local steps, eta.
        public: (inputs, labels) for methods that use public data; refused if an input is a client's.
        seed: key of the public randomness (schedule, masks, dropout); drawn if None.
        key: secret key from which every client's keys of noise and sampler are hashed; drawn from the operating system
            if None.
        exact: whether all noise is exact, from the operating system (`secure`).
        schedule: participants and losses of every round; drawn if None.
        recipe: optimizer, momentum, schedule, loss, augmentation and divisor of the local steps.
        execution: engine, memory and device.
        keep_messages: whether the run keeps global models, messages and plans of every round.
        progress: called with (rounds done, rounds).

    Returns:
        The global model with a ledger for every client.

    Raises:
        ValueError: for an uncalibrated method, a model that is refused, sizes or settings that do not fit, or public
            examples among the private examples.
    """
    settings = FederatedSettings(
        method=method,
        federation=federation,
        sampling=sampling,
        lr=lr,
        seed=seed,
        key=key,
        exact=exact,
        schedule=schedule,
        recipe=recipe or Recipe(),
        execution=execution or Execution(),
        keep_messages=keep_messages,
        progress=progress,
    )
    return OngoingFederation(model, shards, public, settings).run()


@dataclass(frozen=True, kw_only=True)
class FederatedSettings:
    """The arguments of `federate` with defaults filled in; keys that are not given stay None."""

    method: Federated
    federation: Federation
    sampling: Sampling
    lr: float
    seed: int | None
    key: int | None = field(repr=False)
    exact: bool
    schedule: RoundSchedule | None
    recipe: Recipe
    execution: Execution
    keep_messages: bool
    progress: Callable[[int, int], None] | None

    def __post_init__(self) -> None:
        recipe, federation, place = self.recipe, self.federation, self.method.noise_place
        if recipe.average is not None or recipe.statistics is not None:
            raise ValueError("recipe of a federated run must have no average and no statistics of features, got one")
        if federation.weights == "size" and place == "server":
            raise ValueError(
                "weights must be 'uniform' for a private average, got 'size': the sensitivity is that of equal weights"
            )
        if place != "local steps" and self.method.rule.releases(1):
            raise ValueError("a client rule with releases of its own must have noise in the local steps as well")
        if self.exact and self.execution.engine not in ("auto", "one_by_one"):
            raise ValueError(f"engine must be 'auto' or 'one_by_one' with exact noise, got '{self.execution.engine}'")
        self.method.rule.check(recipe)


@dataclass
class FederationState:
    """State of the loop between two rounds: all that a resumed run would have to restore.

    Attributes:
        round: number of the next round.
        parameters: global model [dim].
        server: state of the server's rule.
        clients: clients with data, by number: keys, noise, accounts and states.
        private: server with a private average; None for others.
        foreseen: the server's own planning.
        records: rounds so far.
    """

    round: int
    parameters: Float[Tensor, " dim"]
    server: State
    clients: dict[int, Client]
    private: PrivateServer | None
    foreseen: ForeseenPlans
    records: list[RoundRecord] = field(default_factory=list)


class OngoingFederation:
    """A federated run in progress."""

    def __init__(
        self,
        model: nn.Module,
        shards: Sequence[LabelledData | None],
        public: LabelledData | None,
        settings: FederatedSettings,
    ) -> None:
        """Refuses invalid models, data and settings; nothing is released yet."""
        s = self.settings = settings
        s.method.check(len(shards))
        self.model, self._rule = model, s.method.rule
        if buffers_of_power_iterations(model):
            raise ValueError("a federated model must have no spectral norm: its vectors would depend on client order")
        data = self._read(model, shards)
        populated = [number for number, shard in enumerate(data) if shard is not None]
        self.empty = tuple(number for number, shard in enumerate(data) if shard is None)
        if not populated:
            raise ValueError(f"at least one client must have data, got none of {len(shards)}")
        if not model.training:
            into_training_mode(model)
        self.seed = secrets.randbits(63) if s.seed is None else s.seed
        self.key = secrets.randbits(256) if s.key is None else s.key
        self.kind: NoiseSource = "secure" if s.exact else "os" if s.key is None else "seeded"
        unit_key = own_sampler_key(self.key, "server") if s.method.unit == "client" else self.seed
        self.schedule = s.schedule or drawn(s.federation, populated, seed=self.seed, key=unit_key)
        self.schedule.check(s.federation, populated)
        sizes = [0 if shard is None else s.recipe.nominal_size or len(shard[0]) for shard in data]
        samplings = s.federation.samplings(s.sampling, sizes)
        divisors = [s.recipe.divisor(one, size) if size else 0.0 for one, size in zip(samplings, sizes, strict=True)]
        self.network, loss = self._rule.network(model, s.recipe.loss)
        self.engine = Engine(
            self.network,
            loss=loss,
            microbatch=s.execution.microbatch,
            memory_budget=s.execution.memory_budget,
            precision=s.execution.precision,
            engine=s.execution.engine,
            augmentation=s.recipe.augmentation,
            expected_batch=max(divisors),
            domains=Domains(s.recipe.input_domain, s.recipe.target_domain),
            unchecked=s.execution.unchecked,
        )
        steps = {"steps": s.federation.steps, "seed": self.seed}
        self.trainer = LocalTrainer(self.network, self.engine, self._rule, recipe=s.recipe, lr=s.lr, **steps)
        self.untrained = Untrained(self.network)
        self._round: Round | None = None
        self.public = self._pool(public, data)
        self._base = self._context(next(shard for shard in data if shard is not None)[0])
        self.state = self._started(data, populated, sizes, samplings, divisors)

    def _read(self, model: nn.Module, shards: Sequence[LabelledData | None]) -> list[tuple[Tensor, Tensor] | None]:
        """Returns every client's tensors; None for a client without data."""
        device, loss = self.settings.execution.device, self.settings.recipe.loss
        data: list[tuple[Tensor, Tensor] | None] = []
        for number, shard in enumerate(shards):
            if shard is None or _is_empty(shard):
                data.append(None)
                continue
            argument = f"shard {number}"
            inputs, labels = as_tensors(shard, argument, device)
            model.to(inputs.device)
            data.append(fitting(inputs, labels, model, loss, argument))
        return data

    def _pool(self, public: LabelledData | None, data: Sequence[tuple[Tensor, Tensor] | None]) -> SharedPublic | None:
        """Returns the public pool, after it was compared with every client's inputs."""
        if public is None:
            return None
        device = next(shard for shard in data if shard is not None)[0].device
        pool = fitting(*as_tensors(public, "public", device), self.model, self.settings.recipe.loss, "public")
        refuse_shared(torch.cat([shard[0] for shard in data if shard is not None]), pool[0])
        gradients = PublicGradients(self._gradients, *pool, self._factored)
        return SharedPublic(gradients, lambda: self.trainer.round_at_global_model)

    def _public_targets(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Returns the rule's targets of public examples, for a client in its first round."""
        if self._round is None:
            return labels
        return self._rule.targets(self._rule.start(self.engine.layout), self._round, inputs, labels)

    def _gradients(self, inputs: Tensor, labels: Tensor) -> Tensor:
        seed = draws(self.seed, self.trainer.step)
        return self.engine.gradients(inputs, self._public_targets(inputs, labels), seed=seed)(None)

    def _factored(self, inputs: Tensor, labels: Tensor) -> GradientBatch:
        seed = draws(self.seed, self.trainer.step)
        return self.engine.batch(inputs, self._public_targets(inputs, labels), seed=seed)

    def _context(self, inputs: Tensor) -> Context:
        """Returns the public context of step 0."""
        s, layout = self.settings, self.engine.layout
        return Context(
            step=0,
            steps=s.federation.steps,
            steps_per_epoch=s.sampling.steps_per_epoch,
            layout=layout,
            parameters=layout.read(self.network),
            noise_multiplier=s.method.client.noise_multiplier or 0.0,
            architecture=partial(copy.deepcopy, self.network),
            input_shape=tuple(inputs.shape[1:]),
            seed=self.seed,
            public=self.public,
            device=inputs.device,
        )

    def _started(
        self,
        data: Sequence[tuple[Tensor, Tensor] | None],
        populated: Sequence[int],
        sizes: Sequence[int],
        samplings: Sequence[Sampling],
        divisors: Sequence[float],
    ) -> FederationState:
        """Returns the state before round 0."""
        s, theta = self.settings, self._parameters_of(self._base)
        place = s.method.noise_place
        of_clients = s.federation.sampling_of_clients(len(populated))
        own_rounds = s.federation.participants == "fixed"
        self.remarks = unverified(
            rule=s.method.rule,
            messages=s.method.messages,
            server=s.method.server,
            augmentation=s.recipe.augmentation,
            sampling=s.sampling,
            optimizer=s.recipe.optimizer_of(self.trainer.parameters, s.lr),
            defense=s.method.private_part,
        )
        common = Account(Ledger(of_clients), s.exact)
        clients: dict[int, Client] = {}
        self.ledgers = [Ledger(samplings[number]) for number in range(len(data))]
        for number in populated:
            shard = data[number]
            if shard is None:
                continue
            steps = Account(Ledger(samplings[number]), s.exact)
            account = steps
            if place == "update":
                account = Account(Ledger(fixed(1.0)), s.exact)
            elif place == "server":
                account = Account(Ledger(of_clients), s.exact) if own_rounds else common
            self.ledgers[number] = account.ledger
            context = replace(
                self._base, steps_per_epoch=samplings[number].steps_per_epoch, expected_batch=divisors[number]
            )
            clients[number] = Client(
                number=number,
                inputs=shard[0],
                labels=shard[1],
                size=sizes[number],
                sampling=samplings[number],
                expected_batch=divisors[number],
                sampler_key=own_sampler_key(self.key, number),
                noise=own_noise(self.key, number, self.kind),
                account=account,
                steps=steps,
                stepper=Stepper(s.method.client_defense(number), context, partial(self.trainer.place, number=None)),
                state=self._rule.start(self.engine.layout),
                update=self._update_stepper(),
            )
        private = None
        if isinstance(s.method.server, PrivateAverage):
            private = PrivateServer(
                s.method.server.defense,
                context_of_server(
                    self._base,
                    rounds=s.federation.rounds,
                    sampling=of_clients,
                    clients=s.federation.participation * len(populated),
                ),
                own_noise(self.key, "server", self.kind),
                own_rounds=own_rounds,
            )
        server = None if isinstance(s.method.server, PrivateAverage) else s.method.server.start(self.engine.layout)
        return FederationState(0, theta, server, clients, private, ForeseenPlans(s.method.client))

    def _update_stepper(self) -> Stepper | None:
        """Returns the stepper of the defense of a client's displacement."""
        defense = self.settings.method.update
        if defense is None:
            return None
        context = replace(self._base, steps=self.settings.federation.rounds, steps_per_epoch=1, expected_batch=1.0)
        stepper = Stepper(defense, context, lambda parameters: None)
        stepper.start()
        return stepper

    def _refuse_cut_streams(self, round: Round) -> None:
        """Refuses noise that is correlated over the steps of several rounds, if a client may miss one of them."""
        row = next((plan.correlated for plan in round.foreseen or () if plan.correlated is not None), None)
        whole = all({*clients} == {*self.state.clients} for clients in self.schedule.rounds)
        if row is None or round.local_steps % row.strategy.steps == 0 or (whole and not self.schedule.lost):
            return
        raise ValueError(
            f"noise that is correlated over steps must restart within a round of {round.local_steps} local steps, got a "
            f"stream of {row.strategy.steps}: a client that misses a round would break it"
        )

    def run(self) -> FederatedRun:
        """Takes the remaining rounds."""
        rounds = self.settings.federation.rounds
        while self.state.round < rounds:
            self.round()
            if self.settings.progress is not None:
                self.settings.progress(self.state.round, rounds)
        return self._finished()

    def round(self) -> None:
        """Takes a round."""
        s, state = self.settings, self.state
        number, tau = state.round, s.federation.local_steps
        self.trainer.place(state.parameters, number)
        self.trainer.step = number * tau
        context = self._base.at(number * tau, parameters=state.parameters)
        rule = None if isinstance(s.method.server, PrivateAverage) else s.method.server
        known = Round(
            number=number,
            context=context,
            network=self.network,
            clients=len(state.clients),
            rates=self.trainer.rates(number * tau, tau),
            broadcast={} if rule is None else rule.broadcast(state.server),
            spanned=s.recipe.optimizer == "sgd" and self._rule.keeps_span,
        )
        self._round = known
        with global_generators(global_draws(self.seed, number * tau), context.device):
            known = replace(known, foreseen=state.foreseen.of_round(context, tau))
        if not number:
            self._refuse_cut_streams(known)
        outcome = _Outcome(known, self.schedule.rounds[number])
        for client in outcome.clients:
            self._take_part(state.clients[client], outcome)
        self._aggregate(outcome)
        state.records.append(outcome.record(keep=s.keep_messages))
        state.round += 1

    def _take_part(self, client: Client, outcome: _Outcome) -> None:
        """Trains a client and receives its message; a client that is lost keeps its states."""
        round, number = outcome.round, client.number
        outcome.sent_down(number)
        steps = self.schedule.steps_of(number, round.number, round.local_steps)
        lost = (round.number, number) in self.schedule.lost
        if lost and not steps:
            outcome.missing[number] = "is lost before its first local step"
            return
        self.trainer.enter(client, round)
        before = client.snapshot()
        result = self.trainer.run(client, round, steps)
        outcome.plans[number] = result.plans
        if not round.number and number == outcome.clients[0]:
            self.untrained.check()
        if lost:
            client.restore(before)
            outcome.missing[number] = f"is lost after {steps} local steps"
            return
        message = self._message(client, round, result)
        outcome.messages[number] = message
        if not message.finite:
            client.restore(before)
            outcome.missing[number] = "sends non-finite numbers"

    def _message(self, client: Client, round: Round, result: LocalResult) -> Message:
        """Returns a client's message, and takes its rule to the end of the round."""
        method, delta = self.settings.method, result.delta
        if client.update is not None:
            delta = self._released(client, client.update, round, delta)
        client.state, extras = self._rule.finish(client.state, round, delta)
        if extras and method.noise_place == "server":
            raise ValueError("a client rule must send nothing beside its update to a private average, got more")
        message = method.messages.encode(delta, replace(round, plans=result.step_plans))
        return with_extras(message, extras)

    def _released(self, client: Client, stepper: Stepper, round: Round, delta: Tensor) -> Float[Tensor, " dim"]:
        """Returns a client's displacement under the defense of updates, and charges it."""

        def execute(plan: NoisyPlan) -> Release:
            if plan.plan.correlated is not None or plan.plan.trial is not None or plan.plan.start_at is not None:
                raise ValueError("a defense of a client's update must be one release of one row")
            rows = delta.unsqueeze(0)
            return release_rows(plan, lambda point: rows, rows, client.noise)

        stepper.take(round.number, round.parameters, execute, client.account)
        return stepper.update

    def _aggregate(self, outcome: _Outcome) -> None:
        """Moves the global model by the replies of a round."""
        s, state, round = self.settings, self.state, outcome.round
        deltas = {
            client: s.method.messages.decode(message, round)
            for client, message in sorted(outcome.messages.items())
            if client not in outcome.missing
        }
        if state.private is not None:
            accounts = list({id(a): a for a in (state.clients[c].account for c in outcome.clients)}.values())
            if s.federation.participants != "fixed":  # charged to everybody, also in a round without clients
                accounts = [next(iter(state.clients.values())).account]
            rows = stacked([deltas.get(client) for client in sorted(outcome.clients)], state.parameters)
            sampling = s.federation.sampling_of_clients(len(state.clients))
            moved = state.private.average(round.number, state.parameters, rows, accounts, sampling)
        elif deltas and not isinstance(s.method.server, PrivateAverage):
            weights = {c: float(state.clients[c].size) if s.federation.weights == "size" else 1.0 for c in deltas}
            total = sum(weights.values())
            replies = [
                Reply(client, delta, weights[client] / total, outcome.messages[client].extras)
                for client, delta in deltas.items()
            ]
            state.server, moved = s.method.server.aggregate(state.server, round, replies)
        else:
            return
        state.parameters = state.parameters + s.federation.server_lr * moved

    @staticmethod
    def _parameters_of(context: Context) -> Float[Tensor, " dim"]:
        if context.parameters is None:
            raise ValueError("context must have parameters, got None")
        return context.parameters

    def _finished(self) -> FederatedRun:
        s, state = self.settings, self.state
        self.trainer.place(state.parameters, None)
        self.untrained.check()
        self.engine.release_memory()
        remarks = dict(self.remarks)
        for client in state.clients.values():
            remarks |= client.account.remarks
        if self.engine.unverified:
            remarks["unverified_model"] = self.engine.unverified
        noisy = any(entry.noise_multiplier is not None for ledger in self.ledgers for entry in ledger.entries)
        drew = noisy or (s.method.noise_multiplier or max(s.method.budgets, default=0.0)) > 0
        return FederatedRun(
            model=self.model.eval(),
            method=s.method,
            federation=s.federation,
            schedule=self.schedule,
            ledgers=tuple(self.ledgers),
            rounds=tuple(state.records),
            empty=self.empty,
            seed=self.seed,
            key=self.key,
            engine=self.engine.name,
            noise=self.kind if drew else "none",
            public_used=self.public is not None and self.public.used,
            key_given=s.key is not None,
            size_public=s.recipe.nominal_size is None,
            remarks=tuple(remarks),
            unverified=tuple(sentence for sentence in remarks.values() if sentence),
        )


class _Outcome:
    """Messages of a round as they arrive."""

    def __init__(self, round: Round, clients: tuple[int, ...]) -> None:
        self.round, self.clients = round, clients
        self.missing: dict[int, str] = {}
        self.messages: dict[int, Message] = {}
        self.plans: dict[int, tuple[NoisyPlan, ...]] = {}
        self._down: dict[int, int] = {}

    def sent_down(self, client: int) -> None:
        """Counts global model and broadcast."""
        parts = (self.round.parameters, *self.round.broadcast.values())
        self._down[client] = sum(part.numel() * part.element_size() for part in parts)

    def record(self, *, keep: bool) -> RoundRecord:
        """Returns the record of the round."""
        return RoundRecord(
            number=self.round.number,
            clients=self.clients,
            missing=dict(self.missing),
            bytes_up={client: message.bytes for client, message in self.messages.items()},
            bytes_down=dict(self._down),
            kinds={client: message.kind for client, message in self.messages.items()},
            parameters=self.round.parameters if keep else None,
            messages=dict(self.messages) if keep else {},
            plans=dict(self.plans) if keep else {},
        )


def _is_empty(shard: LabelledData) -> bool:
    """Returns whether a shard has no examples."""
    if isinstance(shard, tuple | list):
        return len(shard) == 2 and hasattr(shard[0], "__len__") and len(shard[0]) == 0
    return hasattr(shard, "__len__") and len(shard) == 0  # pyright: ignore[reportArgumentType]  checked
