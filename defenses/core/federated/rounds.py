"""The loop of federated training: schedule, broadcast, local training, messages, average; a ledger for every client.

All clients train one after another on one network with one engine, which is checked once. The schedule is drawn before
the run, and nothing that is measured is fed back. A client that has no data, is lost or sends non-finite numbers is
named and costs the others nothing: weights are renormalised over the replies, and its own states are those before the
round, while the steps that it took stay charged.

Guarantee:
    As in `method.py` and `run.py`. Amplification by the schedule, which is public, and by iteration is not claimed:
    local iterates are unseen, so the charge of every local step is an upper bound. Rounds that a killed run may have
    taken without a record are taken again with the same noise, or charged once more (`federation_file.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from jaxtyping import Float
from torch import Tensor, nn

from ..gradients.augmentation import global_draws
from ..gradients.executor import Release, release_rows
from ..plan.defense import NoisyPlan, StepPlan
from ..privacy.sampling import Sampling
from ..randomness.keys import global_generators
from ..training.interrupts import HeldInterrupts
from ..training.labelled import LabelledData
from ..training.settings import Execution, Recipe
from ..training.step import Stepper
from .client import Client, Elsewhere
from .federated_settings import FederatedSettings
from .federated_setup import FederatedSetup
from .local_training import LocalResult
from .messages.message import Message, with_extras
from .method import Federated
from .private_average import PrivateAverage, stacked
from .round import Reply, Round
from .run import FederatedRun, RoundRecord
from .schedule import Federation, RoundSchedule


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
    checkpoint: Path | None = None,
    checkpoint_every: int | None = None,
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
        checkpoint: file to resume from if it exists, and to write to; as private as the data. With a key given, all
            components of the run must then be inspectable: functions of plain values, no open files.
        checkpoint_every: rounds between writes, 1 if None. A killed run is charged for as many rounds once more, unless
            its key was given.
        progress: called with (rounds done, rounds).

    Returns:
        The global model with a ledger for every client.

    Raises:
        ValueError: for an uncalibrated method, a model that is refused, sizes or settings that do not fit, public
            examples among the private examples, or a checkpoint of another run.
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
        checkpoint=checkpoint,
        checkpoint_every=checkpoint_every,
        progress=progress,
    )
    return OngoingFederation(model, shards, public, settings).run()


class OngoingFederation:
    """A federated run in progress.

    Attributes:
        setup: what does not change from round to round.
        state: everything that does.
    """

    def __init__(
        self,
        model: nn.Module,
        shards: Sequence[LabelledData | Elsewhere | None],
        public: LabelledData | None,
        settings: FederatedSettings,
    ) -> None:
        """Refuses invalid models, data and settings; nothing is released yet."""
        self.setup = FederatedSetup(model, shards, public, settings)
        self.settings, self.trainer, self.state = settings, self.setup.trainer, self.setup.state
        self._rule, self._first = settings.method.rule, self.state.round

    @property
    def schedule(self) -> RoundSchedule:
        """Participants and losses of every round."""
        return self.setup.schedule

    def _refuse_cut_streams(self, round: Round) -> None:
        """Refuses noise that is correlated over the steps of several rounds, if a client may miss one of them."""
        row = next((plan.correlated for plan in round.foreseen or () if plan.correlated is not None), None)
        whole = all({*clients} == {*self.state.clients} for clients in self.schedule.rounds)
        if row is None or round.local_steps % row.strategy.steps == 0 or (whole and not self.schedule.lost):
            return
        raise ValueError(
            f"noise that is correlated over steps must restart within a round of {round.local_steps} local steps, got "
            f"a stream of {row.strategy.steps}: a client that misses a round would break it"
        )

    def run(self) -> FederatedRun:
        """Takes the remaining rounds, from the start or from a checkpoint."""
        checkpoint, state = self.setup.file, self.state
        between_rounds = False
        with HeldInterrupts(wanted=checkpoint.file.path is not None) as interrupts:
            try:
                checkpoint.open(self.setup)
                between_rounds = True
                while state.round < self.settings.federation.rounds:
                    interrupts.raise_held()
                    between_rounds = False
                    self.round()
                    between_rounds = True
                    if state.round == checkpoint.file.due(state.round - 1):
                        checkpoint.save(self.setup)
                    self._report()
                interrupts.raise_held()
            except (KeyboardInterrupt, SystemExit):  # the latter by a handler of SIGTERM, say
                if between_rounds:  # otherwise the last checkpoint is the last consistent state
                    checkpoint.save(self.setup, nothing_since=True)
                raise
            except Exception:
                checkpoint.forget(self.setup)
                raise
        return self._finished()

    def _report(self) -> None:
        """Calls `progress`, whose error interrupts the run between two rounds."""
        if self.settings.progress is None:
            return
        try:
            self.settings.progress(self.state.round, self.settings.federation.rounds)
        except Exception:
            self.setup.file.save(self.setup, nothing_since=True)
            raise

    def round(self) -> None:
        """Takes a round."""
        outcome = self.opened()
        for client in outcome.clients:
            self.take_part(self.state.clients[client], outcome)
        self.close(outcome)

    def opened(self, broadcast: Mapping[str, Tensor] | None = None) -> RoundOutcome:
        """Returns the next round before its first message.

        Args:
            broadcast: tensors that a server has sent beside the global model; None for those of this run's own server.
        """
        s, state = self.settings, self.state
        number, tau = state.round, s.federation.local_steps
        self.trainer.place(state.parameters, number)
        self.trainer.step = number * tau
        context = self.setup.context.at(number * tau, parameters=state.parameters)
        if broadcast is None:
            rule = None if isinstance(s.method.server, PrivateAverage) else s.method.server
            broadcast = {} if rule is None else rule.broadcast(state.server)
        known = Round(
            number=number,
            context=context,
            network=self.setup.network,
            clients=len(state.clients),
            rates=self.trainer.rates(number * tau, tau),
            broadcast=broadcast,
            spanned=s.recipe.optimizer == "sgd" and self._rule.keeps_span,
        )
        self.trainer.round = known
        with global_generators(global_draws(self.setup.seed, number * tau), context.device):
            codec = s.method.messages.prepare(context)
            # An update's own release is what is sent: which numbers its local steps moved is no release.
            foreseen = None if s.method.update is not None else state.foreseen.of_round(context, tau)
            known = replace(known, foreseen=foreseen, codec=codec)
        self._refuse_cut_streams(known)
        s.method.messages.check(known)
        return RoundOutcome(known, self.schedule.rounds[number])

    def close(self, outcome: RoundOutcome) -> None:
        """Moves the global model by the messages of a round."""
        self._aggregate(outcome)
        self.state.records.append(outcome.record(keep=self.settings.keep_messages))
        self.state.round += 1

    def take_part(self, client: Client, outcome: RoundOutcome) -> None:
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
        client.rest()
        outcome.plans[number] = result.plans
        if round.number == self._first and number == outcome.clients[0]:
            self.setup.untrained.check()
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
        method, delta, plans = self.settings.method, result.delta, result.step_plans
        if client.update is not None:
            delta, plans = self._released(client, client.update, round, delta)
        client.state, extras = self._rule.finish(client.state, round, delta)
        if extras and method.noise_place == "server":
            raise ValueError("a client rule must send nothing beside its update to a private average, got more")
        message = method.messages.encode(delta, replace(round, plans=plans))
        return with_extras(message, extras)

    def _released(
        self, client: Client, stepper: Stepper, round: Round, delta: Tensor
    ) -> tuple[Float[Tensor, " dim"], tuple[StepPlan, ...]]:
        """Returns a client's displacement under the defense of updates, which is charged, and the executed plan."""
        plans: list[StepPlan] = []

        def execute(plan: NoisyPlan) -> Release:
            plans.append(plan.plan)
            if plan.plan.correlated is not None or plan.plan.trial is not None or plan.plan.start_at is not None:
                raise ValueError("a defense of a client's update must be one release of one row")
            rows = delta.unsqueeze(0)
            return release_rows(plan, lambda point: rows, rows, client.noise)

        stepper.take(round.number, round.parameters, execute, client.account)
        return stepper.update, tuple(plans)

    def _aggregate(self, outcome: RoundOutcome) -> None:
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

    def _finished(self) -> FederatedRun:
        self.trainer.place(self.state.parameters, None)
        self.setup.untrained.check()
        self.setup.engine.release_memory()
        self.setup.model.eval()
        return self.result()

    def result(self) -> FederatedRun:
        """Returns the run up to the current round."""
        s, state = self.settings, self.state
        remarks = dict(self.setup.remarks)
        for client in state.clients.values():
            remarks |= client.account.remarks
        if self.setup.engine.unverified:
            remarks["unverified_model"] = self.setup.engine.unverified
        noisy = any(entry.noise_multiplier is not None for ledger in self.setup.ledgers for entry in ledger.entries)
        drew = noisy or (s.method.noise_multiplier or max(s.method.budgets, default=0.0)) > 0
        return FederatedRun(
            model=self.setup.model,
            method=s.method,
            federation=s.federation,
            schedule=self.schedule,
            ledgers=tuple(self.setup.ledgers),
            rounds=tuple(state.records),
            empty=self.setup.empty,
            seed=self.setup.seed,
            key=self.setup.key,
            engine=self.setup.engine.name,
            noise=self.setup.kind if drew else "none",
            public_used=self.setup.public is not None and self.setup.public.used,
            key_given=s.key is not None,
            size_public=s.recipe.nominal_size is None,
            resumed=self.setup.file.file.resumed,
            repeated=self.setup.file.file.repeated,
            remarks=tuple(remarks),
            unverified=tuple(sentence for sentence in remarks.values() if sentence),
        )


class RoundOutcome:
    """Messages of a round as they arrive.

    Attributes:
        round: public facts of the round.
        clients: scheduled clients, in the order in which they train.
        missing: client -> reason why its message is not in the average.
        messages: client -> message.
        plans: client -> executed plans with their noise.
    """

    def __init__(self, round: Round, clients: tuple[int, ...]) -> None:
        """Starts without messages."""
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
            global_model=self.round.parameters if keep else None,
            messages=dict(self.messages) if keep else {},
            plans=dict(self.plans) if keep else {},
        )
