"""The two sides of a federated run in the loop of another framework: a client's round, and the server's average.

`ClientSide` has a client's data, keys, ledger and states, `ServerSide` the global model and the server's rule. Between
them go dictionaries of NumPy arrays, which any framework can send: `ServerSide.arrays` is what a client gets,
`local_round` returns its message, and `aggregate` moves the global model by the messages that came, `aggregate_sum` by
their sum, where a protocol of secure aggregation opens no more. With the same keys
the models and the claims are those of `federate`. Both sides compute what a round's plans can move from the global
model, public data and public seed alone, so a client may miss rounds.

Guarantee:
    As for `federate`: what leaves a client is its message, and its ledger is charged before it leaves. With a
    checkpoint, the message leaves after the file is written: a process that is killed before that has sent nothing, and
    the next one goes on with the ledger, sampler and states of the rounds that were sent, under fresh noise or, if
    noise is seeded, behind the draws of these rounds. Without a checkpoint a process forgets what an earlier one was
    charged, and seeded noise starts again: a client must then be one process from its first round to its last. The
    same holds for a server with noise: a global model leaves after its file is written. With noise in shares of the
    clients (`secure_sum.py`), a client charges its own ledger before it sends, and trusts no server.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..privacy.ledger import Claim, Ledger
from ..privacy.sampling import Sampling
from ..training.labelled import LabelledData
from ..training.settings import Execution, Recipe
from .client import Client, Elsewhere
from .federated_settings import FederatedSettings
from .messages.message import Message, from_arrays, to_arrays
from .method import Federated
from .private_average import PrivateAverage
from .rounds import OngoingFederation, RoundOutcome
from .schedule import Federation, RoundSchedule
from .secure_sum import added, hides_members, scaled
from .server_view import ForeseenPlans, UnknownToServer, blind

Arrays = Mapping[str, np.ndarray]
_MODEL, _BROADCAST = "parameters", "broadcast/"


class ClientSide:
    """A client of a federated run, with data, keys, ledger and states of its own.

    Attributes:
        number: number of the client.
    """

    def __init__(
        self,
        model: nn.Module,
        examples: LabelledData,
        method: Federated,
        *,
        number: int,
        sizes: Sequence[int],
        federation: Federation,
        sampling: Sampling,
        seed: int,
        lr: float = 0.1,
        public: LabelledData | None = None,
        key: int | None = None,
        exact: bool = False,
        recipe: Recipe | None = None,
        execution: Execution | None = None,
        checkpoint: Path | None = None,
    ) -> None:
        """Takes the settings of the run, and the client's data.

        Args:
            model: network of the run; its parameters are those of the server in every round.
            examples: the client's private data, as for `train`.
            method: with its noise multiplier set.
            number: number of the client.
            sizes: public number of examples of every client; 0 for a client without data.
            federation: shape of the run; its participants are the server's business.
            sampling: sampler of the client's records in a local step.
            seed: key of the public randomness, the same for all sides.
            lr: learning rate of the local steps.
            public: public examples, the same for all sides.
            key: secret key from which sampler and noise of this client are hashed, for this run alone; drawn from the
                operating system if None.
            exact: whether noise is exact, from the operating system.
            recipe: optimizer, momentum, schedule, loss, augmentation and divisor of the local steps.
            execution: engine, memory and device.
            checkpoint: file with the client's ledger and states, written before a message leaves; as private as the
                data. None for a process that takes part in all rounds of its client.

        Raises:
            ValueError: as `federate`; for a checkpoint under noise at the server; for noise in shares under a server's
                defense whose plans follow from releases, which a client does not have.
        """
        own = method.noise_place != "server"  # otherwise participants are part of the guarantee
        self._shared = not (own or federation.shows_messages)
        if not own and not self._shared and checkpoint is not None:
            raise ValueError("checkpoint must be None for a method with noise at the server, whose ledgers are there")
        if not 0 <= number < len(sizes):
            raise ValueError(f"number must be of one of {len(sizes)} clients, got {number}")
        self.number, shards = number, _elsewhere(sizes)
        shards[number] = examples
        settings = _settings(method, federation, sampling, recipe, execution, lr=lr, seed=seed, key=key, exact=exact)
        nobody = RoundSchedule(((),) * federation.rounds)  # yet: a round is entered when it is taken
        # Coins of its own decide whether a client is sampled, where nobody else must know.
        self._own_coins = self._shared and hides_members(federation)
        entered = own or (self._shared and not self._own_coins)
        settings = replace(settings, schedule=nobody if entered else None, checkpoint=checkpoint)
        self._federation = OngoingFederation(model, shards, public, settings)
        if self._own_coins:  # losses are what happens
            self._federation.setup.schedule = replace(self._federation.schedule, lost={})
        if self._shared:
            self._refuse_unknown_plans()

    @property
    def ledger(self) -> Ledger:
        """Ledger of the client."""
        return self._federation.setup.ledgers[self.number]

    def claim(self, delta: float) -> Claim:
        """Returns the guarantee of all messages that the client has sent.

        Args:
            delta: in (0, 1).

        Raises:
            ValueError: for noise at the server, which has the ledgers.
        """
        if self._federation.settings.method.noise_place == "server" and not self._shared:
            raise ValueError("claim must be of a client with noise of its own: `ServerSide.claims` has the others")
        return self._federation.result().claims(delta)[self.number]

    def take(self, number: int, arrays: Arrays) -> Message:
        """Returns the client's message of a round; see `local_round`."""
        federation = self._federation
        setup, state = federation.setup, federation.state
        rounds = federation.settings.federation.rounds
        if not state.round <= number < rounds:
            raise ValueError(
                f"number must be of a round after those that the client has taken, from {state.round} to {rounds - 1}, "
                f"got {number}: a round is taken once"
            )
        sent = {name.removeprefix(_BROADCAST): part for name, part in arrays.items() if name.startswith(_BROADCAST)}
        self._refuse_missing(sent)
        earlier = state.round, setup.schedule
        state.round, state.parameters = number, _parameters(arrays, state.parameters)
        state.foreseen = ForeseenPlans(federation.settings.method.client)  # of this round alone: others may be missed
        if not self._own_coins:
            clients = [*setup.schedule.rounds]
            clients[number] = (self.number,)
            setup.schedule = replace(setup.schedule, rounds=tuple(clients))
        try:
            outcome = federation.opened({name: _tensor(part, state.parameters) for name, part in sent.items()})
        except BaseException:  # no private example was read
            state.round, setup.schedule = earlier
            raise
        client = state.clients[self.number]
        before = client.account.ledger.steps
        state.round += 1  # even if the round fails: its batches must not be drawn again
        if self._shared:
            self._charge_shares(client, earlier[0], number)
        try:
            federation.take_part(client, outcome)
            setup.untrained.check()
        except BaseException:
            if not self._shared:
                self._note_failure(number, client.account.ledger.steps - before)
            raise
        setup.file.save(setup, nothing_since=True)
        message = outcome.messages[self.number]
        by_size = federation.settings.federation.weights == "size" and not federation.settings.federation.shows_messages
        return scaled(message, float(client.size)) if by_size else message

    def _charge_shares(self, client: Client, earlier: int, number: int) -> None:
        """Charges the round, before a share is sent; where all clients send in all rounds, those since then as well."""
        federation, private = self._federation, self._federation.state.private
        if private is None:
            return
        shape, parameters = federation.settings.federation, federation.state.parameters
        sampling = shape.sampling_of_clients(len(federation.state.clients))
        for charged in range(number if shape.participants == "fixed" else earlier, number + 1):
            private.open(charged, parameters, None, [client.account], sampling)

    def _refuse_unknown_plans(self) -> None:
        """Refuses a server's defense whose plans depend on earlier releases, which a client does not follow."""
        private = self._federation.state.private
        if private is None:
            return
        stepper = private.stepper
        try:
            stepper.defense.plan(copy.copy(stepper.state), blind(stepper.context.at(0), ("update", "one_off")))
            reads = "" if stepper.state is None else "its state"
        except UnknownToServer as unknown:
            reads = str(unknown)
        if reads:
            raise ValueError(
                f"'{stepper.defense.name}' must plan a round without {reads}, got noise in shares of clients, which do "
                "not follow the server's releases; take dp_sgd, or run `federate`"
            )

    def _refuse_missing(self, sent: Arrays) -> None:
        """Refuses a broadcast without a tensor that the server's rule sends, before a step reads it."""
        rule = self._federation.settings.method.server
        if isinstance(rule, PrivateAverage):
            return
        missing = sorted({*rule.broadcast(self._federation.state.server)} - {*sent})
        if missing:
            raise ValueError(f"arrays must have '{_BROADCAST}{missing[0]}' of the server's rule, got {sorted(sent)}")

    def _note_failure(self, number: int, charged: int) -> None:
        """Notes in the schedule how much of a round without a message was charged."""
        federation, setup = self._federation.settings.federation, self._federation.setup
        of_steps = self._federation.settings.method.noise_place == "local steps"
        if charged < (federation.local_steps if of_steps else 1):
            lost = {**setup.schedule.lost, (number, self.number): charged}
            setup.schedule = replace(setup.schedule, lost=lost)


def local_round(client: ClientSide, number: int, arrays: Arrays) -> dict[str, np.ndarray]:
    """Takes a client's round: tau local steps from the global model, charged to its ledger.

    Args:
        client: its states and its ledger change.
        number: index of the round, from 0; higher than in the call before.
        arrays: of `ServerSide.arrays`.

    Returns:
        The message, for `aggregate`.

    Raises:
        ValueError: for a round that the client has taken or missed already, a model of another size, or a broadcast
            without what the server's rule sends. A round that fails after its first step is taken, and stays charged.
    """
    return to_arrays(client.take(number, arrays))


class ServerSide:
    """The server of a federated run: global model, rule, schedule and, with a private average, ledgers of clients.

    With a checkpoint, another process of the same settings goes on after the last round that was closed. A round that
    was open is taken again with the messages that come by then: nothing of it had left the server.
    """

    def __init__(
        self,
        model: nn.Module,
        method: Federated,
        *,
        sizes: Sequence[int],
        federation: Federation,
        sampling: Sampling,
        seed: int,
        lr: float = 0.1,
        public: LabelledData | None = None,
        key: int | None = None,
        schedule: RoundSchedule | None = None,
        recipe: Recipe | None = None,
        execution: Execution | None = None,
        checkpoint: Path | None = None,
    ) -> None:
        """Takes the settings of the run; the server has no private data.

        Args:
            model: the initial global model; `aggregate` moves it in place.
            method: with its noise multiplier set.
            sizes: public number of examples of every client; 0 for a client without data.
            federation: shape of the run.
            sampling: as at the clients.
            seed: as at the clients.
            lr: as at the clients.
            public: as at the clients.
            key: secret key of the server, of its noise and of `poisson` participants; drawn from the operating system
                if None.
            schedule: participants of every round; drawn if None.
            recipe: as at the clients.
            execution: engine, memory and device.
            checkpoint: file with global model, rule, schedule and ledgers, written before a global model leaves; with
                participants `poisson` or noise at the server as private as the data. None for a server that is one
                process.
        """
        settings = _settings(method, federation, sampling, recipe, execution, lr=lr, seed=seed, key=key, exact=False)
        settings = replace(settings, schedule=schedule, checkpoint=checkpoint)
        self._federation, self._unwritten = OngoingFederation(model, _elsewhere(sizes), public, settings), False
        self._save()  # a key that is drawn must be the next process's, too

    @property
    def round(self) -> int:
        """Index of the next round."""
        return self._federation.state.round

    @property
    def clients(self) -> tuple[int, ...]:
        """Numbers of the clients of the next round; nobody after the last."""
        ended = self.round == self._federation.settings.federation.rounds
        return () if ended else self._federation.senders(self.round)

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """Global model and broadcast, for the clients of the next round."""
        self._refuse_unwritten()
        state, rule = self._federation.state, self._federation.settings.method.server
        broadcast = {} if state.private is not None else rule.broadcast(state.server)  # pyright: ignore[reportAttributeAccessIssue]  a rule
        named = {_MODEL: state.parameters} | {_BROADCAST + name: part for name, part in broadcast.items()}
        return {name: part.detach().cpu().numpy().copy() for name, part in named.items()}

    @property
    def losses(self) -> tuple[str, ...]:
        """Clients whose message is missing in a round, a sentence each."""
        return self._federation.result().losses

    def claims(self, delta: float) -> tuple[Claim, ...]:
        """Returns the guarantee of every client at `delta`, where the server's noise proves it.

        Args:
            delta: in (0, 1).

        Raises:
            ValueError: for noise at the clients, whose ledgers are theirs.
        """
        if self._federation.settings.method.noise_place != "server":
            raise ValueError("claims must be of a server with noise: `ClientSide.claim` has the others")
        return self._federation.result().claims(delta)

    def average(self, replies: Mapping[int, Arrays]) -> None:
        """Moves the global model; see `aggregate`."""
        federation, like = self._federation, self._federation.state.parameters
        if not federation.settings.federation.shows_messages:
            raise ValueError("replies must be a sum for aggregation 'sum', got single messages; take `aggregate_sum`")
        self._refuse_round(replies)
        messages = {client: _on(from_arrays(arrays), like) for client, arrays in replies.items()}
        federation.state.foreseen = ForeseenPlans(federation.settings.method.client)  # as at the clients
        outcome = federation.opened()
        for client in outcome.clients:
            outcome.sent_down(client)
            self._receive(client, messages.get(client), outcome)
        federation.close(outcome)
        self._save()

    def open(self, total: Arrays | None, clients: Collection[int]) -> None:
        """Moves the global model by a sum; see `aggregate_sum`."""
        federation, like = self._federation, self._federation.state.parameters
        if federation.settings.federation.shows_messages:
            raise ValueError("aggregation must be 'sum' for a sum of messages, got 'messages'; take `aggregate`")
        self._refuse_round(clients)
        federation.state.foreseen = ForeseenPlans(federation.settings.method.client)  # as at the clients
        outcome = federation.opened()
        message = None if total is None else _on(from_arrays(total), like)
        for client in outcome.clients:
            outcome.sent_down(client)
            if client not in clients or message is None:
                outcome.missing[client] = "sends no reply"
            else:
                outcome.messages[client] = message  # of the form, and so of the bytes, of each that was added
        federation.refuse_too_few(outcome)
        if not outcome.aborted and message is not None:
            if not message.finite:
                raise ValueError("a sum must be of finite numbers, got others; the round is still open")
            self._refuse_size(message, outcome)
            outcome.total = message
        federation.open(outcome)
        federation.end(outcome)
        self._save()

    def _refuse_round(self, clients: Collection[int]) -> None:
        """Refuses replies after the last round, or of clients that are not in the round."""
        self._refuse_unwritten()
        if self.round == self._federation.settings.federation.rounds:
            raise ValueError(f"the run must have another round, got one after its {self.round} rounds")
        unexpected = sorted({*clients} - {*self.clients})
        if unexpected:
            raise ValueError(f"replies must be of clients of the round, {self.clients}, got {unexpected}")

    def _refuse_size(self, total: Message, outcome: RoundOutcome) -> None:
        """Refuses a sum that is not of the model's numbers, before it changes anything."""
        federation, round = self._federation, outcome.round
        private = federation.state.private
        if private is None:
            decoded = federation.settings.method.messages.decode(total, round)
            sizes, expected = {"values": len(decoded)}, {"values": len(round.parameters)}
        else:
            blocks = private.planned(round.number, round.parameters).plan.blocks
            expected = {f"block{i}": block.codec.size for i, block in enumerate(blocks)}
            sizes = {name: part.numel() for name, part in total.tensors.items()}
        if sizes != expected:
            raise ValueError(f"a sum must have the numbers {expected} of the model, got {sizes}")

    def _save(self) -> None:
        """Writes the file before the global model leaves; without it, this object sends nothing any more."""
        federation = self._federation
        self._unwritten = True
        federation.setup.file.save(federation.setup, nothing_since=True)
        self._unwritten = False
        federation.trainer.place(federation.state.parameters, None)

    def _refuse_unwritten(self) -> None:
        if self._unwritten:
            raise ValueError(
                "checkpoint of the server must be written before its global model leaves, and the last write failed; "
                "go on from the file in another process"
            )

    def _receive(self, client: int, message: Message | None, outcome: RoundOutcome) -> None:
        """Notes a client's message, or why it is missing."""
        if message is None:
            outcome.missing[client] = "sends no reply"
            return
        outcome.messages[client] = message
        if not message.finite:
            outcome.missing[client] = "sends non-finite numbers"
            return
        delta = self._federation.settings.method.messages.decode(message, outcome.round)
        if delta.shape != outcome.round.parameters.shape:
            raise ValueError(
                f"a message must have the {len(outcome.round.parameters)} numbers of the model, got "
                f"{list(delta.shape)} of client {client}"
            )


def aggregate(server: ServerSide, replies: Mapping[int, Arrays]) -> dict[str, np.ndarray]:
    """Moves the global model by the messages of a round; clients of the round without a message are lost.

    Args:
        server: its model, states and ledgers change.
        replies: client -> arrays of `local_round`.

    Returns:
        Global model and broadcast for the next round, `ServerSide.arrays`.

    Raises:
        ValueError: for a reply of a client that is not in the round, or a message that does not fit the model; the
            round is still open then.
    """
    server.average(replies)
    return server.arrays


def aggregate_sum(server: ServerSide, total: Arrays | None, clients: Collection[int]) -> dict[str, np.ndarray]:
    """Moves the global model by the sum of a round's messages, as a protocol of secure aggregation opens it.

    A round of fewer messages than `least_honest` + `colluders` is aborted: the model stays, and the round is charged.

    Args:
        server: its model, states and ledgers change.
        total: sums of the arrays of `local_round`, such as `summed`; whole numbers may be added modulo 2^32 or 2^64 by
            their width. None for a round that has no sum.
        clients: clients whose messages are in it.

    Returns:
        Global model and broadcast for the next round, `ServerSide.arrays`.

    Raises:
        ValueError: for a client that is not in the round, or a sum that does not fit the model; the round is still open
            then.
    """
    server.open(total, clients)
    return server.arrays


def summed(replies: Sequence[Arrays]) -> dict[str, np.ndarray]:
    """Returns the sum of messages as arrays: for tests and simulations, in place of secure aggregation.

    Args:
        replies: arrays of `local_round`, at least one.
    """
    return to_arrays(added([from_arrays(arrays) for arrays in replies]))


def _elsewhere(sizes: Sequence[int]) -> list[Any]:
    return [Elsewhere(size) if size else None for size in sizes]


def _settings(
    method: Federated,
    federation: Federation,
    sampling: Sampling,
    recipe: Recipe | None,
    execution: Execution | None,
    *,
    lr: float,
    seed: int,
    key: int | None,
    exact: bool,
) -> FederatedSettings:
    return FederatedSettings(
        method=method,
        federation=federation,
        sampling=sampling,
        lr=lr,
        seed=seed,
        key=key,
        exact=exact,
        schedule=None,
        recipe=recipe or Recipe(),
        execution=execution or Execution(),
        keep_messages=False,
        checkpoint=None,
        checkpoint_every=None,
        progress=None,
    )


def _tensor(array: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(np.array(array)).to(like)


def _parameters(arrays: Arrays, like: Float[Tensor, " dim"]) -> Float[Tensor, " dim"]:
    """Returns the global model that a server has sent."""
    parameters = arrays.get(_MODEL)
    if parameters is None or parameters.shape != like.shape:
        size = "none" if parameters is None else list(parameters.shape)
        raise ValueError(f"arrays must have the {len(like)} numbers of the model under '{_MODEL}', got {size}")
    return _tensor(parameters, like)


def _on(message: Message, like: Tensor) -> Message:
    """Returns a message with its tensors on a device."""
    tensors = {name: part.to(like.device) for name, part in message.tensors.items()}
    return replace(
        message, tensors=tensors, extras={name: part.to(like.device) for name, part in message.extras.items()}
    )
