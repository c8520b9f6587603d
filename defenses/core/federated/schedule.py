"""Schedules of a federated run: which clients train in which round, and which are lost, all drawn before the run.

`fixed`: a uniform subset of m = max(1, round(rho K)) clients each round, without replacement. `poisson`: every client
joins each round independently with probability rho; a round may be empty. `partition`: every client joins exactly one
round of each cycle of ceil(1 / rho), the same in all cycles.

Guarantee:
    A schedule is independent of all data, and a client's losses of the other clients. It is public, so it amplifies
    nothing, except for `poisson` in a run whose unit is a client: there it is drawn with a secret key, by the sampler
    that the ledger charges.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from ..plan.noise_correlation import StrategyRow
from ..plan.refusals import refuse_count, refuse_unknown
from ..privacy.sampling import Sampling, full, partition, poisson
from ..randomness.keys import key_from, keyed, seed_from

Participants = Literal["fixed", "poisson", "partition"]
"""Distribution of a round's clients."""
Aggregation = Literal["messages", "sum"]
"""The server's view of a round."""


@dataclass(frozen=True, kw_only=True)
class Federation:
    """Shape of a federated run, independent of the method.

    Attributes:
        rounds: number of rounds, R.
        local_steps: local steps of a client in a round, tau.
        participation: expected fraction of the clients in a round, rho, in (0, 1].
        participants: distribution of a round's clients.
        equal: clients have the same sample "rate", or the same expected "batch", at which small clients pay more: their
            rate is min(1, B / n_i), with B the expected batch of a client of average size at the given rate.
        weights: weights of the average: "uniform", or "size" for n_i over the sum of a round's replies, which releases
            the sizes: claims are then under zero_out.
        server_lr: factor of the averaged displacement, gamma.
        dropout: probability with which a scheduled client is lost in a round, after a uniform number of its local
            steps, from none to all; drawn with the schedule.
        aggregation: the server's view of a round: all "messages", or their "sum" alone, by secure aggregation, which is
            assumed and not implemented.
        least_honest: h, least number of clients of a round whose messages come and who keep their noise to themselves,
            for "sum"; a round of fewer is aborted. None for two where clients' messages are releases already.
        colluders: largest number of a round's clients who share their noise with others, for "sum"; None for none.
    """

    rounds: int
    local_steps: int = 1
    participation: float = 0.8
    participants: Participants = "fixed"
    equal: Literal["rate", "batch"] = "rate"
    weights: Literal["uniform", "size"] = "uniform"
    server_lr: float = 1.0
    dropout: float = 0.0
    aggregation: Aggregation = "messages"
    least_honest: int | None = None
    colluders: int | None = None

    def __post_init__(self) -> None:
        refuse_count("rounds", self.rounds)
        refuse_count("local_steps", self.local_steps)
        if not 0 < self.participation <= 1:
            raise ValueError(f"participation must be in (0, 1], got {self.participation}")
        refuse_unknown("participants", self.participants, ("fixed", "poisson", "partition"))
        refuse_unknown("equal", self.equal, ("rate", "batch"))
        refuse_unknown("weights", self.weights, ("uniform", "size"))
        if not (math.isfinite(self.server_lr) and self.server_lr > 0):
            raise ValueError(f"server_lr must be a positive finite number, got {self.server_lr}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")
        refuse_unknown("aggregation", self.aggregation, ("messages", "sum"))
        for name in ("least_honest", "colluders"):
            refuse_count(name, getattr(self, name))
            if self.aggregation == "messages" and getattr(self, name) is not None:
                raise ValueError(f"{name} must be None with aggregation 'messages', got {getattr(self, name)}")

    @property
    def shows_messages(self) -> bool:
        """True if the server, and so an attack, sees the messages of single clients."""
        return self.aggregation == "messages"

    @property
    def least_survivors(self) -> int:
        """Least number of messages whose sum is opened, of which `colluders` may be of dishonest clients."""
        return 0 if self.shows_messages else (self.least_honest or 2) + (self.colluders or 0)

    def senders(self, clients: int, *, hidden: bool) -> int:
        """Returns the public number of clients that send in a round, m.

        Args:
            clients: number of clients with data.
            hidden: whether clients that are not sampled send as well, so that nobody sees who is.
        """
        if hidden:
            return clients
        if self.participants == "partition":
            return math.ceil(clients / self.sampling_of_clients(clients).steps_per_epoch)
        return max(1, round(self.participation * clients))

    @property
    def steps(self) -> int:
        """Number of local steps of a client that takes part in every round."""
        return self.rounds * self.local_steps

    def sampling_of_clients(self, clients: int) -> Sampling:
        """Returns the sampler that a ledger charges where a client is the unit.

        Args:
            clients: number of clients with data.
        """
        if self.participants == "poisson":
            return poisson(self.participation) if self.participation < 1 else full()
        if self.participants == "partition":
            return partition(self.participation)
        # A record of this sampler takes part in every step; the loop charges a client for its own rounds alone.
        return partition(1.0)

    def samplings(self, sampling: Sampling, sizes: Sequence[int]) -> list[Sampling]:
        """Returns each client's sampler of records; clients without data get the given one.

        Args:
            sampling: the sampler; for `equal = "batch"` its rate is that of a client of average size.
            sizes: public numbers of the clients' examples.

        Raises:
            ValueError: for a sampler that deals records by epochs which local steps do not complete.
        """
        populated = [size for size in sizes if size]
        if self.equal == "batch" and populated:
            batch = sampling.rate * sum(populated) / len(populated)
            own = [_at_rate(sampling, min(1.0, batch / size)) if size else sampling for size in sizes]
        else:
            own = [sampling] * len(sizes)
        for own_sampling in {sampler for sampler, size in zip(own, sizes, strict=True) if size}:
            self._refuse_cut_epochs(own_sampling)
        if sampling.kind == "truncated_poisson" and {*populated} - {sampling.examples}:
            raise ValueError(
                f"truncated_poisson must be of the examples of every client, got {sampling.examples} for clients of "
                f"{', '.join(map(str, sorted({*populated})))}; take poisson"
            )
        return own

    def _refuse_cut_epochs(self, sampling: Sampling) -> None:
        epochs = {
            "shuffle": sampling.steps_per_epoch,
            "partition": sampling.steps_per_epoch,
            "random_allocation": sampling.steps_per_epoch,
            "cyclic": sampling.groups,
        }
        steps = epochs.get(sampling.kind, 1)
        if self.local_steps % steps:
            raise ValueError(
                f"local_steps must be whole epochs of {steps} steps under {sampling.kind} sampling, got "
                f"{self.local_steps}: rounds that a client misses would cut its epochs; take poisson"
            )


def _at_rate(sampling: Sampling, rate: float) -> Sampling:
    if sampling.kind not in ("poisson", "fixed", "shuffle", "partition", "random_allocation"):
        raise ValueError(f"equal must be 'rate' under {sampling.kind} sampling, got 'batch'")
    return Sampling(sampling.kind, rate)


@dataclass(frozen=True)
class RoundSchedule:
    """Participants of every round, and losses.

    Attributes:
        rounds: numbers of the clients of each round, in the order in which they train.
        lost: (round, client) -> number of local steps after which the client is lost, from 0 to local_steps.
    """

    rounds: tuple[tuple[int, ...], ...]
    lost: Mapping[tuple[int, int], int] = field(default_factory=dict)

    def rounds_of(self, client: int) -> tuple[int, ...]:
        """Returns the rounds in which a client is scheduled."""
        return tuple(number for number, clients in enumerate(self.rounds) if client in clients)

    def steps_of(self, client: int, round: int, local_steps: int) -> int:
        """Returns the local steps that a scheduled client takes in a round."""
        return min(self.lost.get((round, client), local_steps), local_steps)

    def whole(self, populated: Sequence[int]) -> bool:
        """Returns whether every client with data is in every round, and none is lost."""
        return not self.lost and all({*clients} == {*populated} for clients in self.rounds)

    def check(self, federation: Federation, populated: Sequence[int]) -> None:
        """Refuses a schedule that does not fit the run.

        Args:
            federation: the run's.
            populated: numbers of the clients with data.

        Raises:
            ValueError: for a schedule of another length, an unknown client, a client without data, a repeat, or a loss
                after fewer than 0 steps.
        """
        if len(self.rounds) != federation.rounds:
            raise ValueError(f"schedule must have {federation.rounds} rounds, got {len(self.rounds)}")
        for number, clients in enumerate(self.rounds):
            if len({*clients}) < len(clients) or {*clients} - {*populated}:
                numbers = ", ".join(map(str, clients))
                raise ValueError(f"round {number} of the schedule must have distinct clients with data, got {numbers}")
        if self.lost and min(self.lost.values()) < 0:
            raise ValueError(f"lost must be after at least 0 local steps, got {min(self.lost.values())}")

    def check_of_clients(self, federation: Federation, *, given: bool) -> None:
        """Refuses a schedule that is not the participation of clients which a ledger charges.

        Args:
            federation: the run's.
            given: whether the schedule was given, and not drawn with a secret key.

        Raises:
            ValueError: for a given schedule under `poisson`, or a client that is not in the same round of every cycle
                of a `partition`: its rounds would be closer than the ledger of correlated noise assumes.
        """
        if federation.participants == "poisson" and given:
            raise ValueError(
                "schedule must be None for participants='poisson' where a client is the unit, got one: only a secret "
                "draw amplifies; give participants='fixed'"
            )
        if federation.participants != "partition":
            return
        cycle = federation.sampling_of_clients(1).steps_per_epoch
        places: dict[int, int] = {}
        for number, clients in enumerate(self.rounds):
            for client in clients:
                place = places.setdefault(client, number % cycle)
                if place != number % cycle:
                    raise ValueError(
                        f"a partition must have a client in the same round of every {cycle}, got client {client} in "
                        f"rounds {place} and {number % cycle} of them; give participants='fixed'"
                    )


def refuse_cut_stream(row: StrategyRow | None, local_steps: int, *, whole: bool) -> None:
    """Refuses noise that is correlated over the steps of several rounds, if a client may miss one of them.

    Args:
        row: position of a local step in a stream; None for independent noise.
        local_steps: local steps of a round.
        whole: whether every client takes every step of every round.
    """
    if row is None or whole or local_steps % row.strategy.steps == 0:
        return
    raise ValueError(
        f"noise that is correlated over steps must restart within a round of {local_steps} local steps, got a stream "
        f"of {row.strategy.steps}: a client that misses a round would break it"
    )


def draw_schedule(federation: Federation, populated: Sequence[int], *, seed: int, key: int) -> RoundSchedule:
    """Draws a schedule.

    Args:
        federation: shape of the run.
        populated: numbers of the clients with data.
        seed: public seed, of `fixed` and `partition` and of losses.
        key: key of `poisson`: secret if a client is the unit, otherwise any public number.
    """
    clients, rho = len(populated), federation.participation
    rounds: list[tuple[int, ...]] = []
    for number in range(federation.rounds):
        if federation.participants == "fixed":
            order = torch.randperm(clients, generator=keyed(seed_from(seed, "participants", number)))
            chosen = order[: max(1, round(rho * clients))].sort().values
        else:
            sampling = poisson(rho) if federation.participants == "poisson" else partition(rho)
            own = key if federation.participants == "poisson" else key_from("partition of clients", seed)
            chosen = sampling.indices(number, clients, own).sort().values
        rounds.append(tuple(populated[position] for position in chosen.tolist()))
    lost = {}
    for number, members in enumerate(rounds):
        generator = keyed(seed_from(seed, "losses", number))
        # Losses of everybody where all clients may send: those of the sampled ones would reveal how many there are.
        everybody = not federation.shows_messages and federation.participants == "poisson"
        losing = populated if everybody else members
        # By number, not by place in the round: otherwise a client that joins would decide which others are lost, and
        # change their rows of a sum in which it is the unit.
        uniforms = torch.rand(2 * max(losing, default=-1) + 2, generator=generator, dtype=torch.float64).tolist()
        for client in losing:
            uniform, share = uniforms[2 * client : 2 * client + 2]
            if uniform < federation.dropout:
                lost[number, client] = min(federation.local_steps, int(share * (federation.local_steps + 1)))
    return RoundSchedule(tuple(rounds), lost)
