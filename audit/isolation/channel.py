"""Messages between two processes: a JSON header and plain bytes after it; nothing received is executed.

A tensor is sent as its type, shape, order of dimensions and bytes, so that it arrives bit for bit, with its contiguity
preserved.
"""

from __future__ import annotations

import json
import math
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

MOST_HEADER = 2**24
"""Largest accepted header, bytes."""

MOST_BYTES = 2**33
"""Largest accepted content after a header, bytes."""

_LENGTHS = struct.Struct("!IQ")  # of the header, and of all bytes behind it
_AT_ONCE = 2**20  # bytes handed to the operating system
_DTYPES = {
    str(one).removeprefix("torch."): one
    for one in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.bool,
    )
}  # fmt: skip


class GarbledError(ValueError):
    """Malformed message from a channel."""


class Channel:
    """One end of a connection between two processes."""

    def __init__(self, connection: socket.socket) -> None:
        """Takes over a connected socket."""
        self._connection = connection

    def send(self, header: Mapping[str, Any], blobs: Sequence[Any] = (), seconds: float | None = None) -> None:
        """Sends a message: a JSON header, and bytes after it.

        Args:
            header: plain JSON; its key `blobs` is reserved for the channel.
            blobs: bytes-like objects.
            seconds: limit of each operation; None for no limit.

        Raises:
            TimeoutError: the other side does not read.
            OSError: the other side is gone.
        """
        views = [memoryview(blob).cast("B") for blob in blobs]
        text = json.dumps({**header, "blobs": [len(view) for view in views]}).encode()
        self._connection.settimeout(seconds)
        self._connection.sendall(_LENGTHS.pack(len(text), sum(map(len, views))) + text)
        for view in views:
            for start in range(0, len(view), _AT_ONCE):
                self._connection.sendall(view[start : start + _AT_ONCE])

    def receive(self, seconds: float | None = None) -> tuple[dict[str, Any], list[bytearray]]:
        """Receives the next message: its header and the bytes after it.

        Args:
            seconds: limit on the whole message; None for no limit.

        Raises:
            TimeoutError: it did not come in time.
            EOFError: the other side is gone.
            GarbledError: the message is malformed.
        """
        until = math.inf if seconds is None else time.monotonic() + seconds
        text_length, length = _LENGTHS.unpack(self._read(_LENGTHS.size, until))
        if text_length > MOST_HEADER or length > MOST_BYTES:
            raise GarbledError(f"a message must have at most {MOST_BYTES} bytes, got {text_length} and {length}")
        try:
            header = json.loads(self._read(text_length, until))
        except (ValueError, RecursionError) as error:
            raise GarbledError(f"a header must be JSON, got {type(error).__name__}") from error
        blobs = header.pop("blobs", None) if isinstance(header, dict) else None
        if not isinstance(blobs, list) or not all(type(size) is int and size >= 0 for size in blobs):
            raise GarbledError("a header must say how many bytes follow it")
        if sum(blobs) != length:
            raise GarbledError(f"as many bytes must follow as the header says, {sum(blobs)}, got {length}")
        return header, [self._read(size, until) for size in blobs]

    def _read(self, count: int, until: float) -> bytearray:
        buffer = bytearray(count)
        view = memoryview(buffer)
        while view:
            remaining = until - time.monotonic()
            if remaining <= 0:
                raise TimeoutError
            self._connection.settimeout(None if math.isinf(remaining) else remaining)
            if not (received := self._connection.recv_into(view, min(len(view), _AT_ONCE))):
                raise EOFError
            view = view[received:]
        return buffer


def flat(values: Tensor) -> tuple[dict[str, Any], Any]:
    """Splits a tensor into its description, plain JSON, and a bytes-like object of its values.

    Raises:
        TypeError: its class, type or layout has no plain bytes.
    """
    dtype = str(values.dtype).removeprefix("torch.")
    if type(values) not in (Tensor, nn.Parameter) or dtype not in _DTYPES or values.layout != torch.strided:
        raise TypeError(f"a plain dense tensor of numbers is needed, got {type(values).__name__} of {values.dtype}")
    bare = values.detach().resolve_neg()
    order = list(range(bare.ndim))
    if all(bare.stride()):  # a dimension of stride 0 repeats a value and has no place in the order
        order.sort(key=lambda dimension: -bare.stride(dimension))
    content = bare.permute(order).contiguous().cpu()
    description = {"dtype": dtype, "shape": list(content.shape), "order": order, "device": str(values.device)}
    return description, content.reshape(-1).view(torch.uint8).numpy()


def tensor(description: Any, content: bytearray) -> Tensor:
    """Rebuilds the tensor that `flat` described.

    Raises:
        GarbledError: the description is malformed, or the number of bytes differs from it.
    """
    try:
        dtype, shape, order = _DTYPES[description["dtype"]], description["shape"], description["order"]
        device = str(description["device"])
        if not all(type(number) is int and number >= 0 for number in [*shape, *order]) or sorted(order) != [
            *range(len(shape))
        ]:
            raise ValueError("shape or order of dimensions")
        if math.prod(shape) * dtype.itemsize != len(content):
            raise ValueError(f"{len(content)} bytes")
        values = torch.empty(math.prod(shape), dtype=dtype)  # aligned as tensors are, which kernels may rely on
        if content:
            values.copy_(torch.frombuffer(content, dtype=dtype))
        values = values.view(shape).permute([order.index(dimension) for dimension in range(len(order))])
        return values if device == "cpu" else values.to(device)
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        raise GarbledError(f"a tensor must be described as it is, got {error}") from error
