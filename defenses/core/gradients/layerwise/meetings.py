"""Finds how values that all entries of a batch share meet the batch: on synthetic examples, function by function.

Two passes over batches of two sizes show which dimensions of which function's output grow with the batch. In a third
pass every function that a shared value reaches and whose output grows is tried: with one value for every second
example, and another for the others, each example's part of the output must be what the function gives where all have
that example's value. The ways in which copies may be put in the value's place are tried in a fixed order; a function
for which none gives that is refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass
from torch.overrides import TorchFunctionMode

from ..engines.interface import Unsupported
from .shared_values import (
    FORM,
    BatchDimension,
    Meeting,
    SharedPass,
    SharedValue,
    meet,
    plainly,
    replaced,
    tensors_among,
)

_AGREES = 1e-9  # of the largest entry of the output
# In the names of functions that `vmap` turns into convolutions with a group for each entry, slower than `torch.func`.
_CONVOLUTIONS = "conv"


@dataclass
class _FunctionCall:
    """Shapes of a function's arguments and outputs in a pass."""

    function: str
    arguments: tuple[torch.Size, ...]
    outputs: tuple[torch.Size, ...] = ()


class CallShapes(TorchFunctionMode):
    """Records the shapes of all functions of a pass, and which of some tensors they are called on.

    Attributes:
        calls: so far, by number.
        number: of the function that is being called.
        on: names of the watched tensors that a function outside of the known layers was called on.
        inside: number of known layers that are being called.
    """

    def __init__(self, watched: Mapping[int, str] | None = None) -> None:
        """Takes the names of tensors to watch, by identity."""
        super().__init__()
        self.calls: list[_FunctionCall] = []
        self.number = -1
        self.on: list[str] = []
        self.inside = 0
        self._watched = watched or {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Notes the shapes, and calls the function unchanged."""
        kwargs = kwargs or {}
        with DisableTorchFunctionSubclass():
            tensors = list(tensors_among((args, kwargs)))
            call = _FunctionCall(func.__name__, tuple(tensor.shape for tensor in tensors))
        before, self.number = self.number, len(self.calls)
        self.calls.append(call)
        try:
            output = func(*args, **kwargs)
        finally:
            self.number = before
        with DisableTorchFunctionSubclass():
            call.outputs = tuple(tensor.shape for tensor in tensors_among(output))
        if not self.inside and self._watched and (call.outputs or func.__name__ not in FORM):
            self.on += [self._watched[id(tensor)] for tensor in tensors if id(tensor) in self._watched]
        return output


class TrialPass(SharedPass):
    """A pass over synthetic examples that finds the meetings.

    Attributes:
        meetings: those so far, in order.
    """

    def __init__(
        self,
        sizes: tuple[int, int],
        calls: Mapping[int, torch.Size],
        shapes: tuple[Sequence[_FunctionCall], Sequence[_FunctionCall]],
        counter: CallShapes,
    ) -> None:
        """Takes the sizes of two batches, of which this pass has the first, and the shapes of their functions.

        Args:
            sizes: numbers of examples.
            calls: calls of layers that are made once for all entries.
            shapes: of all functions of passes over the two batches.
            counter: of this pass.
        """
        super().__init__(sizes[0], (), calls)
        self.meetings: list[Meeting] = []
        self._sizes, self._shapes, self._counter = sizes, shapes, counter
        self._generator = torch.Generator().manual_seed(3)

    def meeting(self, number: int, func: Any, args: Any, kwargs: Any) -> Meeting:
        """Finds how copies take the place of shared values in a function.

        Raises:
            Unsupported: if they cannot.
        """
        place = self._counter.number
        if any(place >= len(calls) or calls[place].function != func.__name__ for calls in self._shapes):
            raise Unsupported(f"{func.__name__} is not called for every number of examples")
        first, second = (calls[place] for calls in self._shapes)
        if len(first.arguments) > 1 and not first.outputs:
            raise Unsupported(f"{func.__name__} writes it into another tensor")
        sides = _sides(first.outputs, second.outputs, self._sizes)
        if not any(sides):
            meeting = Meeting(func.__name__, "shared")
        elif None in sides or len({(side, len(shape)) for side, shape in zip(sides, first.outputs, strict=True)}) > 1:
            raise Unsupported(f"{func.__name__} has outputs of which some are no example's")
        else:
            meeting = self._tried(func, args, kwargs, first, second, sides[0])
        self.meetings.append(meeting)
        return meeting

    def _tried(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        first: _FunctionCall,
        second: _FunctionCall,
        side: BatchDimension | None,
    ) -> Meeting:
        assert side is not None  # noqa: S101  for the type checker
        odd = torch.arange(self.entries) % 2 == 1
        values = {id(v): plainly(v).detach() for v in tensors_among((args, kwargs)) if isinstance(v, SharedValue)}
        moved = {key: value + _step(value, self._generator) for key, value in values.items()}

        def outcome(at: Mapping[int, Tensor]) -> list[Tensor]:
            def change(value: Tensor) -> Tensor:
                return at[id(value)] if id(value) in at else value.detach().clone()

            return list(tensors_among(func(*replaced(args, change), **replaced(kwargs, change))))

        def copied(value: SharedValue) -> Tensor:
            value_moved, value_plain = moved[id(value)], values[id(value)]
            return torch.where(odd.to(value_plain.device).view(-1, *[1] * value_plain.dim()), value_moved, value_plain)

        with torch.no_grad(), DisableTorchFunctionSubclass():
            plain, changed = outcome(values), outcome(moved)
            for candidate in self._candidates(func.__name__, first, second, side, len(values)):
                where = _of_entries(odd, candidate.side, plain[0])
                expected = [torch.where(where, b, a) for a, b in zip(plain, changed, strict=True)]
                own = replaced((args, kwargs), lambda v: v if isinstance(v, SharedValue) else v.detach().clone())
                outputs = _unless_it_fails(partial(meet, candidate, func, *own, self.entries, copied))
                if len(outputs) == len(expected) and all(map(_agree, outputs, expected)):
                    return candidate
        raise Unsupported(f"copies for each example cannot take its place in {func.__name__}")

    def _candidates(
        self, name: str, first: _FunctionCall, second: _FunctionCall, side: BatchDimension, values: int
    ) -> Iterator[Meeting]:
        """Yields the ways that are tried."""
        rank = len(first.outputs[0])
        if values == 1 and len(first.arguments) == 1 and len(first.outputs) == 1:
            yield Meeting(name, "spread", rank, side)
        yield Meeting(name, "broadcast", rank, side)
        try:
            sides = _sides(first.arguments, second.arguments, self._sizes)
        except Unsupported:
            return
        if _CONVOLUTIONS not in name:
            yield Meeting(name, "mapped", rank, side, tuple(sides))


def _unless_it_fails(call: Callable[[], Any]) -> list[Tensor]:
    """Returns the tensors that a function gives; none if it fails."""
    try:
        with warnings.catch_warnings():
            # Warned of where `vmap` would call the function for one entry after another.
            warnings.filterwarnings("error", "There is a performance drop", UserWarning)
            return list(tensors_among(call()))
    except Exception:  # anything that a function raises on arguments of other shapes
        return []


def _sides(
    first: Sequence[torch.Size], second: Sequence[torch.Size], sizes: tuple[int, int]
) -> list[BatchDimension | None]:
    """Returns the dimension of each tensor that grows with the batch; None where none does.

    Raises:
        Unsupported: for a tensor with several, or one that grows otherwise.
    """
    sides: list[BatchDimension | None] = []
    if len(first) != len(second):
        raise Unsupported("a function has other outputs for another number of examples")
    for in_first, in_second in zip(first, second, strict=True):
        growing = [dim for dim, pair in enumerate(zip(in_first, in_second, strict=False)) if pair[0] != pair[1]]
        if len(in_first) != len(in_second) or len(growing) > 1:
            raise Unsupported(f"a tensor of shape {list(in_first)} is of shape {list(in_second)} for other examples")
        if not growing:
            sides.append(None)
            continue
        dim = growing[0]
        fold, remainder = divmod(in_first[dim], sizes[0])
        if remainder or fold * sizes[1] != in_second[dim] or not fold:
            raise Unsupported(f"a tensor of shape {list(in_first)} for {sizes[0]} examples is not theirs one by one")
        sides.append(BatchDimension(dim, fold))
    return sides


def _of_entries(odd: Tensor, side: BatchDimension, like: Tensor) -> Tensor:
    """Returns a mask of entries along a dimension of a tensor."""
    mask = odd.repeat_interleave(side.fold).to(like.device)
    return mask.view(*[-1 if dim == side.dim else 1 for dim in range(like.dim())])


def _step(value: Tensor, generator: torch.Generator) -> Tensor:
    """Returns a random step of a value's size."""
    if not value.is_floating_point():
        return torch.zeros_like(value)
    step = torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value)
    return step * (float(value.square().mean().sqrt()) or 1.0)


def _agree(computed: Tensor, expected: Tensor) -> bool:
    if computed.shape != expected.shape or computed.dtype != expected.dtype:
        return False
    if not computed.is_floating_point():
        return torch.equal(computed, expected)
    return torch.allclose(computed, expected, rtol=0.0, atol=_AGREES * _largest(expected), equal_nan=True)


def _largest(values: Tensor) -> float:
    finite = values[values.isfinite()].abs()
    return float(finite.max()) if finite.numel() else 0.0
