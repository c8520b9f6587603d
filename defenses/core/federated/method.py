"""A federated method: a central defense of the clients, a client rule, a message codec and a server rule.

The noise lies in one of three places. In every local step of the clients (the client's defense): the unit is a record,
and every client has a ledger. In the server's average (`PrivateAverage`): the unit is a client, and the server is
trusted. In each client's update before it is sent (`update`): the unit is a client, whose data are replaced by any
others, and every client has a ledger of its own.

Guarantee:
    Unit record: a client's messages are an adaptive composition of its executed plans, and post-processing of their
    releases; so the guarantee holds against the server, the other clients and any coalition of them, for any global
    models and broadcasts that the server sends.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from ..plan.defense import Defense, checked_multiplier
from .messages.codecs import Messages, Reachable
from .private_average import PrivateAverage
from .rules import Average, ClientRule, Follow, ServerRule

NoisePlace = Literal["local steps", "update", "server"]
"""Part of a method that has the noise."""


@dataclass(frozen=True, kw_only=True)
class Federated:
    """A federated method.

    Attributes:
        client: defense of a client's local steps.
        rule: what a client does after the noise.
        messages: codec of a client's displacement.
        server: rule of the server, or a defense of its average.
        update: defense of each client's displacement before it is sent, a single row; None for none.
        budgets: noise multiplier of each client, in place of the client defense's own; empty for the same.
        name: name in records and tables; that of the client's defense if empty.
    """

    client: Defense
    rule: ClientRule = field(default_factory=Follow)
    messages: Messages = field(default_factory=Reachable)
    server: ServerRule | PrivateAverage = field(default_factory=Average)
    update: Defense | None = None
    budgets: tuple[float, ...] = ()
    name: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "budgets", tuple(checked_multiplier(value) for value in self.budgets))
        if not self.name:
            object.__setattr__(self, "name", f"federated_{self.client.name}")
        if self.update is not None and self._of_server is not None:
            raise ValueError(f"update of '{self.name}' must be None with a private average, which bounds it itself")
        parts = {"local steps": self.client, "server": self._of_server, "update": self.update}
        noisy = [place for place, part in parts.items() if part is not None and part.noise_multiplier != 0]
        if len(noisy) > 1 or (noisy and noisy != [self.noise_place]):
            raise ValueError(
                f"noise of '{self.name}' must be in its {self.noise_place} alone, got it in {' and '.join(noisy)}: no "
                "claim is for both; give the others noise_multiplier=0"
            )
        if self.budgets and self.noise_place != "local steps":
            raise ValueError(f"budgets must be of clients with noise in their local steps, got {self.noise_place}")

    @property
    def _of_server(self) -> Defense | None:
        return self.server.defense if isinstance(self.server, PrivateAverage) else None

    @property
    def noise_place(self) -> NoisePlace:
        """The part whose releases are charged."""
        if self._of_server is not None:
            return "server"
        return "local steps" if self.update is None else "update"

    @property
    def unit(self) -> Literal["record", "client"]:
        """Privacy unit of the claims."""
        return "record" if self.noise_place == "local steps" else "client"

    @property
    def private_part(self) -> Defense:
        """The defense whose releases are charged."""
        return self._of_server or self.update or self.client

    @property
    def noise_multiplier(self) -> float | None:
        """Noise multiplier of the part with noise; None until calibrated."""
        return self.private_part.noise_multiplier

    def with_noise(self, noise_multiplier: float) -> Federated:
        """Returns the method at another noise multiplier of the part with noise."""
        if isinstance(self.server, PrivateAverage):
            return replace(self, server=replace(self.server, defense=self.server.defense.with_noise(noise_multiplier)))
        if self.update is not None:
            return replace(self, update=self.update.with_noise(noise_multiplier))
        return replace(self, client=self.client.with_noise(noise_multiplier))

    def client_defense(self, client: int) -> Defense:
        """Returns the defense of a client, at its own budget.

        Args:
            client: number of the client.
        """
        return self.client.with_noise(self.budgets[client]) if self.budgets else self.client

    def check(self, clients: int) -> None:
        """Raises `ValueError` for an uncalibrated method, or budgets of another number of clients."""
        if self.budgets:
            if len(self.budgets) != clients:
                raise ValueError(f"budgets must be one for each of {clients} clients, got {len(self.budgets)}")
            return
        _ = self.private_part.calibrated_multiplier
