"""DP-CNN: the tanh networks on which results of DP-SGD are compared.

Tramèr & Boneh, "Differentially Private Learning Needs Better Features (or Much More Data)", ICLR 2021, with tanh after
Papernot et al., "Tempered Sigmoid Activations for Deep Learning with Differential Privacy", AAAI 2021: bounded
activations keep gradients small, so that less of them is clipped.
"""

from torch import nn

from ..core.catalogue import Natural, Variant
from ..core.nets.shapes import features, image_shape


def dp_cnn(*, input_shape: tuple[int, ...], classes: int, model: str) -> nn.Module:
    """Six 3x3 tanh convolutions with three poolings, a hidden layer of 128 (550,570 parameters on CIFAR-10).

    Args:
        input_shape: (channels, height, width), at least 8x8.
        classes: number of logits.
        model: name of the architecture, for errors.

    Raises:
        ValueError: the input does not fit.
    """
    channels, _, _ = image_shape(input_shape, smallest=8, model=model)
    layers: list[nn.Module] = []
    for width in (32, 64, 128):
        for entering in (channels, width):
            layers += [nn.Conv2d(entering, width, 3, padding=1), nn.Tanh()]
        layers.append(nn.MaxPool2d(2))
        channels = width
    body = nn.Sequential(*layers, nn.Flatten())
    return nn.Sequential(body, nn.Linear(features(body, input_shape), 128), nn.Tanh(), nn.Linear(128, classes))


def dp_cnn_small(
    *, input_shape: tuple[int, ...], classes: int, channels_per_group: int | None, model: str
) -> nn.Module:
    """Two large-stride tanh convolutions, one hidden layer of 32 (26,010 parameters on MNIST).

    Args:
        input_shape: (channels, height, width), at least 16x16.
        classes: number of logits.
        channels_per_group: of a GroupNorm after each convolution; None for no GroupNorm.
        model: name of the architecture, for errors.

    Raises:
        ValueError: the input does not fit.
    """
    channels, _, _ = image_shape(input_shape, smallest=16, model=model)

    def norm(width: int) -> list[nn.Module]:
        return [] if channels_per_group is None else [nn.GroupNorm(width // channels_per_group, width)]

    body = nn.Sequential(
        # Padding as in the authors' code; a padding of 3, as elsewhere, gives as many parameters but another network.
        nn.Conv2d(channels, 16, 8, stride=2, padding=2),
        *norm(16),
        nn.Tanh(),
        nn.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, 4, stride=2),
        *norm(32),
        nn.Tanh(),
        nn.MaxPool2d(2, stride=1),
        nn.Flatten(),
    )
    return nn.Sequential(body, nn.Linear(features(body, input_shape), 32), nn.Tanh(), nn.Linear(32, classes))


VARIANTS = {
    "dp_cnn": Variant(
        dp_cnn,
        Natural((3, 32, 32), classes=10),
        title="DP-CNN: the plain tanh network on which DP-SGD results for CIFAR-10 and SVHN are compared.",
    ),
    "dp_cnn_small": Variant(
        dp_cnn_small,
        Natural((1, 28, 28), classes=10),
        title="DP-CNN/S: the tanh network on which DP-SGD results for MNIST and Fashion-MNIST are compared.",
        fixed={"channels_per_group": None},
    ),
}
