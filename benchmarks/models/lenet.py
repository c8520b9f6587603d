"""LeNet-5 for colour images.

LeCun, Bottou, Bengio & Haffner, "Gradient-Based Learning Applied to Document Recognition", Proc. IEEE 1998.
Deviation: three channels, full connections, max-pooling and a linear output, as usual for CIFAR-10; papers on private
training call it "LeNet" without details.
"""

from torch import nn

from ..core.catalogue import Natural
from ..core.nets.shapes import features, image_shape

NATURAL = Natural((3, 32, 32), classes=10)


def lenet(*, input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Two 5x5 tanh convolutions with pooling, hidden layers of 120 and 84 (62,006 parameters on CIFAR-10).

    Args:
        input_shape: (channels, height, width), at least 16x16.
        classes: number of logits.

    Raises:
        ValueError: the input does not fit.
    """
    channels, _, _ = image_shape(input_shape, smallest=16, model="lenet")
    body = nn.Sequential(
        nn.Conv2d(channels, 6, 5),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Flatten(),
    )
    return nn.Sequential(
        body,
        nn.Linear(features(body, input_shape), 120),
        nn.Tanh(),
        nn.Linear(120, 84),
        nn.Tanh(),
        nn.Linear(84, classes),
    )
