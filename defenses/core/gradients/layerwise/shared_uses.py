"""Finds what a model uses once for the whole batch, of which autograd adds up all examples' derivatives.

Two kinds are common in transformers: parameters that no known layer holds (a class token, positions, the scale of a
norm), and layers that are called without the batch, as the positions' embedding for `arange(length)[None]`. The engine
puts a copy for each entry of the batch in the place of the parameter, or of the layer's output. Operations that
broadcast over the batch then give the same outputs, and the derivative by the copies is each example's own.

How a parameter's copies are aligned with the other dimensions is found by trial, on synthetic examples in float64: with
different values for different examples, every example must have the loss that it has where all have its values. The
check against plain autograd (`choose.py`) judges the result as that of any other engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from ...randomness.record_draws import entries, one_pass
from ..checks.synthetic_examples import SyntheticBatch
from ..engines.interface import Unsupported
from ..reference import Loss, ModelFunction
from .recorder import example_losses

_IN_PLACE = (0, 1)  # dimensions of size 1 that may become the batch: the second in states of recurrent layers
_MOST_ONES = 3  # dimensions between the batch and a parameter's own, as height and width of an image
_AGREES = 1e-9  # of the largest loss
_FEWER = 5  # examples of the second pass, of whose layers' inputs the shapes are compared


@dataclass(frozen=True)
class SharedUses:
    """Uses of a model's parameters and layers that all entries of a batch share.

    Attributes:
        bare: parameters that no known layer holds, and the number of dimensions of size 1 between the batch and a
            parameter's own in the shape of its copies; -1 if the parameter's first dimension, of size 1, is the batch,
            -2 if the second is.
        calls: calls that are made once for all entries, by number, and their input's shape.
    """

    bare: Mapping[str, int] = field(default_factory=dict)
    calls: Mapping[int, torch.Size] = field(default_factory=dict)


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
    examples: SyntheticBatch,
) -> SharedUses:
    """Returns the shared uses of a model, from passes over synthetic examples.

    Args:
        model: a copy of the user's in float64.
        forward: that model as a function.
        loss: per-example loss.
        layers: the known layers.
        bare: parameters that none of them holds.
        examples: seven or so.

    Raises:
        Unsupported: for a parameter whose copies cannot take its place.
    """
    uses, generator = dict[str, int](), torch.Generator().manual_seed(2)

    def outcome(batch: SyntheticBatch, at: Mapping[str, Tensor]) -> Tensor:
        with torch.no_grad(), entries(batch.keys), one_pass():
            return example_losses(loss, forward(at, batch.inputs), batch.targets)

    odd = torch.arange(len(examples.keys), device=examples.keys.device) % 2 == 1
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
            raise Unsupported(
                f"{not_held(model, next(iter(alike)))}, and copies for each example cannot take its place"
            )
    return SharedUses(uses, _shared_calls(forward, uses, layers, examples))


def _shared_calls(
    forward: ModelFunction, bare: Mapping[str, int], layers: Sequence[nn.Module], examples: SyntheticBatch
) -> dict[int, torch.Size]:
    """Returns the calls whose inputs have the same shape in batches of two sizes, by number, with that shape."""

    def shapes(batch: SyntheticBatch) -> list[tuple[nn.Module, torch.Size]]:
        calls: list[tuple[nn.Module, torch.Size]] = []

        def note(layer: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], _output: object) -> None:
            calls.extend((layer, value.shape) for value in (*args, *kwargs.values()) if isinstance(value, Tensor))

        handles = [layer.register_forward_hook(note, with_kwargs=True) for layer in layers]
        count = len(batch.keys)
        copies = {name: aligned(forward.value(name).detach(), at, count) for name, at in bare.items()}
        try:
            with torch.no_grad(), entries(batch.keys), one_pass():
                forward(copies, batch.inputs)
        finally:
            for handle in handles:
                handle.remove()
        return calls

    fewer = torch.arange(_FEWER, device=examples.keys.device)
    pairs = zip(shapes(examples), shapes(examples.chosen(fewer)), strict=False)
    return {number: call[1] for number, (call, of_fewer) in enumerate(pairs) if call == of_fewer}


def _unless_it_fails(losses: Callable[[], Tensor]) -> Tensor | None:
    try:
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
