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

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
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
from ..training.step import Account, Stepper
from .client import Client, Elsewhere
from .federated_settings import FederatedSettings
from .federated_setup import FederatedSetup
from .local_training import LocalResult
from .messages.message import Message, dense_message, with_extras
from .method import Federated
from .private_average import PrivateAverage, stacked
from .round import Reply, Round
from .round_outcome import RoundOutcome
from .run import FederatedRun
from .schedule import Federation, RoundSchedule, refuse_cut_stream
from .secure_sum import NoiseShares, added, hides_members, scaled


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
        key: secret key from which every client's keys of noise and sampler are hashed, for this run alone: other runs
            under it draw the same noise, which cancels in the difference of their messages. Drawn from the operating
            system if None.
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
        self._rule, self._checked = settings.method.rule, False

    @property
    def schedule(self) -> RoundSchedule:
        """Participants and losses of every round."""
        return self.setup.schedule

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
            summed=not s.federation.shows_messages and state.private is None,
        )
        self.trainer.round = known
        with global_generators(global_draws(self.setup.seed, number * tau), context.device):
            codec = s.method.messages.prepare(context)
            # An update's own release is what is sent: which numbers its local steps moved is no release.
            foreseen = None if s.method.update is not None else state.foreseen.of_round(context, tau)
            known = replace(known, foreseen=foreseen, codec=codec)
        whole = self.schedule.whole(tuple(state.clients))
        for plan in known.foreseen or ():
            refuse_cut_stream(plan.correlated, known.local_steps, whole=whole)
        s.method.messages.check(known)
        return RoundOutcome(known, self.senders(number), shows_messages=s.federation.shows_messages)

    def senders(self, number: int) -> tuple[int, ...]:
        """Returns the clients that send in a round: all of them where nobody must see who is sampled."""
        if self._shares is not None and hides_members(self.settings.federation):
            return tuple(sorted(self.state.clients))
        return self.schedule.rounds[number]

    @property
    def _shares(self) -> NoiseShares | None:
        """Division of the noise among the clients; None for noise of the server, or in clients' own releases."""
        return None if self.state.private is None else self.state.private.shares

    def close(self, outcome: RoundOutcome) -> None:
        """Moves the global model by the messages of a round."""
        self._aggregate(outcome)
        self.end(outcome)

    def end(self, outcome: RoundOutcome) -> None:
        """Records a round."""
        self.state.records.append(outcome.record(keep=self.settings.keep_messages))
        self.state.round += 1

    def take_part(self, client: Client, outcome: RoundOutcome) -> None:
        """Trains a client and receives its message; a client that is lost keeps its states."""
        round, number = outcome.round, client.number
        outcome.sent_down(number)
        sampled = number in self.schedule.rounds[round.number]
        steps = self.schedule.steps_of(number, round.number, round.local_steps)
        lost = (round.number, number) in self.schedule.lost
        hidden = self._shares is not None and hides_members(self.settings.federation)
        if lost and not steps:
            outcome.missing[number] = "is lost" if hidden else "is lost before its first local step"
            return
        if not sampled:
            if lost:
                outcome.missing[number] = "is lost"
            else:
                outcome.messages[number] = self._share(client, round, None)
            return
        self.trainer.enter(client, round)
        before = client.snapshot()
        result = self.trainer.run(client, round, steps)
        client.rest()
        if not hidden:
            outcome.plans[number] = result.plans
        if not self._checked:
            self.setup.untrained.check()
            self._checked = True
        if lost:
            client.restore(before)
            outcome.missing[number] = "is lost" if hidden else f"is lost after {steps} local steps"
            return
        message = self._message(client, round, result)
        outcome.messages[number], outcome.before[number] = message, before
        if not message.finite:
            client.restore(before)
            outcome.missing[number] = "sends non-finite numbers"
        elif self._shares is not None and not bool(result.delta.isfinite().all()):
            client.restore(before)  # it has sent a share of noise on zero, which nobody can tell

    def _message(self, client: Client, round: Round, result: LocalResult) -> Message:
        """Returns a client's message, and takes its rule to the end of the round."""
        method, delta, plans = self.settings.method, result.delta, result.step_plans
        # Without noise of its own, an update of a local step must not decide what is sent.
        update = client.stepper.context.update if method.noise_place == "local steps" else None
        if client.update is not None:
            delta, plans = self._released(client, client.update, round, delta)
        client.state, extras = self._rule.finish(client.state, round, delta)
        if extras and method.noise_place == "server":
            raise ValueError("a client rule must send nothing beside its update to a private average, got more")
        known = replace(round, plans=plans, client=client.number, update=update)
        message = with_extras(method.messages.encode(delta, known), extras)
        if self._shares is not None:
            return self._share(client, round, method.messages.decode(message, round))
        return message

    def _share(self, client: Client, round: Round, delta: Tensor | None) -> Message:
        """Returns a client's bounded update with its share of the noise; of zero for a client that is not sampled."""
        private, shares = self.state.private, self._shares
        if private is None or shares is None:
            raise ValueError("a share must be of the noise of a private average, got a run without one")
        plan = private.planned(round.number, round.parameters)
        return shares.message(plan, delta, round.parameters, client.noise)

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

    def _deltas(self, outcome: RoundOutcome) -> dict[int, Float[Tensor, " dim"]]:
        """Returns the decoded displacement of every client that replied, by number."""
        decode = self.settings.method.messages.decode
        return {client: decode(message, outcome.round) for client, message in outcome.replied.items()}

    def _weights(self, clients: Collection[int]) -> dict[int, float]:
        """Returns the weights of clients in an average, before they are divided by their sum."""
        by_size = self.settings.federation.weights == "size"
        return {client: float(self.state.clients[client].size) if by_size else 1.0 for client in clients}

    def _aggregate(self, outcome: RoundOutcome) -> None:
        """Moves the global model by the replies of a round."""
        if outcome.shows_messages:
            self._average(outcome)
            return
        self.refuse_too_few(outcome)
        replied = outcome.replied
        if self._shares is None:
            weights = self._weights(replied)
            replied = {client: scaled(message, weights[client]) for client, message in replied.items()}
            if len({message.kind for message in replied.values()}) > 1:  # one that leaves its positions is sent whole
                decode = self.settings.method.messages.decode
                replied = {
                    client: replace(dense_message(decode(message, outcome.round)), extras=message.extras)
                    for client, message in replied.items()
                }
                outcome.messages |= replied
        if not outcome.aborted:
            outcome.total = added(list(replied.values()))
        self.open(outcome)

    def refuse_too_few(self, outcome: RoundOutcome) -> None:
        """Aborts a round of fewer messages than a sum must have; its clients' states are those before the round."""
        least, count = self.settings.federation.least_survivors, len(outcome.replied)
        if count >= least:
            return
        outcome.aborted = f"is aborted, with {count} messages of at least {least}"
        for client, before in outcome.before.items():
            self.state.clients[client].restore(before)

    def open(self, outcome: RoundOutcome) -> None:
        """Moves the global model by the sum of a round's messages, which is all that the server sees."""
        s, state, round, total = self.settings, self.state, outcome.round, outcome.total
        if state.private is not None:
            sampling = s.federation.sampling_of_clients(len(state.clients))
            accounts = self._charged(outcome)
            moved = state.private.open(round.number, state.parameters, total, accounts, sampling)
        elif total is not None and not isinstance(s.method.server, PrivateAverage):
            mean = scaled(total, 1.0 / sum(self._weights(outcome.replied).values()))
            reply = Reply(-1, s.method.messages.decode(mean, round), 1.0, total.extras)
            state.server, moved = s.method.server.aggregate(state.server, round, [reply])
        else:
            return
        if moved is not None:
            state.parameters = state.parameters + s.federation.server_lr * moved

    def _charged(self, outcome: RoundOutcome) -> list[Account]:
        """Returns the accounts that a release of the server is charged to."""
        clients = self.state.clients
        if self.settings.federation.participants != "fixed":  # everybody, also in a round without clients
            return [next(iter(clients.values())).account]
        return list({id(a): a for a in (clients[c].account for c in outcome.clients)}.values())

    def _average(self, outcome: RoundOutcome) -> None:
        """Moves the global model by the messages of a round, of which the server sees each."""
        s, state, round = self.settings, self.state, outcome.round
        deltas = self._deltas(outcome)
        if s.observe is not None:
            s.observe(deltas, self._weights(deltas))
        if state.private is not None:
            rows = stacked([deltas.get(client) for client in sorted(outcome.clients)], state.parameters)
            sampling = s.federation.sampling_of_clients(len(state.clients))
            accounts = self._charged(outcome)
            moved = state.private.average(round.number, state.parameters, rows, accounts, sampling)
        elif deltas and not isinstance(s.method.server, PrivateAverage):
            weights = self._weights(deltas)
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

    def global_model(self) -> nn.Module:
        """Returns a copy of the model at the global parameters, in evaluation mode."""
        self.trainer.place(self.state.parameters, None)
        return copy.deepcopy(self.setup.model).eval()

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
