"""Checks of input and output shapes of networks, and the number of features that a network computes."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..open_names import as_they_are


def image_shape(input_shape: tuple[int, ...], *, smallest: int, model: str) -> tuple[int, int, int]:
    """Returns `input_shape` as (channels, height, width), if it is large enough for the convolutions of `model`.

    Args:
        input_shape: of a single input, without the batch dimension.
        smallest: least height and width, in pixels, that leave one feature after the last pooling.
        model: name of the architecture, for the error.

    Raises:
        ValueError: it is no image, or too small.
    """
    if len(input_shape) != 3 or min(input_shape) < 1 or min(input_shape[1:]) < smallest:
        raise ValueError(
            f"input_shape of {model} must be (channels, height, width) with at least {smallest} x {smallest} "
            f"pixels, got {tuple(input_shape)}; 'mlp' takes inputs of any shape"
        )
    channels, height, width = input_shape
    return channels, height, width


def features(body: nn.Module, input_shape: tuple[int, ...]) -> int:
    """Returns the number of output values of `body` per example, measured by a forward pass."""
    with torch.no_grad():
        # A forward pass of a blank image draws nothing, so initial weights stay those of the seed.
        return math.prod(body(torch.zeros(1, *input_shape)).shape[1:])


def refuse_groups(groups: int, channels: int) -> None:
    """Raises ValueError if `groups` does not divide the channels of the narrowest norm."""
    if groups < 1 or channels % groups:
        raise ValueError(f"groups must divide {channels}, the channels of the narrowest norm, got {groups}")


def refuse_misfit(
    model: nn.Module,
    name: str,
    input_shape: tuple[int, ...],
    classes: int | None,
    *,
    compute: bool = True,
    answers: Callable[[Any], Any] = as_they_are,
) -> None:
    """Runs a network on two blank inputs, and refuses outputs that are no logits.

    Args:
        model: on the CPU; its training mode is restored.
        name: of the model, for the error.
        input_shape: of a single input.
        classes: number of logits; a single logit may lack its axis. None for an encoder, which may return any numbers
            for each input.
        compute: whether numbers are computed; if not, only shapes, with meta tensors for parameters and buffers, which
            requires a network without other tensors.
        answers: extracts the logits from the output.

    Raises:
        ValueError: names the model and its actual output.
    """
    modes = {module: module.training for module in model.modules()}
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    values = {} if compute else {key: value.to("meta") for key, value in own.items()}
    # Two examples: with a single example, a network that loses the batch dimension could pass.
    inputs = torch.zeros(2, *input_shape, device="cpu" if compute else "meta")
    try:
        with torch.no_grad():
            # Evaluation mode: training would update counters and draw random numbers.
            outputs = answers(torch.func.functional_call(model.eval(), values, (inputs,)))
    except Exception as error:  # user layers may raise anything on a shape that they do not support
        raise ValueError(f"model {name!r} cannot take inputs of shape {input_shape}: {first_line(error)}") from error
    finally:
        for module, training in modes.items():
            module.training = training
    answer = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
    if classes is None and isinstance(outputs, Tensor) and outputs.shape[:1] == (2,) and outputs.is_floating_point():
        return
    if answer != (2, classes) and (answer, classes) != ((2,), 1):
        rule = "numbers of each" if classes is None else f"[2, {classes}]"
        raise ValueError(f"model {name!r} must map [2, {str(input_shape)[1:-1]}] to {rule}, got {answer}")


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or the name of its type if it has no message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
