"""Convolutional networks of DPDR, with four and five layers and group normalisation.

Liu et al., "DPDR: Gradient Decomposition and Reconstruction for Differentially Private Deep Learning",
arXiv:2406.02744.
Deviation: of the paper's networks only the number of layers and the group normalisation are known. The network of four
layers is DP-CNN/S with a group norm after each convolution; in the network of five, widths, tanh and pooling are our
choice, as are groups of 8 channels in both.
"""

from torch import nn

from ..core.catalogue import Natural, Variant
from ..core.nets.shapes import image_shape
from .dp_cnn import dp_cnn_small

CHANNELS_PER_GROUP = 8


def dpdr_cnn5(*, input_shape: tuple[int, ...], classes: int, group_norm: bool = True, model: str) -> nn.Module:
    """Five 3x3 convolutions and a global average, no hidden linear layer (412,426 parameters on CIFAR-10).

    Args:
        input_shape: (channels, height, width), at least 8x8.
        classes: number of logits, which are the channels of the last convolution.
        group_norm: whether the first four convolutions are each followed by a GroupNorm; 411,466 parameters without.
        model: name of the architecture, for errors.

    Raises:
        ValueError: the input does not fit.
    """
    entering, _, _ = image_shape(input_shape, smallest=8, model=model)
    layers: list[nn.Module] = []
    for width in (32, 64, 128, 256):
        layers.append(nn.Conv2d(entering, width, 3, padding=1))
        if group_norm:
            layers.append(nn.GroupNorm(width // CHANNELS_PER_GROUP, width))
        layers.append(nn.Tanh())
        if width < 256:
            layers.append(nn.MaxPool2d(2))
        entering = width
    # The last convolution has a channel per class, so its global average is the logits.
    return nn.Sequential(*layers, nn.Conv2d(entering, classes, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten())


VARIANTS = {
    "dpdr_cnn4": Variant(
        dp_cnn_small,
        Natural((1, 28, 28), classes=10),
        title="The four-layer network of DPDR for MNIST.",
        summary="DP-CNN/S with a group norm after each convolution (26,106 parameters on MNIST).",
        fixed={"channels_per_group": CHANNELS_PER_GROUP},
    ),
    "dpdr_cnn5": Variant(
        dpdr_cnn5,
        Natural((3, 32, 32), classes=10),
        title="The five-layer network of DPDR for CIFAR-10 and SVHN.",
    ),
}
