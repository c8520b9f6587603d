"""Networks that can be inverted layer by layer: linear maps without biases, each followed by a leaky ReLU.

Zhu & Blaschko, "R-GAP: Recursive Gradient Attack on Privacy", ICLR 2021. A leaky ReLU has an inverse, and without
biases the gradient of a layer is linear in its input, given the derivatives by its output. With one logit, the
last layer shares a scalar from which the loss's derivative follows.
"""

from collections.abc import Sequence

from torch import nn

from .shapes import features, image_shape

SLOPE = 0.2
"""Of the negative half; a Python number, so that it is 0.2 in float64 too, where an inversion multiplies its error."""


def leaky_cnn(
    convolutions: Sequence[tuple[int, int, int, int]], *, input_shape: tuple[int, ...], classes: int, model: str
) -> nn.Sequential:
    """Convolutions and one linear layer, all without biases.

    Args:
        convolutions: output channels, kernel size, stride and padding of each.
        input_shape: (channels, height, width), at least 8x8.
        classes: number of logits; 1 for a binary one.
        model: name of the architecture, for errors.

    Raises:
        ValueError: if the input does not fit.
    """
    entering, _, _ = image_shape(input_shape, smallest=8, model=model)
    layers: list[nn.Module] = []
    for width, kernel, stride, padding in convolutions:
        layers += [nn.Conv2d(entering, width, kernel, stride=stride, padding=padding, bias=False), nn.LeakyReLU(SLOPE)]
        entering = width
    body = nn.Sequential(*layers, nn.Flatten())
    return nn.Sequential(body, nn.Linear(features(body, input_shape), classes, bias=False))
