"""The two sides of a federated run in the loop of another framework: here a client's round.

`ClientSide` has a client's data, keys, ledger and states, `ServerSide` the global model and the server's rule. Between
them go dictionaries of NumPy arrays, which any framework can send: `ServerSide.arrays` is what a client gets,
`local_round` returns its message, and `aggregate` moves the global model by the messages that came, `aggregate_sum` by
their sum, where a protocol of secure aggregation opens no more (`server_side.py`). With the same keys the models and
the claims are those of `federate`. Both sides compute what a round's plans can move from the global model, public data
and public seed alone, so a client may miss rounds.

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
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from torch import nn

from ..privacy.ledger import Claim, Ledger
from ..privacy.sampling import Sampling
from ..training.labelled import LabelledData
from ..training.settings import Execution, Recipe
from .client import Client
from .messages.message import Message, to_arrays
from .method import Federated
from .private_average import PrivateAverage
from .rounds import OngoingFederation
from .schedule import Federation, RoundSchedule
from .secure_sum import hides_members, scaled
from .server_view import ForeseenPlans, UnknownToServer, blind
from .side_arrays import (
    BROADCAST,
    Arrays,
    elsewhere,
    parameters_of,
    settings_of,
    tensor_like,
)


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
        self.number, shards = number, elsewhere(sizes)
        shards[number] = examples
        settings = settings_of(method, federation, sampling, recipe, execution, lr=lr, seed=seed, key=key, exact=exact)
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
        sent = {name.removeprefix(BROADCAST): part for name, part in arrays.items() if name.startswith(BROADCAST)}
        self._refuse_missing(sent)
        earlier = state.round, setup.schedule
        state.round, state.parameters = number, parameters_of(arrays, state.parameters)
        state.foreseen = ForeseenPlans(federation.settings.method.client)  # of this round alone: others may be missed
        if not self._own_coins:
            clients = [*setup.schedule.rounds]
            clients[number] = (self.number,)
            setup.schedule = replace(setup.schedule, rounds=tuple(clients))
        try:
            if self._shared:  # its ledger charges a cycle of a partition once: a server must not ask for another round
                setup.schedule.check_of_clients(federation.settings.federation, given=False)
            outcome = federation.opened({name: tensor_like(part, state.parameters) for name, part in sent.items()})
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
            raise ValueError(f"arrays must have '{BROADCAST}{missing[0]}' of the server's rule, got {sorted(sent)}")

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
        ValueError: for a round that the client has taken or missed already, one at another place of a `partition` where
            it adds a share of the noise, a model of another size, or a broadcast without what the server's rule sends.
            A round that fails after its first step is taken, and stays charged.
    """
    return to_arrays(client.take(number, arrays))
