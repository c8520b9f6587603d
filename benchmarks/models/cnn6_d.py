"""CNN6-d: CNN6 with a second layer so narrow that R-GAP fails on it.

Zhu & Blaschko, "R-GAP: Recursive Gradient Attack on Privacy", ICLR 2021. With 20 instead of 36 channels leaving the
second convolution, gradient and weights leave 280 of the 3468 dimensions of its input open on CIFAR-10, although
their equations, 3780, are more than the unknowns.
"""

from torch import nn

from ..core.nets.leaky_relu_cnn import leaky_cnn
from ..core.nets.shapes import Natural

NATURAL = Natural((3, 32, 32), classes=1)
CONVOLUTIONS = ((12, 4, 2, 2), (20, 3, 2, 1), (36, 3, 1, 1), (36, 3, 1, 1), (64, 3, 2, 1), (128, 3, 1, 1))
"""Output channels, kernel size, stride, padding."""


def cnn6_d(*, input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """CNN6 with 20 channels after its second convolution, one logit (118,544 parameters on CIFAR-10).

    Args:
        input_shape: (channels, height, width), at least 8x8.
        classes: number of logits; 1 for a binary one.

    Raises:
        ValueError: if the input does not fit.
    """
    return leaky_cnn(CONVOLUTIONS, input_shape=input_shape, classes=classes, model="cnn6_d")
