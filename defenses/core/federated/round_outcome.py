"""Messages of a round as they arrive, until it is recorded."""

from __future__ import annotations

from typing import Any

from ..plan.defense import NoisyPlan
from .messages.message import Message
from .round import Round
from .run import RoundRecord


class RoundOutcome:
    """Messages of a round as they arrive.

    Attributes:
        round: public facts of the round.
        clients: scheduled clients, in the order in which they train.
        missing: client -> reason why its message is not in the average.
        messages: client -> message.
        plans: client -> executed plans with their noise.
        before: client -> its states before the round.
        shows_messages: whether the server sees each message.
        total: sum of the messages, if the server sees no other and has opened it.
        aborted: reason why it was not opened; empty otherwise.
    """

    def __init__(self, round: Round, clients: tuple[int, ...], *, shows_messages: bool) -> None:
        """Starts without messages."""
        self.round, self.clients, self.shows_messages = round, clients, shows_messages
        self.before: dict[int, tuple[Any, ...]] = {}
        self.total: Message | None = None
        self.aborted = ""
        self.missing: dict[int, str] = {}
        self.messages: dict[int, Message] = {}
        self.plans: dict[int, tuple[NoisyPlan, ...]] = {}
        self._down: dict[int, int] = {}

    def sent_down(self, client: int) -> None:
        """Counts global model and broadcast."""
        parts = (self.round.parameters, *self.round.broadcast.values())
        self._down[client] = sum(part.numel() * part.element_size() for part in parts)

    @property
    def replied(self) -> dict[int, Message]:
        """Messages that are in the average, by client number."""
        return {client: message for client, message in sorted(self.messages.items()) if client not in self.missing}

    def record(self, *, keep: bool) -> RoundRecord:
        """Returns the record of the round, without single messages where the server sees none."""
        return RoundRecord(
            number=self.round.number,
            clients=self.clients,
            missing=dict(self.missing),
            bytes_up={client: message.bytes for client, message in self.messages.items()},
            bytes_down=dict(self._down),
            kinds={client: message.kind for client, message in self.messages.items()},
            global_model=self.round.parameters if keep else None,
            messages=dict(self.messages) if keep and self.shows_messages else {},
            plans=dict(self.plans) if keep and self.shows_messages else {},
            total=self.total if keep else None,
            aborted=self.aborted,
        )
