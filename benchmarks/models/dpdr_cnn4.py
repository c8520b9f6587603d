"""The four-layer network of DPDR for MNIST.

Liu et al., "DPDR: Gradient Decomposition and Reconstruction for Differentially Private Deep Learning",
arXiv:2406.02744.
Deviation: all that is known of it here is the number of layers and that it normalises by group. This one is
DP-CNN/S with a group norm after each convolution, in groups of 8 channels.
"""

from torch import nn

from ..core.nets.shapes import Natural, features, image_shape

NATURAL = Natural((1, 28, 28), classes=10)
CHANNELS_PER_GROUP = 8


def dpdr_cnn4(*, input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """DP-CNN/S with a group norm after each convolution (26,106 parameters on MNIST).

    Args:
        input_shape: (channels, height, width), at least 16x16.
        classes: number of logits.

    Raises:
        ValueError: if the input does not fit.
    """
    channels, _, _ = image_shape(input_shape, smallest=16, model="dpdr_cnn4")
    body = nn.Sequential(
        nn.Conv2d(channels, 16, 8, stride=2, padding=2),
        nn.GroupNorm(16 // CHANNELS_PER_GROUP, 16),
        nn.Tanh(),
        nn.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, 4, stride=2),
        nn.GroupNorm(32 // CHANNELS_PER_GROUP, 32),
        nn.Tanh(),
        nn.MaxPool2d(2, stride=1),
        nn.Flatten(),
    )
    return nn.Sequential(body, nn.Linear(features(body, input_shape), 32), nn.Tanh(), nn.Linear(32, classes))
