"""DP-CNN/S: the tanh network on which DP-SGD results for MNIST and Fashion-MNIST are compared.

Papernot et al., "Tempered Sigmoid Activations for Deep Learning with Differential Privacy", AAAI 2021.
"""

from torch import nn

from ..core.nets.shapes import Natural, features, image_shape

NATURAL = Natural((1, 28, 28), classes=10)


def dp_cnn_small(*, input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Two large-stride tanh convolutions, one hidden layer of 32 (26,010 parameters on MNIST).

    Args:
        input_shape: (channels, height, width), at least 16x16.
        classes: number of logits.

    Raises:
        ValueError: if the input does not fit.
    """
    channels, _, _ = image_shape(input_shape, smallest=16, model="dp_cnn_small")
    body = nn.Sequential(
        nn.Conv2d(channels, 16, 8, stride=2, padding=2),
        nn.Tanh(),
        nn.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, 4, stride=2),
        nn.Tanh(),
        nn.MaxPool2d(2, stride=1),
        nn.Flatten(),
    )
    return nn.Sequential(body, nn.Linear(features(body, input_shape), 32), nn.Tanh(), nn.Linear(32, classes))
