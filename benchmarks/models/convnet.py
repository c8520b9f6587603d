"""Small smooth networks for gradient inversion, from whose gradient an image can be reconstructed.

Zhu, Liu & Han, "Deep Leakage from Gradients", NeurIPS 2019: convolutions with stride instead of pooling and smooth
activations throughout, so that second derivatives exist and are cheap. `lenet_sigmoid` is the network of that paper,
with its initial weights, uniform in [-1/2, 1/2].

`convnet` is similar, with tanh instead of the sigmoid, 3x3 instead of 5x5 kernels, and a first layer that keeps the
resolution. With torch's own initial weights, 200 steps of gradient matching by cosine reconstruct crops of `photos` at
over 30 dB; on the paper's network 200 steps reach 12 dB, and thousands of second-order steps are needed.
"""

from torch import nn

from ..core.catalogue import Natural, Variant
from ..core.nets.shapes import features, image_shape

COLOUR = Natural((3, 32, 32), classes=10)


def convnet(*, input_shape: tuple[int, ...], classes: int, model: str) -> nn.Module:
    """Three 3x3 tanh convolutions of 12, 24 and 48 channels and a linear layer (44,098 parameters on `photos`).

    Args:
        input_shape: (channels, height, width), at least 4x4.
        classes: number of logits.
        model: name of the architecture, for errors.

    Raises:
        ValueError: the input does not fit.
    """
    channels, _, _ = image_shape(input_shape, smallest=4, model=model)
    body = nn.Sequential(
        nn.Conv2d(channels, 12, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(12, 24, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.Conv2d(24, 48, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.Flatten(),
    )
    return nn.Sequential(body, nn.Linear(features(body, input_shape), classes))


def lenet_sigmoid(*, input_shape: tuple[int, ...], classes: int, model: str) -> nn.Module:
    """Three 5x5 sigmoid convolutions of 12 channels and a linear layer (15,826 parameters on `photos`).

    Args:
        input_shape: (channels, height, width), at least 4x4.
        classes: number of logits.
        model: name of the architecture, for errors.

    Raises:
        ValueError: the input does not fit.
    """
    channels, _, _ = image_shape(input_shape, smallest=4, model=model)
    body = nn.Sequential(
        nn.Conv2d(channels, 12, 5, stride=2, padding=2),
        nn.Sigmoid(),
        nn.Conv2d(12, 12, 5, stride=2, padding=2),
        nn.Sigmoid(),
        nn.Conv2d(12, 12, 5, padding=2),
        nn.Sigmoid(),
        nn.Flatten(),
    )
    network = nn.Sequential(body, nn.Linear(features(body, input_shape), classes))
    for parameter in network.parameters():
        # torch's own initial weights, a tenth as large, leave hardly anything of the input behind three sigmoids.
        nn.init.uniform_(parameter, -0.5, 0.5)
    return network


VARIANTS = {
    "convnet": Variant(
        convnet, COLOUR, title="A small tanh network for gradient inversion, in the manner of the LeNet of DLG."
    ),
    "lenet_sigmoid": Variant(
        lenet_sigmoid, COLOUR, title="The sigmoid LeNet of Deep Leakage from Gradients, with weights in [-1/2, 1/2]."
    ),
}
