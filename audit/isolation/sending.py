"""From the process with the private data to that of the attack: views of targets as values and numbers of functions.

This direction is trusted, so it goes by pickle. Functions stay where they are, because they close over the private
data: what is sent is a number by which the attack asks for their values. Of a tensor its values are sent, and nothing
else that lies in its memory.
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
    """What an attack is to be given, or a function's answer, is nothing that another process can be sent."""


@dataclass(frozen=True)
class RemoteFunction:
    """A function that stays in the process of the private data, by number."""

    number: int


@dataclass(frozen=True)
class RemoteSteps:
    """Steps that are made when they are read, by the number of what reads them, and how many there are."""

    number: int
    count: int


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, buffers: list[Any], number: Callable[[Any], int]) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffers.append)
        self._number = number

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Tensor):
            told, content = flat(obj)
            return received_tensor, (told, pickle.PickleBuffer(content), obj.requires_grad)
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
    """The parts of a view, for the attack's process to make it of."""

    kind: type[Target]
    fields: dict[str, Any]
    withheld: dict[str, Any]


def packed_bytes(value: Any, number: Callable[[Any], int]) -> list[Any]:
    """A value as objects of bytes.

    Args:
        value: views, plain data and tensors.
        number: gives functions and steps, which stay here, their numbers.

    Raises:
        UnsendableError: something in it cannot be sent.
    """
    file, buffers = io.BytesIO(), []
    try:
        _Pickler(file, buffers, number).dump(value)
    except Exception as error:  # whatever the classes in it raise
        raise UnsendableError(f"{type(error).__name__}: {error}") from error
    return [file.getbuffer(), *buffers]


def received(blobs: list[bytearray]) -> Any:
    """The value that `packed_bytes` packed: for the attack's process alone, which trusts its sender."""
    return pickle.loads(blobs[0], buffers=blobs[1:])  # noqa: S301  from the process that started this one


def received_tensor(told: dict[str, Any], content: Any, requires_grad: bool) -> Tensor:
    """A tensor that was sent."""
    found = tensor(told, content if isinstance(content, bytearray) else bytearray(content))
    return found.requires_grad_() if requires_grad else found
