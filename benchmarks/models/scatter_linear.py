"""Softmax regression on ScatterNet features: the least that is trained on them.

Tramèr & Boneh, "Differentially Private Learning Needs Better Features (or Much More Data)", ICLR 2021. Features are
normalised within each example, which says nothing about the others and so costs no privacy; with `groups = 0` they are
left as they are, for training to standardise them by statistics of the data, released with noise.
"""

import math

from torch import nn

from ..core.nets.scatter import scattered_shape, scattering
from ..core.nets.shapes import Natural, image_shape

NATURAL = Natural((3, 32, 32), classes=10)


def scatter_linear(*, input_shape: tuple[int, ...], classes: int, groups: int = 27) -> nn.Module:
    """One linear layer on scattering features (155,530 parameters on CIFAR-10, 39,700 on Fashion-MNIST).

    Args:
        input_shape: (channels, height, width), at least 8x8.
        classes: number of logits.
        groups: of the channels that are normalised together, without parameters; divides 81 times the channels. 0 for
            none.

    Raises:
        ValueError: for an input that does not fit, or groups that do not divide the channels.
        ModuleNotFoundError: without kymatio.
    """
    image = image_shape(input_shape, smallest=8, model="scatter_linear")
    shape = scattered_shape(image)
    return nn.Sequential(
        scattering(image, groups=groups),
        nn.Flatten(),
        nn.Linear(math.prod(shape), classes),
    )
