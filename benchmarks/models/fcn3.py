"""FCN3: the fully connected network of R-GAP's results on MNIST.

Zhu & Blaschko, "R-GAP: Recursive Gradient Attack on Privacy", ICLR 2021.
Deviation: no activation after the last layer; the authors' code has a leaky ReLU there.
"""

import math

from torch import nn

from ..core.catalogue import Natural
from .cnn6 import SLOPE

NATURAL = Natural((1, 28, 28), classes=1)


def fcn3(*, input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Hidden layers of 1000 and 100 with leaky ReLUs, no biases, one logit (884,100 parameters on MNIST).

    Args:
        input_shape: any.
        classes: number of logits; 1 for a binary logit.
    """
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(math.prod(input_shape), 1000, bias=False),
        nn.LeakyReLU(SLOPE),
        nn.Linear(1000, 100, bias=False),
        nn.LeakyReLU(SLOPE),
        nn.Linear(100, classes, bias=False),
    )
