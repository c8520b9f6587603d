"""WRN-16-4 with GroupNorm: private training on CIFAR-10 from scratch.

Zagoruyko & Komodakis, "Wide Residual Networks", BMVC 2016; and De, Berrada, Hayes, Smith & Balle, "Unlocking
High-Accuracy Differentially Private Image Classification through Scale", 2022, which standardises the weights.
"""

from torch import nn

from ..core.nets.shapes import Natural
from ..core.nets.wide import wide_resnet

NATURAL = Natural((3, 32, 32), classes=10)


def wrn_16_4(
    *, input_shape: tuple[int, ...], classes: int, standardised: bool = False, bias: bool = False, groups: int = 16
) -> nn.Module:
    """Two blocks a stage, 4 times as wide (2,748,890 parameters on CIFAR-10; 2,753,818 standardised).

    Args:
        input_shape: (channels, height, width), at least 8x8.
        classes: number of logits.
        standardised: the variant of De et al.: standardised convolutions with gains and biases, ReLU before norm, and a
            norm on each projection.
        bias: whether the plain convolutions have biases; standardised ones always do.
        groups: of every GroupNorm; divides 16.

    Raises:
        ValueError: for an input that does not fit, or groups that do not divide 16.
    """
    return wide_resnet(
        depth=16,
        widening=4,
        input_shape=input_shape,
        classes=classes,
        standardise=standardised,
        bias=bias,
        groups=groups,
        model="wrn_16_4",
    )
