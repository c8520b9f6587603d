"""H-CNN: a small tanh network on ScatterNet features, for CIFAR-10 and SVHN.

Tramèr & Boneh, "Differentially Private Learning Needs Better Features (or Much More Data)", ICLR 2021. Features are
normalised within each example, which says nothing about the others and so costs no privacy; the authors' other way,
statistics of the data released with noise, is no matter of the architecture.
"""

from torch import nn

from ..core.nets.scatter import scattered_shape, scattering
from ..core.nets.shapes import Natural, features, image_shape

NATURAL = Natural((3, 32, 32), classes=10)


def h_cnn(*, input_shape: tuple[int, ...], classes: int, groups: int = 27) -> nn.Module:
    """Two 3x3 tanh convolutions of 64 channels on scattering features (187,210 parameters on CIFAR-10).

    Args:
        input_shape: (channels, height, width), at least 8x8.
        classes: number of logits.
        groups: of the channels that are normalised together, without parameters; divides 81 times the channels.

    Raises:
        ValueError: for an input that does not fit, or groups that do not divide the channels.
        ModuleNotFoundError: without kymatio.
    """
    image = image_shape(input_shape, smallest=8, model="h_cnn")
    shape = scattered_shape(image)
    body = nn.Sequential(
        nn.Conv2d(shape[0], 64, 3, padding=1),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.Tanh(),
        nn.Flatten(),
    )
    return nn.Sequential(scattering(image, groups=groups), body, nn.Linear(features(body, shape), classes))
