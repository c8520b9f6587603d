"""Multilayer perceptron with a hidden layer: the smallest network here that learns `digits`."""

import math

from torch import nn

from ..core.catalogue import Natural

NATURAL = Natural((1, 8, 8), classes=10)


def mlp(*, input_shape: tuple[int, ...], classes: int, hidden: int = 32) -> nn.Module:
    """A hidden tanh layer on the flattened input.

    Args:
        input_shape: any.
        classes: number of logits.
        hidden: width of the hidden layer.

    Returns:
        A network with `hidden * (inputs + 1) + classes * (hidden + 1)` parameters: 2,410 on `digits`.

    Raises:
        ValueError: `hidden` is not positive.
    """
    if hidden < 1:
        raise ValueError(f"hidden must be at least 1, got {hidden}")
    inputs = math.prod(input_shape)
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, classes))
