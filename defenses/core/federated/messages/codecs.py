"""Codecs of messages: what a client sends of its displacement, and how the server reads it.

The form follows from the plans that the round executed: all numbers, those at the coordinates that the plans move, or
coefficients along the directions of their subspace. A method may send less: the largest entries, or coefficients along
public directions whatever the local steps moved.

Guarantee:
    A codec gets the displacement after the noise, and public values: post-processing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float
from torch import Tensor

from ...plan.codec import Codec, Coordinates, Everything, Subspace
from ...plan.defense import Context
from ...plan.families.public_subspaces import PublicSubspace
from ...plan.refusals import refuse_unknown
from ..round import Round
from .message import Message, at_coordinates, coefficients, decoded_message, dense_message
from .reach import reach_of, same

OUTSIDE = 1e-3
"""Largest share of a displacement's norm outside of its subspace that may be float32 rounding (2e-6 is usual)."""


@runtime_checkable
class Messages(Protocol):
    """Codec of a method's messages.

    Two further properties are optional, and False without a definition: `adds`, true if all messages of a round can
    have the same public positions, so that their sum can be decoded, and `reads_update`, true if an update of a local
    step decides the positions.
    """

    def prepare(self, context: Context) -> Codec | None:
        """Returns a codec that all parties compute themselves at the global model, or None."""
        ...

    def check(self, round: Round) -> None:
        """Raises `ValueError` for a round whose messages would be refused, before a client trains."""
        ...

    def encode(self, delta: Float[Tensor, " dim"], round: Round) -> Message:
        """Returns the client's message; `round.plans` are the plans that it executed."""
        ...

    def decode(self, message: Message, round: Round) -> Float[Tensor, " dim"]:
        """Returns the displacement at the server, from public values and the message."""
        ...


@dataclass(frozen=True, kw_only=True)
class Reachable:
    """Messages of the numbers that the round's plans can move; all numbers where nothing shorter holds them.

    Attributes:
        outside: action if the displacement leaves the subspace of its plans, as under weight decay, Adam, a control
            variate or a basis that changes within the round: send it "dense", or "refuse".
    """

    outside: Literal["dense", "refuse"] = "dense"

    def __post_init__(self) -> None:
        refuse_unknown("outside", self.outside, ("dense", "refuse"))

    @property
    def adds(self) -> bool:
        """True: positions of a client's own are not used in a sum."""
        return True

    def prepare(self, context: Context) -> None:
        """Returns None: the plans decide."""

    def check(self, round: Round) -> None:
        """Refuses a round whose displacements leave their span, as far as it follows from public values."""
        if self.outside == "dense":
            return
        movable = None if round.foreseen is None else reach_of(round.foreseen)
        if movable is None:
            self._instead(None, "the server cannot compute the plans of the local steps")
        elif isinstance(movable, Everything):
            self._instead(None, "the local steps have no common subspace or mask")
        elif isinstance(movable, Subspace) and not round.spanned:
            self._instead(None, "optimizer or client rule add other directions")

    def encode(self, delta: Float[Tensor, " dim"], round: Round) -> Message:
        """Returns the shortest message that holds the displacement.

        Raises:
            ValueError: for a displacement outside of its subspace, if `outside` is "refuse".
        """
        movable = reach_of(round.plans) if round.plans else Everything(len(delta))
        foreseen = None if round.foreseen is None else reach_of(round.foreseen)
        public = foreseen is not None and same(movable, foreseen)
        if isinstance(movable, Coordinates):
            if not bool(_without(delta, movable).any()):
                if round.summed and not public:
                    return dense_message(delta)  # positions of its own cannot be added to those of others
                return at_coordinates(delta, movable.kept, public=public)
            return self._instead(delta, "it moves coordinates that the plans do not release")
        if isinstance(movable, Subspace):
            if not public:
                return self._instead(delta, "the server cannot compute the directions of the local steps")
            if not round.spanned:
                return self._instead(delta, "optimizer or client rule add other directions")
            message = coefficients(delta, movable)
            # False for 0 / 0 and for a displacement that is not finite, which the loop names.
            if (share := float((delta - movable.decode(message.tensors["values"])).norm() / delta.norm())) > OUTSIDE:
                return self._instead(delta, f"{share:.2g} of its norm lies outside")
            return message
        if self.outside == "refuse":
            return self._instead(delta, "the local steps have no common subspace or mask")
        return dense_message(delta)

    def decode(self, message: Message, round: Round) -> Float[Tensor, " dim"]:
        """Returns the displacement, at the positions or along the directions that the server foresaw."""
        known = reach_of(round.foreseen) if round.foreseen else None
        return decoded_message(message, round.context.dim, None if isinstance(known, Everything) else known)

    def _instead(self, delta: Tensor | None, reason: str) -> Message:
        if self.outside == "refuse" or delta is None:
            raise ValueError(
                f"a message must lie in the span of its round's plans, and {reason}; use plain SGD and interval = "
                "local_steps, or Reachable(outside='dense')"
            )
        return dense_message(delta)


def _without(delta: Tensor, kept: Coordinates) -> Tensor:
    return delta.index_fill(0, kept.kept.to(delta.device), 0.0)


@dataclass(frozen=True, kw_only=True)
class LargestEntries:
    """Messages of the largest entries of the displacement, with their positions; the other entries are dropped.

    Attributes:
        sparsity: fraction of the entries to drop, in [0, 1).
        score: entries are ranked by their "size", |delta_j|, or by their "effect", |delta_j u_j|, with u the noisy
            update of the last local step: to first order the change of the loss.
    """

    sparsity: float
    score: Literal["size", "effect"] = "size"

    def __post_init__(self) -> None:
        refuse_unknown("score", self.score, ("size", "effect"))
        if not 0 <= self.sparsity < 1:
            raise ValueError(f"sparsity must be in [0, 1), got {self.sparsity}")

    @property
    def adds(self) -> bool:
        """True at sparsity 0: otherwise every client has positions of its own."""
        return not self.sparsity

    @property
    def reads_update(self) -> bool:
        """True if an update of a local step decides the positions, which must then have noise."""
        return self.score == "effect" and bool(self.sparsity)

    def prepare(self, context: Context) -> None:
        """Returns None: positions are sent."""

    def check(self, round: Round) -> None:
        """Accepts every round."""

    def encode(self, delta: Float[Tensor, " dim"], round: Round) -> Message:
        """Returns the ceil((1 - sparsity) dim) entries of largest score; all of them at sparsity 0.

        Raises:
            ValueError: for scores by effect without a noisy update.
        """
        if not self.sparsity:
            return dense_message(delta)
        scores = delta.abs()
        if self.reads_update:
            if round.update is None:
                raise ValueError("score must be 'size' without a noisy update of the last local step, got 'effect'")
            scores = scores * round.update.abs()
        kept = scores.topk(kept_count(len(delta), self.sparsity)).indices.sort().values
        return at_coordinates(delta, kept, public=False)

    def decode(self, message: Message, round: Round) -> Float[Tensor, " dim"]:
        """Returns the entries at their positions, zero elsewhere."""
        return decoded_message(message, round.context.dim)


def kept_count(dim: int, sparsity: float) -> int:
    """Returns the number of entries that a sparsity keeps, ceil((1 - sparsity) dim); rounding of the product apart."""
    return max(1, int(np.ceil((1 - sparsity) * dim * (1 - 1e-12))))


@dataclass(frozen=True, kw_only=True)
class PublicCoefficients:
    """Messages of coefficients along public directions, whatever the local steps moved; the rest is lost.

    Attributes:
        subspace: source of the directions at the global model of a round.
    """

    subspace: PublicSubspace

    @property
    def adds(self) -> bool:
        """True: all clients have the same directions."""
        return True

    def prepare(self, context: Context) -> Subspace:
        """Returns the subspace of public gradients at the global model."""
        return self.subspace.at(None, context)[1]

    def check(self, round: Round) -> None:
        """Accepts every round."""

    def encode(self, delta: Float[Tensor, " dim"], round: Round) -> Message:
        """Returns the coefficients."""
        return coefficients(delta, _prepared(round))

    def decode(self, message: Message, round: Round) -> Float[Tensor, " dim"]:
        """Returns the combination of directions."""
        return decoded_message(message, round.context.dim, _prepared(round))


def _prepared(round: Round) -> Subspace:
    if not isinstance(round.codec, Subspace):
        raise ValueError(f"round must have a prepared subspace, got {type(round.codec).__name__}")
    return round.codec
