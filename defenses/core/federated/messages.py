"""Messages of a client: a displacement of the model as named flat tensors, and the codecs that write and read them.

A message is what is really sent: `Message.bytes` counts its tensors, and `Round` tells the reader whatever is public.
The form follows from the plans that the round executed: all numbers, those at the coordinates that the plans move, or
coefficients along the directions of their subspace. Positions are free where the server computes them itself;
elsewhere they are sent as 32-bit indices, or as a bitmap where it is shorter.

Guarantee:
    A message is a function of the client's noisy updates and of public values: post-processing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..plan.codec import Codec, Coordinates, Everything, Subspace, marked
from ..plan.defense import Context
from ..plan.families.public_subspaces import PublicSubspace
from ..plan.refusals import refuse_unknown
from .reach import reach_of, same
from .round import Round

MessageKind = Literal["dense", "values", "indexed", "bitmap", "coefficients"]
"""Form of a message: all numbers; numbers at public positions, with indices or with a bitmap; coefficients."""

OUTSIDE = 1e-3
"""Largest share of a displacement's norm outside of its subspace that may be float32 rounding (2e-6 is usual)."""


@dataclass(frozen=True, eq=False)
class Message:
    """A client's message.

    Attributes:
        kind: form of the displacement.
        tensors: flat tensors of the displacement, by name.
        extras: further flat tensors, such as the change of a control variate.
    """

    kind: MessageKind
    tensors: Mapping[str, Tensor]
    extras: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Number of bytes of all tensors, without names and framing."""
        return sum(part.numel() * part.element_size() for part in (*self.tensors.values(), *self.extras.values()))

    @property
    def finite(self) -> bool:
        """True if every number is finite."""
        parts = (*self.tensors.values(), *self.extras.values())
        return all(bool(torch.isfinite(part).all()) for part in parts if part.is_floating_point())


def dense_message(delta: Float[Tensor, " dim"]) -> Message:
    """Returns a message of all numbers: 4 bytes each in float32."""
    return Message("dense", {"values": delta})


def at_coordinates(delta: Float[Tensor, " dim"], kept: Int[Tensor, " size"], *, public: bool) -> Message:
    """Returns a message of the numbers at some coordinates.

    Args:
        delta: the displacement.
        kept: the coordinates, ascending.
        public: whether the server knows them; otherwise they are sent, by 4 bytes each or by a bit of a bitmap each.
    """
    values = delta.index_select(0, kept.to(delta.device))
    if public:
        return Message("values", {"values": values})
    if 4 * kept.numel() <= (len(delta) + 7) // 8:
        return Message("indexed", {"values": values, "indices": kept.to(torch.int32)})
    bits = np.zeros(len(delta), dtype=bool)
    bits[kept.cpu().numpy()] = True
    return Message("bitmap", {"values": values, "bitmap": torch.from_numpy(np.packbits(bits))})


def coefficients(delta: Float[Tensor, " dim"], subspace: Subspace) -> Message:
    """Returns a message of the coefficients of a displacement along directions that the server knows."""
    return Message("coefficients", {"values": subspace.encode(delta.unsqueeze(0)).squeeze(0)})


def decoded_message(message: Message, dim: int, known: Coordinates | Subspace | None = None) -> Float[Tensor, " dim"]:
    """Returns the displacement of a message.

    Args:
        message: any.
        dim: number of trained parameters.
        known: positions or directions of `values` and `coefficients`.

    Raises:
        ValueError: for a message whose positions or directions are not known.
    """
    values = message.tensors["values"]
    match message.kind:
        case "dense":
            return values
        case "indexed":
            kept = message.tensors["indices"].long()
        case "bitmap":
            bits = np.unpackbits(message.tensors["bitmap"].cpu().numpy(), count=dim).astype(bool)
            kept = marked(torch.from_numpy(bits))
        case _:
            if known is None or known.size != len(values):
                size = "none" if known is None else str(known.size)
                raise ValueError(f"a message of kind '{message.kind}' must match the server's positions, got {size}")
            return known.decode(values)
    return values.new_zeros(dim).scatter(0, kept.to(values.device), values)


def share_outside(delta: Float[Tensor, " dim"], subspace: Subspace) -> float:
    """Returns the share of a displacement's norm outside of a subspace, |delta - V V^T delta| / |delta|."""
    wide = delta.double().unsqueeze(0)
    length = float(wide.norm())
    return float((wide - subspace.project(wide)).norm()) / length if length else 0.0


def to_arrays(message: Message) -> dict[str, np.ndarray]:
    """Returns a message as arrays under names that `from_arrays` reads, for the record of another framework."""
    named = {f"{message.kind}/{name}": part for name, part in message.tensors.items()}
    named |= {f"extra/{name}": part for name, part in message.extras.items()}
    return {name: part.detach().cpu().numpy() for name, part in named.items()}


def from_arrays(arrays: Mapping[str, np.ndarray]) -> Message:
    """Returns the message of `to_arrays`.

    Raises:
        ValueError: for names of another form.
    """
    tensors = {name: torch.from_numpy(np.array(part)) for name, part in arrays.items()}
    kinds = {name.partition("/")[0] for name in tensors} - {"extra"}
    if len(kinds) != 1 or not all("/" in name for name in tensors):
        raise ValueError(f"arrays of a message must be named as by to_arrays, got {', '.join(sorted(arrays))}")
    parts = {name.partition("/")[2]: part for name, part in tensors.items() if not name.startswith("extra/")}
    extras = {name.partition("/")[2]: part for name, part in tensors.items() if name.startswith("extra/")}
    (kind,) = kinds
    refuse_unknown("kind", kind, ("dense", "values", "indexed", "bitmap", "coefficients"))
    return Message(kind, parts, extras)  # pyright: ignore[reportArgumentType]  checked above


@runtime_checkable
class Messages(Protocol):
    """Codec of a method's messages."""

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
                return at_coordinates(delta, movable.kept, public=public)
            return self._instead(delta, "it moves coordinates that the plans do not release")
        if isinstance(movable, Subspace):
            if not public:
                return self._instead(delta, "the server cannot compute the directions of the local steps")
            if not round.spanned:
                return self._instead(delta, "optimizer or client rule add other directions")
            if (share := share_outside(delta, movable)) > OUTSIDE:
                return self._instead(delta, f"{share:.2g} of its norm lies outside")
            return coefficients(delta, movable)
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
    """

    sparsity: float

    def __post_init__(self) -> None:
        if not 0 <= self.sparsity < 1:
            raise ValueError(f"sparsity must be in [0, 1), got {self.sparsity}")

    def prepare(self, context: Context) -> None:
        """Returns None: positions are sent."""

    def check(self, round: Round) -> None:
        """Accepts every round."""

    def encode(self, delta: Float[Tensor, " dim"], round: Round) -> Message:
        """Returns the ceil((1 - sparsity) dim) entries of largest absolute value; all of them at sparsity 0."""
        if not self.sparsity:
            return dense_message(delta)
        count = kept_count(len(delta), self.sparsity)
        return at_coordinates(delta, delta.abs().topk(count).indices.sort().values, public=False)

    def decode(self, message: Message, round: Round) -> Float[Tensor, " dim"]:
        """Returns the entries at their positions, zero elsewhere."""
        return decoded_message(message, round.context.dim)


def kept_count(dim: int, sparsity: float) -> int:
    """Returns the number of entries that a sparsity keeps, ceil((1 - sparsity) dim); rounding of the product apart."""
    return max(1, int(np.ceil((1 - sparsity) * dim * (1 - 1e-12))))


def with_extras(message: Message, extras: Mapping[str, Tensor]) -> Message:
    """Returns the message with further tensors, flattened."""
    return replace(message, extras={name: part.reshape(-1) for name, part in extras.items()}) if extras else message


@dataclass(frozen=True, kw_only=True)
class PublicCoefficients:
    """Messages of coefficients along public directions, whatever the local steps moved; the rest is lost.

    Attributes:
        subspace: source of the directions at the global model of a round.
    """

    subspace: PublicSubspace

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
