"""Target in an attack's own process: values, and functions that call the process with the private data.

The functions can be differentiated to any order as if they were computed here, because each product with a Jacobian is
requested in the same way.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from threading import RLock
from typing import Any

import torch
from torch import Tensor, nn

from leakbench.attacks.core import AccessError, NotApplicable, Steps, Target, view_of

from .channel import Channel, flat
from .sending import ReceivedView, RemoteFunction, RemoteSteps, received
from .structured import changed, leaves

_ERRORS = {one.__name__: one for one in (AccessError, NotApplicable, ValueError, TypeError, RuntimeError, IndexError)}
_ERRORS |= {"OutOfMemoryError": torch.OutOfMemoryError, "NotImplementedError": NotImplementedError}


class Questions:
    """Sends requests over a channel, one at a time."""

    def __init__(self, channel: Channel) -> None:
        """Starts closed: requests are allowed only while an attack runs."""
        self._channel = channel
        self._turn = RLock()
        self._freed: list[int] = []
        self.open = False

    def ask(
        self, header: Mapping[str, Any], tensors: tuple[Tensor, ...] = ()
    ) -> tuple[dict[str, Any], list[bytearray]]:
        """Sends a request about some tensors and returns the answer.

        Raises:
            AccessError: no attack is running.
            ValueError: raised by the function in the other process, as may be other exceptions.
        """
        with self._turn:
            if not self.open:
                raise AccessError("the target is gone: an attack may use what it was given until it returns")
            flattened = [flat(tensor) for tensor in tensors]
            freed, self._freed = self._freed, []
            descriptions = [description for description, _ in flattened]
            self._channel.send(
                {**header, "tensors": descriptions, "freed": freed}, [content for _, content in flattened]
            )
            answer, blobs = self._channel.receive()
        if "error" in answer:
            raise _ERRORS.get(answer["error"], RuntimeError)(answer["words"])
        return answer, blobs

    def target(self, value: Any) -> Any:
        """Replaces the numbers of functions and steps in a received value by functions that call the other process."""
        if isinstance(value, ReceivedView):
            return self.view(value)
        if isinstance(value, RemoteFunction):
            return self._function(value.number)
        if isinstance(value, RemoteSteps):
            return self._steps(value)
        return value

    def view(self, parts: ReceivedView) -> Target:
        """Rebuilds a narrowed target from its received parts."""
        return view_of(parts.kind, {name: self.target(field) for name, field in parts.fields.items()}, parts.withheld)

    def _function(self, number: int) -> Callable[..., Any]:
        def call(*arguments: Any, **settings: Any) -> Any:
            tensors: list[Tensor] = []
            header = {
                "ask": "call",
                "of": number,
                "arguments": [_argument_header(argument, tensors) for argument in arguments],
                "named": {name: _argument_header(setting, tensors) for name, setting in settings.items()},
            }
            return _Question(self, header, tensors).value()

        weakref.finalize(call, self._note_freed, number).atexit = False
        return call

    def _steps(self, steps: RemoteSteps) -> Steps:
        def read() -> Iterator[Any]:
            number = self.ask({"ask": "step", "of": steps.number})[0]["number"]
            try:
                while True:
                    answer, blobs = self.ask({"ask": "step", "of": number})
                    if not answer["more"]:
                        return
                    yield self.target(received(blobs))
            finally:
                self._note_freed(number)

        count = steps.count
        return Steps(read, lambda: count)

    def _note_freed(self, number: int) -> None:
        self._freed.append(number)


class _Graph:
    """Autograd graph in the other process, which is freed when nothing here refers to it."""

    def __init__(self, questions: Questions, number: int) -> None:
        self.number = number
        weakref.finalize(self, questions._note_freed, number).atexit = False


class _Question:
    """Call of a function of tensors in the other process."""

    def __init__(self, questions: Questions, header: Mapping[str, Any], tensors: list[Tensor], known: int = 0) -> None:
        # The first `known` tensors are inputs of the graph, which the other process has already.
        self._questions, self._header, self._tensors, self._known = questions, header, tensors, known
        self._needs = [tensor.requires_grad for tensor in tensors]
        self._grad = torch.is_grad_enabled()
        self._value: Any = None
        self._graph: _Graph | None = None
        self.differentiable: list[bool] = []

    def value(self) -> Any:
        """Returns the function's value, differentiable if it is differentiable there."""
        if not (self._grad and any(self._needs)):
            self.put(*self._tensors)
            return self._value
        outputs = iter(_RemoteCall.apply(self, *self._tensors))
        return changed(self._value, lambda _: next(outputs))

    def put(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Sends the request, and returns the tensors of the answer."""
        needs = [self._grad and needed for needed in self._needs[self._known :]]
        answer, blobs = self._questions.ask(
            {**self._header, "grad": self._grad, "needs": needs}, tensors[self._known :]
        )
        self._value = self._questions.target(received(blobs))
        self._graph = None if answer["graph"] is None else _Graph(self._questions, answer["graph"])
        self.differentiable = answer["differentiable"]
        return tuple(leaves(self._value))

    def products(self, tensors: tuple[Tensor, ...], vectors: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        """Returns the products of vectors, one per output or None, with the Jacobian in each of the tensors."""
        places = [place for place, vector in enumerate(vectors) if vector is not None and self.differentiable[place]]
        if self._graph is None or not places:
            return [None] * len(tensors)
        inputs = [tensor for tensor, needed in zip(tensors, self._needs, strict=True) if needed]
        present = [vector for place in places if (vector := vectors[place]) is not None]
        header = {"ask": "product", "of": self._graph.number, "which": places}
        gradients = iter(_Question(self._questions, header, [*inputs, *present], known=len(inputs)).value())
        return [next(gradients) if needed else None for needed in self._needs]


class _RemoteCall(torch.autograd.Function):
    @staticmethod
    def forward(question: _Question, *tensors: Tensor) -> tuple[Tensor, ...]:
        return question.put(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.question = inputs[0]
        ctx.save_for_backward(*inputs[1:])
        ctx.set_materialize_grads(False)
        fixed = [tensor for tensor, moves in zip(output, ctx.question.differentiable, strict=True) if not moves]
        ctx.mark_non_differentiable(*fixed)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, *ctx.question.products(ctx.saved_tensors, grads))


def _argument_header(argument: Any, tensors: list[Tensor]) -> dict[str, Any]:
    """Encodes an argument for a header; a tensor is appended to the list of those that follow it."""
    if type(argument) in (Tensor, nn.Parameter):
        tensors.append(argument)
        return {"tensor": len(tensors) - 1}
    if argument is None:
        return {"none": True}
    if isinstance(argument, Mapping) and all(type(name) is str for name in argument):
        return {"named": [[name, _argument_header(part, tensors)] for name, part in argument.items()]}
    if type(argument) is slice:
        ends = [argument.start, argument.stop, argument.step]
        if all(type(end) in (int, type(None)) for end in ends):
            return {"slice": ends}
    raise TypeError(f"a target's functions take plain tensors, or such by name, got {type(argument).__name__}")
