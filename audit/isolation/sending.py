"""Encoding of narrowed targets for an attack's process: their values, and a number for each of their functions.

The attack's process trusts this sender, so the encoding is pickle. Functions stay here, because they close over the
private data; the attack requests their values by number. A tensor is sent as its values, without the rest of its
memory.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from leakbench.attacks.core import Steps, Target, parts_of

from .channel import flat, tensor


class UnsendableError(TypeError):
    """Part of a target, or a function's answer, cannot be sent to another process."""


@dataclass(frozen=True)
class RemoteFunction:
    """Function that stays in the process with the private data, by number."""

    number: int


@dataclass(frozen=True)
class RemoteSteps:
    """Sequence of steps that are read one by one: the number by which they are requested, and how many there are."""

    number: int
    count: int


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, buffers: list[Any], number: Callable[[Any], int]) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffers.append)
        self._number = number

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Tensor):
            description, content = flat(obj)
            return received_tensor, (description, pickle.PickleBuffer(content), obj.requires_grad)
        if isinstance(obj, Steps):
            return RemoteSteps, (self._number(obj), len(obj))
        if isinstance(obj, Target):
            kind, shown, withheld = parts_of(obj)
            fields = {name: self._shown(value) for name, value in shown.items()}
            return ReceivedView, (kind, fields, withheld)
        return NotImplemented

    def _shown(self, value: Any) -> Any:
        return RemoteFunction(self._number(value)) if callable(value) and not isinstance(value, type) else value


@dataclass(frozen=True)
class ReceivedView:
    """Parts of a narrowed target, from which the attack's process rebuilds it."""

    kind: type[Target]
    fields: dict[str, Any]
    withheld: dict[str, Any]


def packed_bytes(value: Any, number: Callable[[Any], int]) -> list[Any]:
    """Packs a value into bytes-like objects.

    Args:
        value: narrowed targets, plain data and tensors.
        number: assigns numbers to functions and steps, which stay here.

    Raises:
        UnsendableError: part of it cannot be sent.
    """
    file, buffers = io.BytesIO(), []
    try:
        _Pickler(file, buffers, number).dump(value)
    except Exception as error:  # classes in it may raise anything
        raise UnsendableError(f"{type(error).__name__}: {error}") from error
    # Not `getbuffer`: Python crashes if it collects a cycle that holds a BytesIO and a view of it (CPython 3.12, 3.13).
    return [file.getvalue(), *buffers]


def received(blobs: list[bytearray]) -> Any:
    """Unpacks a value of `packed_bytes`; only for the attack's process, which trusts its sender."""
    return pickle.loads(blobs[0], buffers=blobs[1:])  # noqa: S301  from the process that started this one


def received_tensor(description: dict[str, Any], content: Any, requires_grad: bool) -> Tensor:
    """Rebuilds a tensor that was sent."""
    rebuilt = tensor(description, content if isinstance(content, bytearray) else bytearray(content))
    return rebuilt.requires_grad_() if requires_grad else rebuilt
