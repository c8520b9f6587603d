"""Finds what a model uses once for the whole batch, of which autograd adds up all examples' derivatives.

Two kinds are common in transformers: parameters that no known layer holds (a class token, positions, the scale of a
norm), and layers that are called without the batch, as the positions' embedding for `arange(length)[None]`. The engine
puts a copy for each entry of the batch in the place of the parameter, or of the layer's output. Operations that
broadcast over the batch then give the same outputs, and the derivative by the copies is each example's own.

How a parameter's copies are aligned with the other dimensions is found by trial, on synthetic examples in float64: with
different values for different examples, every example must have the loss that it has where all have its values. A
parameter that no alignment suits is followed through the functions that change it (`shared_values.py`), and so are the
outputs of layers, and the parameters of layers that functions use as well. The check against plain autograd
(`choose.py`) judges the result as that of any other engine.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunction

from ...randomness.record_draws import entries, one_pass
from ..checks.synthetic_examples import SyntheticBatch
from ..engines.interface import Unsupported
from ..reference import Loss, ModelFunction
from .meetings import CallShapes, TrialPass
from .recorder import example_losses
from .shared_values import Meeting, SharedPass

_IN_PLACE = (0, 1)  # dimensions of size 1 that may become the batch: the second in states of recurrent layers
_MOST_ONES = 3  # dimensions between the batch and a parameter's own, as height and width of an image
_AGREES = 1e-9  # of the largest loss
_FEWER = 5  # examples of the second pass, of whose layers' inputs the shapes are compared


@dataclass(frozen=True)
class SharedUses:
    """Uses of a model's parameters and layers that all entries of a batch share.

    Attributes:
        bare: parameters of which copies take the place, and the number of dimensions of size 1 between the batch and a
            parameter's own in the shape of its copies; -1 if the parameter's first dimension, of size 1, is the batch,
            -2 if the second is.
        values: further parameters that functions other than known layers use, which are followed as `SharedValue`s.
        calls: calls of layers that are made once for all entries, by number, and their input's shape.
        meetings: functions that shared values reach, in order.
        numbers: of all copied values, per entry.
        beside: first of `values` that a known layer holds, which functions use as well; empty if there is none.
    """

    bare: Mapping[str, int] = field(default_factory=dict)
    values: tuple[str, ...] = ()
    calls: Mapping[int, torch.Size] = field(default_factory=dict)
    meetings: tuple[Meeting, ...] = ()
    numbers: int = 0
    beside: str = ""

    def begun(self, entries: int) -> SharedPass | None:
        """Returns the shared values of a pass over so many entries; None if there are none."""
        return SharedPass(entries, self.meetings, self.calls) if self.values or self.calls else None


def aligned(value: Tensor, alignment: int, entries: int) -> Tensor:
    """Returns a copy of a parameter for each entry of a batch, as a view; see `SharedUses.bare`."""
    if alignment < 0:
        return value.expand(
            *(entries if d == batch_dimension(alignment) else size for d, size in enumerate(value.shape))
        )
    return value.view(*[1] * (1 + alignment), *value.shape).expand(entries, *[-1] * (alignment + value.dim()))


def batch_dimension(alignment: int) -> int:
    """Returns the dimension of a parameter's copies that runs over the entries."""
    return max(0, -1 - alignment)


def not_held(model: nn.Module, name: str) -> str:
    """Returns the sentence that refuses a parameter which no known layer holds."""
    return f"no known layer holds the parameter '{name}', which is one of a {type(_owner(model, name)).__name__}"


def find_uses(
    model: nn.Module,
    forward: ModelFunction,
    loss: Loss,
    layers: Sequence[nn.Module],
    bare: Sequence[str],
    of_layers: Sequence[str],
    examples: SyntheticBatch,
) -> SharedUses:
    """Returns the shared uses of a model, from passes over synthetic examples.

    Args:
        model: a copy of the user's in float64.
        forward: that model as a function.
        loss: per-example loss.
        layers: the known layers.
        bare: parameters that none of them holds.
        of_layers: parameters that one of them holds.
        examples: seven or so.

    Raises:
        Unsupported: for a parameter whose copies cannot take its place.
    """
    uses, generator = dict[str, int](), torch.Generator().manual_seed(2)

    def outcome(batch: SyntheticBatch, at: Mapping[str, Tensor]) -> Tensor:
        with torch.no_grad(), entries(batch.keys), one_pass():
            return example_losses(loss, forward(at, batch.inputs), batch.targets)

    odd = torch.arange(len(examples.keys), device=examples.keys.device) % 2 == 1
    followed: list[str] = []
    # Parameters of equal shape, name and owner's type are used in the same way, as those of a stack of blocks.
    kinds = {name: (type(_owner(model, name)), name.rpartition(".")[2], forward.value(name).shape) for name in bare}
    for kind in dict.fromkeys(kinds.values()):
        alike = {name: forward.value(name).detach() for name in bare if kinds[name] == kind}
        moved = {name: value + _step(value, generator) for name, value in alike.items()}
        expected = torch.where(odd, outcome(examples, moved), outcome(examples, {}))
        in_place = [-1 - d for d in _IN_PLACE if kind[2][d : d + 1] == (1,)]
        for alignment in (*in_place, *range(_MOST_ONES + 1)):
            mixed = {name: _mixed(odd, moved[name], value, alignment) for name, value in alike.items()}
            losses = _unless_it_fails(partial(outcome, examples, mixed))
            if losses is not None and losses.shape == expected.shape and _agree(losses, expected):
                uses |= dict.fromkeys(alike, alignment)
                break
        else:
            followed += alike
    try:
        return _followed(model, forward, layers, uses, followed, of_layers, examples)
    except Unsupported:
        if not (uses and followed):
            raise
        # Such as the bias of a function's matrix, which has its own number of dimensions there.
        return _followed(model, forward, layers, {}, list(bare), of_layers, examples)


def _followed(
    model: nn.Module,
    forward: ModelFunction,
    layers: Sequence[nn.Module],
    bare: Mapping[str, int],
    values: Sequence[str],
    of_layers: Sequence[str],
    examples: SyntheticBatch,
) -> SharedUses:
    """Returns the uses with those that have to be followed through functions.

    Raises:
        Unsupported: for a parameter whose copies cannot take its place.
    """
    fewer = examples.chosen(torch.arange(_FEWER, device=examples.keys.device))
    batches = (examples, fewer)
    shapes, layer_shapes = list[CallShapes](), list[list[tuple[nn.Module, torch.Size]]]()
    known = {name: forward.value(name).detach().contiguous() for name in (*of_layers, *values)}
    for batch in batches:
        copies = {name: aligned(forward.value(name).detach(), at, len(batch.keys)) for name, at in bare.items()}
        counter = CallShapes({id(value): name for name, value in known.items() if name not in values})
        calls: list[tuple[nn.Module, torch.Size]] = []

        def note(layer: nn.Module, entering: Tensor, _output: Any, calls: Any = calls) -> None:
            calls.append((layer, entering.shape))

        with torch.no_grad(), _hooked(layers, counter, note):
            _run(forward, {**known, **copies}, batch, counter)
        shapes.append(counter)
        layer_shapes.append(calls)
    pairs = zip(*layer_shapes, strict=False)
    shared_calls = {number: call[1] for number, (call, of_fewer) in enumerate(pairs) if call == of_fewer}
    # A parameter of a known layer that a function is called on as well, as a tied weight by `F.linear`.
    values = [*values, *(name for name in of_layers if name in shapes[0].on)]
    if not values and not shared_calls:
        return SharedUses(bare)

    counter = CallShapes()
    sizes = len(examples.keys), _FEWER
    trial = TrialPass(sizes, shared_calls, (shapes[0].calls, shapes[1].calls), counter)
    copies = {name: aligned(forward.value(name).detach(), at, sizes[0]) for name, at in bare.items()}
    wrapped = {
        name: trial.parameter(forward.value(name).contiguous(), _ignored, of_layer=name in of_layers) for name in values
    }

    def pass_on(_layer: nn.Module, entering: Tensor, output: Any) -> Any:
        return trial.of_layer(entering, output, _ignored)

    try:
        with torch.enable_grad(), _hooked(layers, counter, pass_on, trial):
            _run(forward, {**known, **copies, **wrapped}, examples, counter)
    except Unsupported as why:
        if not values:
            raise
        first = values[0]
        sentence = not_held(model, first) if first not in of_layers else f"'{first}' is used by functions too"
        raise Unsupported(f"{sentence}, and {why}") from why
    return SharedUses(
        bare,
        tuple(values),
        shared_calls,
        tuple(trial.meetings),
        numbers=sum(copies.value.numel() for copies in trial.leaves),
        beside=next((name for name in values if name in of_layers), ""),
    )


def _run(forward: ModelFunction, at: Mapping[str, Tensor], batch: SyntheticBatch, counter: CallShapes) -> None:
    # The counter first: it then sees what the functions for draws call, as `SharedValue` does.
    with counter, entries(batch.keys), one_pass():
        forward(at, batch.inputs)


@contextmanager
def _hooked(
    layers: Sequence[nn.Module],
    counter: CallShapes,
    note: Callable[[nn.Module, Tensor, Any], Any],
    trial: TrialPass | None = None,
) -> Iterator[None]:
    """Calls `note` after each call of a layer, whose result takes the place of the output if there is one."""

    def enter(_layer: nn.Module, _args: Any) -> None:
        counter.inside += 1
        if trial is not None:
            trial.inside += 1

    def leave(layer: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], output: Any) -> Any:
        counter.inside -= 1
        if trial is not None:
            trial.inside -= 1
        with DisableTorchFunction():
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
            return note(layer, tensors[0], output) if len(tensors) == 1 else None

    handles = [layer.register_forward_pre_hook(enter) for layer in layers]
    handles += [layer.register_forward_hook(leave, with_kwargs=True) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _ignored(_derivatives: Tensor) -> None:
    """Takes no derivative: a trial has no backward pass."""


def _unless_it_fails(losses: Callable[[], Tensor]) -> Tensor | None:
    try:
        with warnings.catch_warnings():  # as that reversing more than two dimensions is deprecated
            warnings.simplefilter("ignore")
            return losses()
    except Exception:  # anything that a model raises on a parameter of another shape
        return None


def _mixed(odd: Tensor, moved: Tensor, value: Tensor, alignment: int) -> Tensor:
    """Returns copies for each example: the moved values for every second one."""
    first, second = (aligned(values, alignment, len(odd)) for values in (moved, value))
    shape = [1] * first.dim()
    shape[batch_dimension(alignment)] = -1
    return torch.where(odd.view(shape), first, second)


def _step(value: Tensor, generator: torch.Generator) -> Tensor:
    """Returns a random step of a parameter's size."""
    step = torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value)
    return step * (float(value.square().mean().sqrt()) or 1.0)


def _agree(losses: Tensor, expected: Tensor) -> bool:
    return float((losses - expected).abs().max()) <= _AGREES * float(expected.abs().max())


def _owner(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])
