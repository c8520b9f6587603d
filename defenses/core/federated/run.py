"""Finished federated runs: the global model, a ledger for every client, and the messages of every round.

Guarantee:
    Unit record, add/remove in the data of a client: a client's claim is derived from the plans executed on its data.
    Records of different clients are disjoint, so a federation claims the largest epsilon of its clients ("worst
    client"), and reports all. Records of the same person at several clients compose. Unit client: as in
    `private_average.py` and `method.py`. Neither is called local differential privacy. Weights by size release the
    numbers of examples exactly: such claims are under zero-out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from jaxtyping import Float
from torch import Tensor, nn

from ..plan.defense import NoisyPlan
from ..privacy.ledger import Claim, Ledger
from ..randomness.noise import NoiseSource
from ..training.assumptions import assumptions
from .messages.message import Message, MessageKind
from .method import Federated
from .schedule import Federation, RoundSchedule

_OF_UNIT = {
    "record": "the claim is for a record that one client holds: those of one person at several clients compose",
    "client": "",
}

_OF_SUM = (
    "the server learns the sum of a round's messages, of {least} clients or more, once and of one set of them, by a "
    "protocol that is no part of this run; of a round's clients, {colluders} at most share their noise or their coins "
    "with others; losses, and the time that a client takes, tell nothing of data; a client without its update still "
    "sends its share of the noise"
)


def relation_of(relation: str, method: Federated, federation: Federation, *, size_public: bool) -> str:
    """Returns the neighbouring relation of a federated claim.

    Args:
        relation: of the ledger's sampler.
        method: of the run.
        federation: of the run.
        size_public: whether the clients' numbers of examples are treated as public.
    """
    by_size = federation.weights == "size" and size_public
    in_shares = method.noise_place == "server" and not federation.shows_messages
    return "zero_out" if relation == "add_remove" and (by_size or in_shares) else relation


@dataclass(frozen=True, eq=False)
class RoundRecord:
    """A round as the server saw it.

    Attributes:
        number: index of the round.
        clients: scheduled clients; where nobody sees who is sampled, all that send.
        missing: client -> reason why its message is not in the average.
        bytes_up: client -> bytes of its message.
        bytes_down: client -> bytes of global model and broadcast.
        kinds: client -> form of its message.
        global_model: parameters before the round [dim]; None unless messages are kept.
        messages: client -> message; empty unless messages are kept, and where the server sees their sum alone.
        plans: client -> executed plans with their noise; empty unless messages are kept, and as `messages`.
        total: sum of the messages, where the server sees no other; None unless messages are kept.
        aborted: reason why the sum was not opened; empty otherwise.
    """

    number: int
    clients: tuple[int, ...]
    missing: Mapping[int, str]
    bytes_up: Mapping[int, int]
    bytes_down: Mapping[int, int]
    kinds: Mapping[int, MessageKind]
    global_model: Float[Tensor, " dim"] | None = None
    messages: Mapping[int, Message] = field(default_factory=dict)
    plans: Mapping[int, tuple[NoisyPlan, ...]] = field(default_factory=dict)
    total: Message | None = None
    aborted: str = ""

    @property
    def parameters(self) -> Float[Tensor, " dim"]:
        """The global model before the round.

        Raises:
            ValueError: for a run that kept none.
        """
        if self.global_model is None:
            raise ValueError("keep_messages must be True for the global models of rounds, got False")
        return self.global_model


@dataclass(frozen=True, eq=False)
class FederatedRun:
    """A finished federated run.

    Attributes:
        model: the trained global model, in evaluation mode.
        method: with its noise.
        federation: shape of the run.
        schedule: participants and losses of every round; secret where a client is the unit under `poisson`, as are the
            clients of `rounds`.
        ledgers: ledger of every client, by number.
        rounds: what was sent in every round.
        empty: numbers of the clients without data, which are never scheduled.
        seed: key of the public randomness.
        key: secret key from which the clients' keys of samplers, and of seeded noise, are hashed; never logged.
        engine: name of the engine that computed the sums.
        noise: source of the noise; "none" if no release had noise.
        public_used: whether public examples were read.
        key_given: whether the key was given, and not drawn from the operating system.
        size_public: whether the clients' numbers of examples are treated as public.
        resumed: whether it continued from a checkpoint.
        repeated: whether it took rounds again with the same seeded noise, after an interruption.
        remarks: remarks of the executed plans, and marks of unverified components.
        unverified: the same components in sentences.
    """

    model: nn.Module
    method: Federated
    federation: Federation
    schedule: RoundSchedule
    ledgers: tuple[Ledger, ...]
    rounds: tuple[RoundRecord, ...]
    empty: tuple[int, ...]
    seed: int
    key: int = field(repr=False)
    engine: str
    noise: NoiseSource | Literal["none"]
    public_used: bool = False
    key_given: bool = False
    size_public: bool = True
    resumed: bool = False
    repeated: bool = False
    remarks: tuple[str, ...] = ()
    unverified: tuple[str, ...] = ()

    @property
    def unit(self) -> Literal["record", "client"]:
        """Privacy unit of the claims."""
        return self.method.unit

    @property
    def losses(self) -> tuple[str, ...]:
        """Clients without data, missing messages, and aborted rounds, a sentence each."""
        missing = [
            f"round {record.number}: client {client} {reason}"
            for record in self.rounds
            for client, reason in sorted(record.missing.items())
        ]
        aborted = [f"round {record.number}: {record.aborted}" for record in self.rounds if record.aborted]
        return (*(f"client {client} has no data and is never scheduled" for client in self.empty), *missing, *aborted)

    def bytes_up(self, client: int) -> int:
        """Returns the bytes that a client has sent."""
        return sum(record.bytes_up.get(client, 0) for record in self.rounds)

    def bytes_down(self, client: int) -> int:
        """Returns the bytes that a client has received."""
        return sum(record.bytes_down.get(client, 0) for record in self.rounds)

    def claims(self, delta: float) -> tuple[Claim, ...]:
        """Returns the guarantee of every client at `delta`, by number; epsilon 0 for a client that took no part."""
        return tuple(self._claim(ledger, delta) for ledger in self.ledgers)

    def claim(self, delta: float) -> Claim:
        """Returns the guarantee of the federation: that of the client with the largest epsilon."""
        return max(self.claims(delta), key=lambda claim: claim.epsilon)

    @property
    def worst(self) -> int:
        """Number of a client with the largest epsilon at delta 1e-5."""
        claims = self.claims(1e-5)
        return max(range(len(claims)), key=lambda client: claims[client].epsilon)

    def _claim(self, ledger: Ledger, delta: float) -> Claim:
        claim = ledger.claim(delta, unit=self.unit)
        known = {"key_given": self.key_given, "public_used": self.public_used}
        known |= {"resumed": self.resumed, "repeated": self.repeated}
        assumes = (
            *assumptions(self.noise, ledger.sampling, **known, size_public=self.size_public and self.unit == "record"),
            *filter(None, (_OF_UNIT[self.unit], self._of_server, self._of_nominal_size)),
        )
        return replace(
            claim,
            relation=relation_of(claim.relation, self.method, self.federation, size_public=self.size_public),
            assumes=assumes,
            unverified=self.unverified,
        )

    @property
    def _of_server(self) -> str:
        if self.method.noise_place != "server":
            return ""
        if not self.federation.shows_messages:
            colluders, least = self.federation.colluders or "none", self.federation.least_survivors
            return _OF_SUM.format(colluders=colluders, least=least)
        return (
            "the server is trusted: it sees every client's update without noise; the number of clients, from which the "
            "divisor of their sum follows, is public, and so are global models; participants, losses and bytes of its "
            "rounds are not"
        )

    @property
    def _of_nominal_size(self) -> str:
        if self.size_public or self.unit != "record":
            return ""
        return "which clients have data is public: a record that is the only one of its client is not hidden"
