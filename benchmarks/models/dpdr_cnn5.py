"""The five-layer network of DPDR for CIFAR-10 and SVHN.

Liu et al., "DPDR: Gradient Decomposition and Reconstruction for Differentially Private Deep Learning",
arXiv:2406.02744.
Deviation: all that is known of it here is the number of layers and that it normalises by group. Widths, tanh,
pooling and groups of 8 channels are our choice.
"""

from torch import nn

from ..core.nets.shapes import Natural, image_shape

NATURAL = Natural((3, 32, 32), classes=10)
CHANNELS_PER_GROUP = 8


def dpdr_cnn5(*, input_shape: tuple[int, ...], classes: int, group_norm: bool = True) -> nn.Module:
    """Five 3x3 convolutions and a global average, no hidden linear layer (412,426 parameters on CIFAR-10).

    Args:
        input_shape: (channels, height, width), at least 8x8.
        classes: number of logits, which are the channels of the last convolution.
        group_norm: normalises after each of the first four convolutions; 411,466 parameters without.

    Raises:
        ValueError: if the input does not fit.
    """
    entering, _, _ = image_shape(input_shape, smallest=8, model="dpdr_cnn5")
    layers: list[nn.Module] = []
    for width in (32, 64, 128, 256):
        layers.append(nn.Conv2d(entering, width, 3, padding=1))
        if group_norm:
            layers.append(nn.GroupNorm(width // CHANNELS_PER_GROUP, width))
        layers.append(nn.Tanh())
        if width < 256:
            layers.append(nn.MaxPool2d(2))
        entering = width
    return nn.Sequential(*layers, nn.Conv2d(entering, classes, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
