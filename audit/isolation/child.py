"""Process of an attack: imports its code, sends its declaration, and runs it on the targets that it receives."""

from __future__ import annotations

import os
import shutil
import socket
import threading
import traceback
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from leakbench.attacks.core import Attack

from ..catalog import methods as catalog
from .channel import Channel, flat
from .description import described
from .questions import Questions
from .sending import received

_MOST_FRAMES = 50


def serve(name: str, number: int) -> None:
    """Answers requests until the parent process ends.

    Args:
        name: of the attack, or its path.
        number: file descriptor of the socket.
    """
    _end_with_parent()
    channel = Channel(socket.socket(fileno=number))
    questions = Questions(channel)
    channel.send({"ready": True})
    attack = None
    while True:
        try:
            header, blobs = channel.receive()
        except EOFError:
            return
        try:
            attack = catalog.attack_here(name) if attack is None else attack
            if header["ask"] == "describe":
                channel.send({"told": described(attack)})
                continue
            questions.open = True
            answer, contents = _ran(attack, questions, blobs, header)
        # Exceptions of third-party code are reported; `sys.exit` would end this process without a message.
        except (Exception, SystemExit) as error:
            answer, contents = _failure(error), []
        questions.open = False
        channel.send(answer, contents)


def _end_with_parent() -> None:
    """Ends this process, and removes its folder, when the pipe that the parent holds open closes."""
    parent_pipe, folder = os.dup(0), Path.cwd()
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)

    def wait() -> None:
        os.read(parent_pipe, 1)
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _ran(
    attack: Attack[Any], questions: Questions, blobs: list[bytearray], header: Mapping[str, Any]
) -> tuple[dict[str, Any], list[Any]]:
    torch.set_num_threads(header["threads"])
    torch.set_default_dtype(getattr(torch, header["dtype"]))
    torch.set_float32_matmul_precision(header["precision"])
    torch.use_deterministic_algorithms(header["deterministic"], warn_only=header["warn_only"])
    sent = received(blobs)
    generator = torch.Generator()
    generator.set_state(sent["generator"])
    result = attack.on_view(questions.target(sent["target"]), generator, sent["settings"])
    contents: list[tuple[dict[str, Any], Any]] = []
    values = {}
    if is_dataclass(result) and not isinstance(result, type):
        values = {field.name: _value(getattr(result, field.name), contents) for field in fields(result)}
    encoded = {"type": type(result).__name__, "module": type(result).__module__, "values": values}
    contents.append(flat(generator.get_state()))
    return {"result": encoded, "tensors": [description for description, _ in contents]}, [
        content for _, content in contents
    ]


def _value(value: Any, contents: list[tuple[dict[str, Any], Any]]) -> dict[str, Any]:
    """Encodes a field of a result: a tensor by its index, a plain value by itself, any other object by its class."""
    if type(value) in (Tensor, nn.Parameter):
        contents.append(flat(value))
        return {"tensor": len(contents) - 1}
    if isinstance(value, bool | int | float | str) or value is None:
        return {"value": value}
    return {"class": type(value).__name__}


def _failure(error: BaseException) -> dict[str, Any]:
    """Describes an exception by the names of its classes, its message, and its traceback."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    return {
        "failed": [base.__name__ for base in type(error).__mro__],
        "words": str(error),
        "frames": [[frame.filename, frame.lineno or 0, frame.name] for frame in frames[-_MOST_FRAMES:]],
    }
