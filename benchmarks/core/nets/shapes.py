"""Shapes: the input that an architecture is quoted for, inputs that fit, and the features that layers put out."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Natural:
    """The data that an architecture is quoted on: NATURAL in its file, or in its row of a family's table.

    Args:
        input_shape: shape of one input.
        classes: number of logits; 1 for a network with a binary logit, which may be built so.
        settings: of the architecture, over its defaults.
    """

    input_shape: tuple[int, ...]
    classes: int
    settings: Mapping[str, Any] = field(default_factory=dict)


def image_shape(input_shape: tuple[int, ...], *, smallest: int, model: str) -> tuple[int, int, int]:
    """`input_shape` as (channels, height, width), refused where the convolutions of `model` have no room.

    Args:
        input_shape: shape of one input without the batch dimension.
        smallest: least height and width, in pixels, that leave one feature after the last pooling.
        model: name of the architecture, for the error.

    Raises:
        ValueError: if it is not an image or is too small.
    """
    if len(input_shape) != 3 or min(input_shape) < 1 or min(input_shape[1:]) < smallest:
        raise ValueError(
            f"input_shape of {model} must be (channels, height, width) with at least {smallest} x {smallest} "
            f"pixels, got {tuple(input_shape)}; 'mlp' takes inputs of any shape"
        )
    channels, height, width = input_shape
    return channels, height, width


def features(body: nn.Module, input_shape: tuple[int, ...]) -> int:
    """Number of values per example that `body` puts out; measured, so that no formula can disagree."""
    with torch.no_grad():
        # One forward pass of a blank image; it draws nothing, so initial weights stay those of the seed.
        return math.prod(body(torch.zeros(1, *input_shape)).shape[1:])


def refuse_groups(groups: int, channels: int) -> None:
    """Raises `ValueError` for a number of groups that does not divide the channels of the narrowest norm."""
    if groups < 1 or channels % groups:
        raise ValueError(f"groups must divide {channels}, the channels of the narrowest norm, got {groups}")


Answers = Callable[[Any], Any] | None
"""Takes the logits out of what a network puts out."""


def as_they_are(outputs: Any) -> Any:
    """Outputs that are logits themselves."""
    return outputs


def refuse_misfit(
    model: nn.Module,
    name: str,
    input_shape: tuple[int, ...],
    classes: int | None,
    *,
    compute: bool = True,
    answers: Callable[[Any], Any] = as_they_are,
) -> None:
    """Runs a network that somebody else wrote on two blank inputs, and refuses what does not come out as logits.

    Args:
        model: on the CPU; left in the mode in which it came.
        name: of the model, for the error.
        input_shape: shape of one input.
        classes: number of logits, of which one may lack its axis; None for an encoder, which may put out any numbers of
            each input.
        compute: whether numbers are computed; if not, shapes only, by meta tensors in the place of parameters and
            buffers, which takes a network without tensors of any other kind.
        answers: takes the logits out of what it puts out.

    Raises:
        ValueError: naming the model and what it does instead.
    """
    modes = {module: module.training for module in model.modules()}
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    values = {} if compute else {key: value.to("meta") for key, value in own.items()}
    # Two examples: with one, a network that loses the batch dimension could pass.
    inputs = torch.zeros(2, *input_shape, device="cpu" if compute else "meta")
    try:
        with torch.no_grad():
            # Evaluation mode: what a layer counts or draws while training is not to be touched.
            found = answers(torch.func.functional_call(model.eval(), values, (inputs,)))
    except Exception as error:  # whatever somebody else's layers raise on a shape that they were not written for
        raise ValueError(f"model {name!r} cannot take inputs of shape {input_shape}: {first_line(error)}") from error
    finally:
        for module, training in modes.items():
            module.training = training
    got = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
    if classes is None and isinstance(found, Tensor) and found.shape[:1] == (2,) and found.is_floating_point():
        return
    if got != (2, classes) and (got, classes) != ((2,), 1):
        wanted = "numbers of each" if classes is None else f"[2, {classes}]"
        raise ValueError(f"model {name!r} must map [2, {str(input_shape)[1:-1]}] to {wanted}, got {got}")


def first_line(error: BaseException) -> str:
    """First line of an error's message, or the name of its type where it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
