"""A client's message: a displacement of the model as named flat tensors, and the functions that write and read it.

A message is what is really sent: `Message.bytes` counts its tensors. It has all numbers, those at some coordinates, or
coefficients along directions. Positions that the server computes itself are free; others are sent as 32-bit indices, or
as a bitmap where it is shorter.

Guarantee:
    A message is a function of the client's noisy updates and of public values: post-processing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ...plan.codec import Coordinates, Subspace, marked
from ...plan.refusals import refuse_unknown

MessageKind = Literal["dense", "values", "indexed", "bitmap", "coefficients", "shares"]
"""Form of a message: all numbers; numbers at public positions, with indices or with a bitmap; coefficients; bounded
rows of a private average with a share of its noise."""


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
    return Message("coefficients", {"values": subspace.coordinates(delta)})


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
    refuse_unknown("kind", kind, get_args(MessageKind))
    return Message(kind, parts, extras)  # pyright: ignore[reportArgumentType]  checked above


def with_extras(message: Message, extras: Mapping[str, Tensor]) -> Message:
    """Returns the message with further tensors, flattened."""
    return replace(message, extras={name: part.reshape(-1) for name, part in extras.items()}) if extras else message
