"""Answers to a running attack's calls of the target's functions, computed in the process with the private data.

An attack that differentiates through a function sends two requests, for its value and for the product of a vector with
its Jacobian. The autograd graph is kept in this process between them. A product may be differentiated again in the same
way, to any order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from leakbench.attacks.core import Steps

from .channel import GarbledError, tensor
from .sending import packed_bytes
from .structured import changed, leaves


class Respondent:
    """Answers an attack's requests about objects of this process, which it names by numbers that are never reused."""

    _numbers = iter(range(2**62))

    def __init__(self) -> None:
        """Starts without any object."""
        self._known: dict[int, Any] = {}

    def number(self, value: Any) -> int:
        """Assigns a number to a function, a sequence of steps, its iterator, or an autograd graph."""
        number = next(self._numbers)
        self._known[number] = value
        return number

    def packed(self, value: Any) -> list[Any]:
        """Packs a value into bytes-like objects, with numbers for its functions.

        Raises:
            UnsendableError: part of it cannot be sent.
        """
        return packed_bytes(value, self.number)

    def answer(self, header: dict[str, Any], blobs: list[bytearray]) -> tuple[dict[str, Any], list[Any]]:
        """Computes the answer to a request: a header, and bytes-like objects that follow it.

        Raises:
            GarbledError: the request is malformed.
            UnsendableError: its answer cannot be sent.
        """
        for number in _integers(header.get("freed", [])):
            self._known.pop(number, None)
        descriptions = header.get("tensors", [])
        if not isinstance(descriptions, list) or len(descriptions) != len(blobs):
            raise GarbledError("as many tensors must follow as the header describes")
        tensors = [tensor(description, blob) for description, blob in zip(descriptions, blobs, strict=True)]
        for operand, needed in zip(tensors, _flags(header.get("needs"), len(tensors)), strict=True):
            if needed:
                operand.requires_grad_()
        ask = {"call": self._called, "product": self._product, "step": self._step, "free": self._freed}
        if header.get("ask") not in ask:
            raise GarbledError(f"a question must be one of {', '.join(ask)}, got {str(header.get('ask'))[:40]!r}")
        return ask[header["ask"]](header, tensors)

    def _called(self, header: dict[str, Any], tensors: list[Tensor]) -> tuple[dict[str, Any], list[Any]]:
        function = self._indexed(header, Callable)
        arguments = [_argument(argument, tensors) for argument in _list(header, "arguments")]
        named = header.get("named", {})
        if not isinstance(named, dict):
            raise GarbledError("named arguments must be a mapping")
        settings = {name: _argument(argument, tensors) for name, argument in named.items()}
        with torch.set_grad_enabled(bool(header.get("grad"))):
            value = function(*arguments, **settings)
        return self._answer_header(value, [tensor for tensor in tensors if tensor.requires_grad])

    def _product(self, header: dict[str, Any], vectors: list[Tensor]) -> tuple[dict[str, Any], list[Any]]:
        inputs, outputs = self._indexed(header, tuple)
        places = _integers(_list(header, "which"))
        if len(places) != len(vectors) or not all(0 <= place < len(outputs) for place in places):
            raise GarbledError("a product must name outputs of its function, one a vector")
        create = bool(header.get("grad"))
        gradients = torch.autograd.grad(
            [outputs[place] for place in places],
            inputs,
            vectors,
            retain_graph=True,
            create_graph=create,
            allow_unused=True,
        )
        further = [*inputs, *(vector for vector in vectors if vector.requires_grad)]
        return self._answer_header(list(gradients), further if create else [])

    def _step(self, header: dict[str, Any], _: list[Tensor]) -> tuple[dict[str, Any], list[Any]]:
        steps = self._indexed(header, Steps | Iterator)
        if isinstance(steps, Steps):
            return {"number": self.number(iter(steps))}, []
        step = next(steps, None)
        return {"more": step is not None}, [] if step is None else self.packed(step)

    def _freed(self, _: dict[str, Any], __: list[Tensor]) -> tuple[dict[str, Any], list[Any]]:
        return {}, []

    def _answer_header(self, value: Any, inputs: list[Tensor]) -> tuple[dict[str, Any], list[Any]]:
        """Returns a value, with the number of the graph behind it if it can be differentiated."""
        outputs = list(leaves(value))
        differentiable = [bool(inputs) and output.requires_grad for output in outputs]
        graph = self.number((inputs, outputs)) if any(differentiable) else None
        blobs = self.packed(changed(value, Tensor.detach))
        return {"graph": graph, "differentiable": differentiable}, blobs

    def _indexed(self, header: dict[str, Any], kind: Any) -> Any:
        number = header.get("of")
        known = self._known.get(number) if type(number) is int else None
        if not isinstance(known, kind):
            raise ReferenceError("the target is gone: an attack may use what it was given until it returns")
        return known


def _argument(argument: Any, tensors: list[Tensor]) -> Any:
    if isinstance(argument, dict) and type(place := argument.get("tensor")) is int and 0 <= place < len(tensors):
        return tensors[place]
    if argument == {"none": True}:
        return None
    named = argument.get("named") if isinstance(argument, dict) else None
    if isinstance(named, list):
        return _by_name(named, tensors)
    ends = argument.get("slice") if isinstance(argument, dict) else None
    if isinstance(ends, list) and len(ends) == 3 and all(type(end) in (int, type(None)) for end in ends):
        return slice(*ends)
    raise GarbledError("an argument must be a tensor, a slice, tensors by name, or nothing")


def _by_name(named: list[Any], tensors: list[Tensor]) -> dict[str, Tensor]:
    if not all(isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str) for pair in named):
        raise GarbledError("tensors by name must be pairs of a name and a tensor")
    if not all(isinstance(part, dict) and "tensor" in part for _, part in named):  # and no mapping in a mapping
        raise GarbledError("tensors by name must be tensors")
    return {name: _argument(part, tensors) for name, part in named}


def _list(header: dict[str, Any], key: str) -> list[Any]:
    if not isinstance(entries := header.get(key), list):
        raise GarbledError(f"{key} must be a list")
    return entries


def _integers(values: Any) -> list[int]:
    if not isinstance(values, list) or not all(type(number) is int for number in values):
        raise GarbledError("numbers must be integers")
    return values


def _flags(values: Any, count: int) -> list[bool]:
    flags = [False] * count if values is None else values
    if not isinstance(flags, list) or len(flags) != count or not all(type(flag) is bool for flag in flags):
        raise GarbledError("needs must be true or false, one a tensor")
    return flags
