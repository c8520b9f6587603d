"""H-CNN/S: a small tanh network on ScatterNet features, for MNIST and Fashion-MNIST.

Tramèr & Boneh, "Differentially Private Learning Needs Better Features (or Much More Data)", ICLR 2021. Features are
normalised within each example, as in `h_cnn`.
"""

from torch import nn

from ..core.nets.scatter import scattered_shape, scattering
from ..core.nets.shapes import Natural, features, image_shape

NATURAL = Natural((1, 28, 28), classes=10)


def h_cnn_small(*, input_shape: tuple[int, ...], classes: int, groups: int = 27) -> nn.Module:
    """Two 3x3 tanh convolutions and a hidden layer of 32 on scattering features (33,066 parameters on Fashion-MNIST).

    Args:
        input_shape: (channels, height, width), at least 8x8.
        classes: number of logits.
        groups: of the channels that are normalised together, without parameters; divides 81 times the channels.

    Raises:
        ValueError: for an input that does not fit, or groups that do not divide the channels.
        ModuleNotFoundError: without kymatio.
    """
    image = image_shape(input_shape, smallest=8, model="h_cnn_small")
    shape = scattered_shape(image)
    body = nn.Sequential(
        nn.Conv2d(shape[0], 16, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.Tanh(),
        nn.Flatten(),
    )
    head = (nn.Linear(features(body, shape), 32), nn.Tanh(), nn.Linear(32, classes))
    return nn.Sequential(scattering(image, groups=groups), body, *head)
