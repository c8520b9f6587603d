"""DP-CNN: the plain tanh network on which DP-SGD results for CIFAR-10 and SVHN are compared.

Tramèr & Boneh, "Differentially Private Learning Needs Better Features (or Much More Data)", ICLR 2021, with
tanh after Papernot et al., "Tempered Sigmoid Activations for Deep Learning with Differential Privacy", AAAI
2021: bounded activations keep gradients small, so that less of them is clipped.
"""

from torch import nn

from ..core.nets.shapes import Natural, features, image_shape

NATURAL = Natural((3, 32, 32), classes=10)


def dp_cnn(*, input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Six 3x3 tanh convolutions with three poolings, a hidden layer of 128 (550,570 parameters on CIFAR-10).

    Args:
        input_shape: (channels, height, width), at least 8x8.
        classes: number of logits.

    Raises:
        ValueError: if the input does not fit.
    """
    channels, _, _ = image_shape(input_shape, smallest=8, model="dp_cnn")
    layers: list[nn.Module] = []
    for width in (32, 64, 128):
        for entering in (channels, width):
            layers += [nn.Conv2d(entering, width, 3, padding=1), nn.Tanh()]
        layers.append(nn.MaxPool2d(2))
        channels = width
    body = nn.Sequential(*layers, nn.Flatten())
    return nn.Sequential(body, nn.Linear(features(body, input_shape), 128), nn.Tanh(), nn.Linear(128, classes))
