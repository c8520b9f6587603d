"""Softmax regression: a linear layer on inputs, or on features of a public encoder (the head of private transfer)."""

import math

from torch import nn

from ..core.catalogue import Natural

NATURAL = Natural((4096,), classes=10)


def linear(*, input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """A linear layer on the flattened input (40,970 parameters on 4096 features).

    Args:
        input_shape: any.
        classes: number of logits.
    """
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), classes))
