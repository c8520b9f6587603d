"""Secure aggregation as a view: the server sees the sum of a round's messages, and noise may be added in shares.

Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017, is such a protocol;
none is implemented here. Where a client is the unit and noise belongs to the server's average, each of the m clients of
a round adds Gaussian noise of variance z^2 S^2 / m to its own bounded update (Kairouz, Liu & Steinke, "The Distributed
Discrete Gaussian Mechanism for Federated Learning with Secure Aggregation", ICML 2021). A share is a vector of whole
numbers of a public unit, so that a protocol can add it modulo a power of two, and the sum is exact.

Guarantee:
    Unit: a client with all its data, under zero-out: without its update, it still sends its share of the noise. Against
    the server and up to `colluders` clients together. A sum is opened if at least `least_honest` + `colluders` messages
    came, so the noise that the adversary does not know has at least the variance z^2 S^2 h / m, h the least number of
    honest ones: each round is charged as a Gaussian at z sqrt(h / m), also if it is aborted, because a client is
    charged before it sends. Participants `poisson`: all clients send, those that are not sampled a share of noise on
    zero, so that nobody sees who is sampled; losses are drawn for all of them.
    A sum of rounded Gaussians is no rounded Gaussian, and a sum of discrete Gaussians no discrete Gaussian. With 2^18
    units or more in a share's standard deviation, the first differs by less than 1e-100 in total variation from the
    exact sum with its Gaussian noise, plus m - 1 independent uniform numbers of (-1/2, 1/2) units, rounded (Poisson
    summation): a function of the Gaussian mechanism's release and of public randomness. The second differs as little
    from a discrete Gaussian (Kairouz et al., theorem 1).
    Assumes a protocol under which the server learns the sum of a round, once and of one set of clients, and nothing
    else; losses that do not depend on data; and that no more than `colluders` clients of a round reveal their noise.
    Unit record, or noise in each update: the sum is a view, and no claim counts the noise of other clients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from ..gradients.executor import Release, opened, release_rows
from ..plan.defense import Block, NoisyPlan
from ..randomness.noise import Noise
from .messages.message import Message, MessageKind
from .schedule import Federation

_TAIL = 12  # standard deviations that no draw of `CipherNoise` reaches
_ADDABLE: tuple[MessageKind, ...] = ("dense", "values", "coefficients", "shares")


@dataclass(frozen=True)
class NoiseShares:
    """Division of the noise of a server's average among the clients of a round.

    Attributes:
        clients: m, public number of clients that add a share.
        least: h, least number of honest clients whose share is in an opened sum.
    """

    clients: int
    least: int

    def of_client(self, plan: NoisyPlan) -> NoisyPlan:
        """Returns the plan of a client's own row, with its share of the noise."""
        _refuse_correlated(plan)
        return plan.plan.at(plan.noise_multiplier / math.sqrt(self.clients))

    def claimed(self, plan: NoisyPlan) -> NoisyPlan:
        """Returns the plan at the noise that a claim counts on."""
        _refuse_correlated(plan)
        return plan.plan.at(plan.noise_multiplier * self.claimed_share)

    @property
    def claimed_share(self) -> float:
        """Noise multiplier of the claim / that of all shares, sqrt(h / m)."""
        return math.sqrt(self.least / self.clients)

    def message(self, plan: NoisyPlan, delta: Float[Tensor, " dim"] | None, like: Tensor, noise: Noise) -> Message:
        """Returns a client's message: its bounded row with its share of the noise, in whole units.

        Args:
            plan: of the server's round, with the noise of all shares.
            delta: displacement; None for a client that is not sampled, which has no row in any block: a row of 0 would
                count as one within an adaptive clip norm. A displacement that is not finite is a row of 0, which the
                client itself sees to: nobody else could.
            like: a vector of the model's length and device.
            noise: the client's secret source.
        """
        rows = like.new_zeros(0, len(like)).double()
        if delta is not None:
            rows = -(delta if bool(torch.isfinite(delta).all()) else torch.zeros_like(delta)).double().unsqueeze(0)
        own = self.of_client(plan)
        released = release_rows(own, lambda point: rows, rows, noise)
        parts = zip(own.plan.blocks, own.stds, released.noisy, strict=True)
        tensors = {f"block{i}": self._whole(block, std, part, noise) for i, (block, std, part) in enumerate(parts)}
        return Message("shares", tensors)

    def _whole(self, block: Block, std: float, values: Tensor, noise: Noise) -> Tensor:
        """Returns values in units, in 32 bits where the sum of all clients fits into them; as they are without noise.

        The width follows from public values: the bound, the noise and the number of clients.
        """
        if not std:
            return values
        unit = noise.unit(std)
        most = self.clients * (block.bound.norm + _TAIL * std) / unit
        fits = not noise.exact and math.isfinite(block.bound.sensitivity) and most < 2**31
        return (values / unit).round().to(torch.int32 if fits else torch.int64)

    def opened(self, plan: NoisyPlan, total: Message, like: Tensor, noise: Noise) -> Release:
        """Returns the release of a round from the sum of its messages.

        Args:
            plan: as for `message`.
            total: of `added`.
            like: dtype and device of the release.
            noise: a source of the clients' kind, for its unit; nothing is drawn.
        """
        own = self.of_client(plan)
        units = [noise.unit(std) if std else 1.0 for std in own.stds]
        sums = [total.tensors[f"block{i}"].to(like.device).double() * unit for i, unit in enumerate(units)]
        return opened(plan, sums, like.dtype)


def _refuse_correlated(plan: NoisyPlan) -> None:
    """Refuses a plan of a stream of correlated noise, whatever the round: a share is drawn without the earlier ones."""
    if plan.plan.correlated is not None:
        raise ValueError(
            "noise in shares must be independent from round to round, got a plan of a stream; take aggregation "
            "'messages'"
        )


def shares_of(federation: Federation, clients: int) -> NoiseShares:
    """Returns the division of a server's noise.

    Args:
        federation: with aggregation "sum".
        clients: number of clients with data.

    Raises:
        ValueError: without a least number of honest clients, or with one that no round reaches.
    """
    hidden = hides_members(federation)
    if federation.least_honest is None:
        raise ValueError("least_honest must be set for noise in shares, got None")
    refuse_small_rounds(federation, clients, hidden=hidden)
    return NoiseShares(federation.senders(clients, hidden=hidden), federation.least_honest)


def refuse_small_rounds(federation: Federation, clients: int, *, hidden: bool) -> None:
    """Refuses rounds of which none would have a sum to open.

    Args:
        federation: of the run.
        clients: number of clients with data.
        hidden: whether all clients send.

    Raises:
        ValueError: for more survivors than clients that send.
    """
    most = federation.senders(clients, hidden=hidden)
    if federation.least_survivors > most:
        raise ValueError(
            f"least_honest + colluders must be at most the {most} clients that send in a round, got "
            f"{federation.least_honest or 2} + {federation.colluders or 0}"
        )


def hides_members(federation: Federation) -> bool:
    """Returns whether all clients send in every round of noise in shares, so that nobody sees who is sampled."""
    return not federation.shows_messages and federation.participants == "poisson"


def scaled(message: Message, factor: float) -> Message:
    """Returns a message whose displacement is multiplied by a public factor, as for weights by size."""
    if factor == 1:
        return message
    return replace(message, tensors={name: part * factor for name, part in message.tensors.items()})


def added(messages: Sequence[Message]) -> Message:
    """Returns the sum of messages, which is what secure aggregation opens.

    Args:
        messages: at least one, of clients with the same public positions or directions.

    Raises:
        ValueError: for messages of several forms, or with positions of their own.
    """
    first = messages[0]
    forms = {(message.kind, *_shapes(message.tensors), *_shapes(message.extras)) for message in messages}
    if len(forms) > 1 or first.kind not in _ADDABLE:
        kinds = " and ".join(sorted({message.kind for message in messages}))
        raise ValueError(
            f"messages of a sum must all have the same numbers at public positions, got kind {kinds}; take a method "
            "whose positions are public, or aggregation 'messages'"
        )
    parts = [_total([message.tensors for message in messages]), _total([message.extras for message in messages])]
    return Message(first.kind, *parts)


def _shapes(tensors: Mapping[str, Tensor]) -> tuple[object, ...]:
    return tuple((name, tensors[name].dtype, tensors[name].shape) for name in sorted(tensors))


def _total(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Returns the sum of every tensor: of whole numbers exact, of others by float64."""
    total = {}
    for name, first in parts[0].items():
        wide = torch.float64 if first.is_floating_point() else torch.int64
        total[name] = torch.stack([part[name].to(wide) for part in parts]).sum(dim=0).to(first.dtype)
    return total
