"""The server's side of a federated run in the loop of another framework: the average of messages, or of their sum.

See `sides.py` for the clients' side.

Guarantee:
    As for `federate`. With a checkpoint, a global model leaves after the file is written: a process that is killed
    before that has released nothing of the round, and the next one takes it with the messages that come by then. After
    a write that failed, this object sends nothing more: under seeded noise, the next process draws the same.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from torch import nn

from ..privacy.ledger import Claim
from ..privacy.sampling import Sampling
from ..training.labelled import LabelledData
from ..training.settings import Execution, Recipe
from .messages.message import Message, from_arrays
from .method import Federated
from .rounds import OngoingFederation, RoundOutcome
from .schedule import Federation, RoundSchedule
from .server_view import ForeseenPlans
from .side_arrays import (
    BROADCAST,
    MODEL,
    Arrays,
    elsewhere,
    on_device_of,
    settings_of,
)


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
        exact: bool = False,
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
            exact: as at the clients, if they add the noise, which decides the unit of their sum; otherwise whether the
                server's noise is exact, from the operating system.
            schedule: participants of every round; drawn if None.
            recipe: as at the clients.
            execution: engine, memory and device.
            checkpoint: file with global model, rule, schedule and ledgers, written before a global model leaves; with
                participants `poisson` or noise at the server as private as the data. None for a server that is one
                process.
        """
        settings = settings_of(method, federation, sampling, recipe, execution, lr=lr, seed=seed, key=key, exact=exact)
        settings = replace(settings, schedule=schedule, checkpoint=checkpoint)
        self._federation, self._unwritten = OngoingFederation(model, elsewhere(sizes), public, settings), False
        self._written = self._federation.state.parameters
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
        named = {MODEL: state.parameters} | {BROADCAST + name: part for name, part in broadcast.items()}
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
        messages = {client: on_device_of(from_arrays(arrays), like) for client, arrays in replies.items()}
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
        message = None if total is None else on_device_of(from_arrays(total), like)
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
        try:
            federation.setup.file.save(federation.setup, nothing_since=True)
        except BaseException:
            federation.trainer.place(self._written, None)  # the next process may draw the same noise on other sums
            raise
        self._unwritten, self._written = False, federation.state.parameters
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
