"""Tensors that all entries of a batch share, in a pass: parameters of no known layer, and what is computed from them.

A parameter may be reshaped, indexed, interpolated or exponentiated before it meets the batch, as the table of relative
positions in Swin or the scale of ConvNeXt's blocks. A `SharedValue` passes through such functions, which are recorded
in a graph of their own. The function in which it meets the batch (`Meeting`) gets a copy for each entry instead, whose
derivative is the entry's own; the graph then carries these derivatives back to the parameters, for all entries at once.
A known layer that is called without the batch, as the positions' embedding for `arange(length)[None]`, begins another
part of that graph: what arrives at its output is the layer's derivative for each entry.

Which functions are meetings, and how copies take a value's place there, is found on synthetic examples
(`meetings.py`), and followed here by number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass  # what `Tensor.__torch_function__` itself uses
from torch.nn import functional

from ..engines.interface import Unsupported

Receiver = Callable[[Tensor], None]
"""Takes the derivatives [entries, *shape] by a value's copies."""

# Questions about a tensor's form; they are not numbered, because modes ask them in some passes only.
FORM: frozenset[str] = frozenset(
    {"__get__", "size", "dim", "ndimension", "numel", "nelement", "__len__", "stride", "storage_offset", "dim_order"}
    | {"is_contiguous", "is_floating_point", "is_complex", "element_size", "get_device", "type", "__hash__", "__repr__"}
)


@dataclass(frozen=True)
class BatchDimension:
    """A dimension that grows with the batch.

    Attributes:
        dim: the dimension.
        fold: its size for one entry, such as the windows of an image, which are adjacent.
    """

    dim: int
    fold: int = 1


@dataclass(frozen=True)
class Meeting:
    """A function that shared values reach, and the way in which copies take their place in it.

    Attributes:
        function: its name.
        kind: "shared" for a function of shared values alone; "broadcast" if the copies' dimension for entries is put
            where the output has it; "spread" if the output repeats the value for each entry; "mapped" if the function
            is called for each entry by itself, by `vmap`.
        rank: number of dimensions of the output.
        side: the output's.
        sides: those of the tensors among the arguments, in order, if the function is mapped.
    """

    function: str
    kind: str
    rank: int = 0
    side: BatchDimension = BatchDimension(0)
    sides: tuple[BatchDimension | None, ...] = ()


@dataclass(eq=False)
class Copies:
    """A value's copies in a pass.

    Attributes:
        value: the value in its own graph.
        leaf: the copies [entries, *shape], a leaf of the batch's graph.
        source: number of the parameter or call that the value is, unchanged; None for a computed one.
        derivative: by the copies, once the backward pass has reached them.
    """

    value: Tensor
    leaf: Tensor
    source: int | None
    derivative: Tensor | None = None

    def meet(self, derivative: Tensor | None) -> None:
        """Takes the derivative; None if the losses do not depend on the copies."""
        self.derivative = derivative


class SharedValue(Tensor):
    """A tensor that all entries of a batch share."""

    _owner: SharedPass
    _source: int | None
    _of_layer: bool
    _copies: Copies | None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Hands a function of such tensors to the pass."""
        kwargs = kwargs or {}
        if func.__name__ in FORM:
            with DisableTorchFunctionSubclass():
                answer = func(*args, **kwargs)
            if not isinstance(answer, Tensor):
                return answer
            return next(_shared((args, kwargs)))._owner.shared(answer)
        return next(_shared((args, kwargs)))._owner.called(func, args, kwargs)


class SharedPass:
    """A pass over a batch in which values are shared: the numbers of its calls, and its leaves.

    Attributes:
        leaves: copies so far, leaves of the batch's graph.
        inside: number of known layers that are being called: they read their own parameters as they are.
    """

    def __init__(self, entries: int, meetings: Sequence[Meeting], calls: Mapping[int, torch.Size]) -> None:
        """Takes what was found about the model.

        Args:
            entries: of the batch.
            meetings: of the functions that shared values reach, in order.
            calls: by number of a layer's call, the input's shape in calls that are made once for all entries.
        """
        self.entries, self._meetings, self._layer_calls = entries, meetings, calls
        self.leaves: list[Copies] = []
        self.inside = 0
        self._numbers = [0, 0]
        self._sources: list[tuple[Tensor, Receiver]] = []

    def parameter(self, value: Tensor, receive: Receiver, *, of_layer: bool = False) -> SharedValue:
        """Returns a parameter as a shared value.

        Args:
            value: the parameter.
            receive: gets the derivatives by it for each entry, after the pass; without those by known layers.
            of_layer: whether a known layer holds it.
        """
        return self._begun(value.detach().requires_grad_(), receive, of_layer=of_layer)

    @contextmanager
    def layer(self) -> Iterator[None]:
        """Context of a call of a known layer."""
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1

    def of_layer(self, entering: Tensor, output: Tensor, receive: Receiver) -> Tensor | None:
        """Returns the output of a known layer as a shared value; None if the call is one for the batch.

        Args:
            entering: the layer's input.
            output: its output.
            receive: gets the derivatives by the output for each entry, after the pass.
        """
        number = self._numbers[1]
        self._numbers[1] += 1
        if isinstance(entering, SharedValue) or self._layer_calls.get(number) == entering.shape:
            plain = plainly(output)
            # Cloned, so that it may be changed in place.
            return self._begun(plain if plain.requires_grad else plain.detach().requires_grad_(), receive, clone=True)
        return None

    def _begun(self, tap: Tensor, receive: Receiver, *, clone: bool = False, of_layer: bool = False) -> SharedValue:
        source = len(self._sources) if tap.is_leaf else None
        self._sources.append((tap, receive))
        with torch.enable_grad():
            return self._wrapped(tap.clone() if clone else tap, source, of_layer=of_layer)

    def _wrapped(self, value: Tensor, source: int | None = None, *, of_layer: bool = False) -> SharedValue:
        wrapped = value.as_subclass(SharedValue)
        wrapped._owner, wrapped._source, wrapped._of_layer, wrapped._copies = self, source, of_layer, None
        return wrapped

    def shared(self, answer: Any) -> Any:
        """Returns what a function of shared values gave: shared values, but for constants."""
        if isinstance(answer, SharedValue):  # changed in place
            if answer._copies is not None:
                raise Unsupported("a value that is no example's must not be changed in place after it met the batch")
            answer._source = None
            return answer
        if isinstance(answer, Tensor):
            return self._wrapped(answer) if answer.requires_grad else answer
        if isinstance(answer, tuple | list):
            return type(answer)([self.shared(part) for part in answer])
        return answer

    def called(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Calls a function that has shared values among its arguments.

        Raises:
            Unsupported: if another function was called at this place on synthetic examples.
        """
        if self.inside:
            args, kwargs = replaced((args, kwargs), _unless_of_layer)
            if next(_shared((args, kwargs)), None) is None:
                return func(*args, **kwargs)
        number = self._numbers[0]
        self._numbers[0] += 1
        meeting = self.meeting(number, func, args, kwargs)
        if meeting.function != func.__name__:
            raise Unsupported(
                f"a model must call the same functions of its parameters as in its check, got {func.__name__} for "
                f"{meeting.function}"
            )
        if meeting.kind == "shared":
            with DisableTorchFunctionSubclass():
                return self.shared(func(*args, **kwargs))
        return meet(meeting, func, args, kwargs, self.entries, self._copied)

    def meeting(self, number: int, func: Any, args: Any, kwargs: Any) -> Meeting:
        """Returns what is known of a call, by its number.

        Raises:
            Unsupported: for more calls than on synthetic examples.
        """
        if number >= len(self._meetings):
            raise Unsupported(f"a model must call {len(self._meetings)} functions of its parameters, as in its check")
        return self._meetings[number]

    def by_entry(self, value: SharedValue) -> Tensor:
        """Returns a value's copies for each entry in the place of its first dimension.

        Raises:
            Unsupported: if that dimension is not of size 1.
        """
        if value.shape[:1] != (1,):
            raise Unsupported(f"a value that the batch shares must have a first dimension of 1, got {[*value.shape]}")
        return self._copied(value).squeeze(1)

    def _copied(self, value: SharedValue) -> Tensor:
        """Returns a value's copies [entries, *shape], a leaf of the batch's graph."""
        if value._copies is None:
            plain = plainly(value)
            leaf = plain.detach().expand(self.entries, *plain.shape).requires_grad_()
            value._copies = Copies(plain, leaf, value._source)
            self.leaves.append(value._copies)
        return value._copies.leaf

    def finish(self) -> None:
        """Hands every parameter and layer its derivatives, after the backward pass of the batch."""
        sums = dict[int, Tensor]()

        def add(source: int, derivative: Tensor | None) -> None:
            if derivative is not None:
                sums[source] = sums[source] + derivative if source in sums else derivative

        computed = list[tuple[Tensor, Tensor]]()
        for copies in self.leaves:
            if copies.source is not None:
                add(copies.source, copies.derivative)
            elif copies.derivative is not None:
                computed.append((copies.value, copies.derivative))
        if computed:
            values, derivatives = zip(*computed, strict=True)
            taps = [tap for tap, _ in self._sources]
            pulled = torch.autograd.grad(values, taps, derivatives, allow_unused=True, is_grads_batched=True)
            for source, derivative in enumerate(pulled):
                add(source, derivative)
        for source, (_, receive) in enumerate(self._sources):
            if source in sums:
                receive(sums[source])


def plainly(value: Tensor) -> Tensor:
    """Returns a value as a plain tensor in the same graph."""
    return value.as_subclass(Tensor) if isinstance(value, SharedValue) else value


def _as_it_is(value: Tensor) -> Tensor:
    """Returns a value as a plain tensor, outside of its graph."""
    return plainly(value).detach() if isinstance(value, SharedValue) else value


def _unless_of_layer(value: Tensor) -> Tensor:
    return _as_it_is(value) if isinstance(value, SharedValue) and value._of_layer else value


def tensors_among(arguments: Any) -> Iterator[Tensor]:
    """Yields the tensors among the arguments of a function, also in lists and mappings, in order."""
    if isinstance(arguments, Tensor):
        yield arguments
    elif isinstance(arguments, dict):
        for value in arguments.values():
            yield from tensors_among(value)
    elif isinstance(arguments, tuple | list):
        for value in arguments:
            yield from tensors_among(value)


def _shared(arguments: Any) -> Iterator[SharedValue]:
    return (value for value in tensors_among(arguments) if isinstance(value, SharedValue))


def replaced(arguments: Any, change: Callable[[Tensor], Any]) -> Any:
    """Returns arguments of the same form with `change` applied to every tensor."""
    if isinstance(arguments, Tensor):
        return change(arguments)
    if isinstance(arguments, dict):
        return {key: replaced(value, change) for key, value in arguments.items()}
    if isinstance(arguments, tuple | list):
        parts, form = [replaced(value, change) for value in arguments], type(arguments)
        return getattr(form, "_make", form)(parts)
    return arguments


def meet(
    meeting: Meeting, func: Any, args: Any, kwargs: Any, entries: int, copied: Callable[[SharedValue], Tensor]
) -> Any:
    """Returns what a function gives where copies for each entry take the place of its shared values.

    Args:
        meeting: how they take it.
        func: the function.
        args: its positional arguments.
        kwargs: its named ones.
        entries: of the batch.
        copied: gives the copies [entries, *shape] of a value.
    """
    if meeting.kind == "mapped":
        return _mapped(meeting, func, args, kwargs, entries, copied)

    def change(value: Tensor) -> Tensor:
        return _placed(copied(value), meeting) if isinstance(value, SharedValue) else value

    if meeting.kind == "broadcast":
        return func(*replaced(args, change), **replaced(kwargs, change))
    with torch.no_grad():
        shape = func(*replaced(args, _as_it_is), **replaced(kwargs, _as_it_is)).shape
    return change(next(_shared((args, kwargs)))).expand(shape)


def _placed(copies: Tensor, meeting: Meeting) -> Tensor:
    """Returns copies [entries, *shape] with the dimension for entries where the function's output has it."""
    (entries, *shape), side = copies.shape, meeting.side
    copies = copies.reshape(entries, *[1] * (meeting.rank - len(shape)), *shape)
    if copies.shape[1 + side.dim] != 1:
        raise ValueError(f"a value must have size 1 in dimension {side.dim}, got {shape}")
    copies = copies.squeeze(1 + side.dim)
    if side.fold > 1:
        copies = copies.unsqueeze(1).expand(entries, side.fold, *copies.shape[1:]).flatten(0, 1)
    return copies.movedim(0, side.dim)


def _mapped(
    meeting: Meeting, func: Any, args: Any, kwargs: Any, entries: int, copied: Callable[[SharedValue], Tensor]
) -> Any:
    """Calls a function for each entry by itself, each with its own copies, as on a batch of one."""
    of_entry = _OF_ENTRY.get(func, func)
    tensors, places = [], []
    for value, side in zip(tensors_among((args, kwargs)), meeting.sides, strict=True):
        if isinstance(value, SharedValue):
            tensors.append(copied(value))
            places.append(0)
        else:
            tensors.append(value if side is None else value.unflatten(side.dim, (entries, side.fold)))
            places.append(None if side is None else side.dim)

    def of_one(*values: Tensor) -> Any:
        remaining = iter(values)
        own_args, own_kwargs = replaced((args, kwargs), lambda _value: next(remaining))
        return of_entry(*own_args, **own_kwargs)

    with DisableTorchFunctionSubclass():
        outputs = torch.vmap(of_one, in_dims=tuple(places))(*tensors)
    dim = meeting.side.dim
    return replaced(outputs, lambda output: output.movedim(0, dim).flatten(dim, dim + 1))


def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Returns what `functional.embedding` does; arguments are the same.

    Under `vmap` PyTorch applies its padding index to the first entry of a batch alone (2.14).

    Raises:
        Unsupported: with a largest norm, for which a pass changes the weight.
    """
    if max_norm is not None:
        raise Unsupported("an embedding must have max_norm=None, which changes weights in forward passes")
    vectors = functional.embedding(input, weight, scale_grad_by_freq=scale_grad_by_freq)
    if padding_idx is None:
        return vectors
    padded = input == (padding_idx if padding_idx >= 0 else weight.shape[0] + padding_idx)
    return torch.where(padded.unsqueeze(-1), vectors.detach(), vectors)


def _indexed_rows(
    weight: Tensor, indices: Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Tensor:
    """Returns what `torch.embedding` does, in which a negative padding index means none."""
    return _embedding(indices, weight, None if padding_idx < 0 else padding_idx, scale_grad_by_freq=scale_grad_by_freq)


_OF_ENTRY: Mapping[Callable[..., Any], Callable[..., Any]] = {
    functional.embedding: _embedding,
    torch.embedding: _indexed_rows,
}
"""Functions that have other derivatives under `vmap` than on a batch of one, and what is called in their place."""
