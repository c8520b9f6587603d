"""H-CNN: small tanh networks on ScatterNet features.

Tramèr & Boneh, "Differentially Private Learning Needs Better Features (or Much More Data)", ICLR 2021. Features are
normalised within each example, which uses no other example and so costs no privacy; with `groups = 0` they are not
normalised, for the authors' alternative: statistics of the data, which training releases with noise.
"""

from torch import nn

from ..core.catalogue import Natural, Variant
from ..core.nets.scatter import scattered_shape, scattering
from ..core.nets.shapes import features, image_shape


def h_cnn(
    *,
    input_shape: tuple[int, ...],
    classes: int,
    # 27 divides the 81 channels of grey images, and so the 243 of colour images.
    groups: int = 27,
    widths: tuple[int, int],
    pooled: bool,
    hidden: int | None,
    model: str,
) -> nn.Module:
    """Two 3x3 tanh convolutions on scattering features.

    Args:
        input_shape: (channels, height, width), at least 8x8.
        classes: number of logits.
        groups: number of groups of channels that are normalised together, without parameters; divides 81 times the
            channels. 0 for no normalisation.
        widths: channels of the two convolutions.
        pooled: whether a pooling halves the resolution, or the stride of the first convolution.
        hidden: width of a hidden linear layer; None for no such layer.
        model: name of the architecture, for errors.

    Raises:
        ValueError: the input does not fit, or the groups do not divide the channels.
        ModuleNotFoundError: kymatio is missing.
    """
    image = image_shape(input_shape, smallest=8, model=model)
    shape = scattered_shape(image)
    first, second = widths
    body = nn.Sequential(
        nn.Conv2d(shape[0], first, 3, stride=1 if pooled else 2, padding=1),
        nn.Tanh(),
        *([nn.MaxPool2d(2)] if pooled else []),
        nn.Conv2d(first, second, 3, padding=1),
        nn.Tanh(),
        nn.Flatten(),
    )
    # From the shape of the features: computing them needs kymatio, which counting parameters must not.
    width = features(body, shape)
    if hidden is None:
        head = [nn.Linear(width, classes)]
    else:
        head = [nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, classes)]
    return nn.Sequential(scattering(image, groups=groups), body, *head)


VARIANTS = {
    "h_cnn": Variant(
        h_cnn,
        Natural((3, 32, 32), classes=10),
        title="H-CNN: a small tanh network on ScatterNet features, for CIFAR-10 and SVHN.",
        summary="Two 3x3 tanh convolutions of 64 channels on scattering features (187,210 parameters on CIFAR-10).",
        fixed={"widths": (64, 64), "pooled": True, "hidden": None},
    ),
    "h_cnn_small": Variant(
        h_cnn,
        Natural((1, 28, 28), classes=10),
        title="H-CNN/S: a small tanh network on ScatterNet features, for MNIST and Fashion-MNIST.",
        summary="Two 3x3 tanh convolutions and a hidden layer of 32 on scattering features "
        "(33,066 parameters on Fashion-MNIST).",
        fixed={"widths": (16, 32), "pooled": False, "hidden": 32},
    ),
}
