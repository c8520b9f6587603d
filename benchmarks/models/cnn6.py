"""Networks that R-GAP inverts layer by layer: convolutions without biases, each followed by a leaky ReLU.

Zhu & Blaschko, "R-GAP: Recursive Gradient Attack on Privacy", ICLR 2021. A leaky ReLU has an inverse, and the gradient
of a layer's weight is linear in the layer's input, given the derivatives by its output. With a single logit and no
bias, the inner product of the last layer's weight with its gradient is the logit times the loss's derivative, a scalar
equation for the logit.

On CNN6, with torch's initial weights, gradient and weights together determine the input of every layer. On CNN6-d,
whose second convolution has 20 instead of 36 channels, 280 of the 3468 dimensions of that layer's input stay
undetermined on CIFAR-10, although there are more equations, 3780, than unknowns.
"""

from collections.abc import Sequence

from torch import nn

from ..core.catalogue import Natural, Variant
from ..core.nets.shapes import features, image_shape

BINARY = Natural((3, 32, 32), classes=1)
SLOPE = 0.2
"""Slope of the negative half; a Python number, so 0.2 to the precision of float64: inversion amplifies errors."""


def leaky_relu_cnn(
    *, input_shape: tuple[int, ...], classes: int, convolutions: Sequence[tuple[int, int, int, int]], model: str
) -> nn.Sequential:
    """Convolutions and a linear layer, all without biases.

    Args:
        input_shape: (channels, height, width), at least 8x8.
        classes: number of logits; 1 for a binary logit.
        convolutions: output channels, kernel size, stride and padding of each.
        model: name of the architecture, for errors.

    Raises:
        ValueError: the input does not fit.
    """
    entering, _, _ = image_shape(input_shape, smallest=8, model=model)
    layers: list[nn.Module] = []
    for width, kernel, stride, padding in convolutions:
        layers += [nn.Conv2d(entering, width, kernel, stride=stride, padding=padding, bias=False), nn.LeakyReLU(SLOPE)]
        entering = width
    body = nn.Sequential(*layers, nn.Flatten())
    return nn.Sequential(body, nn.Linear(features(body, input_shape), classes, bias=False))


def _convolutions(second: int) -> tuple[tuple[int, int, int, int], ...]:
    """Convolutions of CNN6 with a given number of channels after the second."""
    # (channels, kernel size, stride, padding).
    return (12, 4, 2, 2), (second, 3, 2, 1), (36, 3, 1, 1), (36, 3, 1, 1), (64, 3, 2, 1), (128, 3, 1, 1)


VARIANTS = {
    "cnn6": Variant(
        leaky_relu_cnn,
        BINARY,
        title="CNN6: the convolutional network that R-GAP inverts.",
        summary="Six convolutions with leaky ReLUs and a linear layer, no biases, one logit "
        "(125,456 parameters on CIFAR-10).",
        fixed={"convolutions": _convolutions(36)},
    ),
    "cnn6_d": Variant(
        leaky_relu_cnn,
        BINARY,
        title="CNN6-d: CNN6 with a second layer so narrow that R-GAP fails on it.",
        summary="CNN6 with 20 channels after its second convolution, one logit (118,544 parameters on CIFAR-10).",
        fixed={"convolutions": _convolutions(20)},
    ),
}
