"""Softmax regression on ScatterNet features.

Tramèr & Boneh, "Differentially Private Learning Needs Better Features (or Much More Data)", ICLR 2021. Features are
normalised within each example, which uses no other example and so costs no privacy; with `groups = 0` they are not
normalised, and training standardises them by statistics of the data, released with noise.
"""

import math

from torch import nn

from ..core.catalogue import Natural
from ..core.nets.scatter import scattered_shape, scattering
from ..core.nets.shapes import image_shape

NATURAL = Natural((3, 32, 32), classes=10)


def scatter_linear(*, input_shape: tuple[int, ...], classes: int, groups: int = 27) -> nn.Module:
    """A linear layer on scattering features (155,530 parameters on CIFAR-10, 39,700 on Fashion-MNIST).

    Args:
        input_shape: (channels, height, width), at least 8x8.
        classes: number of logits.
        groups: number of groups of channels that are normalised together, without parameters; divides 81 times the
            channels. 0 for no normalisation.

    Raises:
        ValueError: the input does not fit, or the groups do not divide the channels.
        ModuleNotFoundError: kymatio is missing.
    """
    image = image_shape(input_shape, smallest=8, model="scatter_linear")
    shape = scattered_shape(image)
    return nn.Sequential(
        scattering(image, groups=groups),
        nn.Flatten(),
        nn.Linear(math.prod(shape), classes),
    )
