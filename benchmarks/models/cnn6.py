"""CNN6: the convolutional network that R-GAP inverts.

Zhu & Blaschko, "R-GAP: Recursive Gradient Attack on Privacy", ICLR 2021. With torch's initial weights, gradient and
weights together determine the input of every layer.
"""

from torch import nn

from ..core.nets.leaky_relu_cnn import leaky_cnn
from ..core.nets.shapes import Natural

NATURAL = Natural((3, 32, 32), classes=1)
CONVOLUTIONS = ((12, 4, 2, 2), (36, 3, 2, 1), (36, 3, 1, 1), (36, 3, 1, 1), (64, 3, 2, 1), (128, 3, 1, 1))
"""Output channels, kernel size, stride, padding."""


def cnn6(*, input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Six convolutions with leaky ReLUs and a linear layer, no biases, one logit (125,456 parameters on CIFAR-10).

    Args:
        input_shape: (channels, height, width), at least 8x8.
        classes: number of logits; 1 for a binary one.

    Raises:
        ValueError: if the input does not fit.
    """
    return leaky_cnn(CONVOLUTIONS, input_shape=input_shape, classes=classes, model="cnn6")
