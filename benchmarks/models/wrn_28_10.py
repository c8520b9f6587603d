"""WRN-28-10 with GroupNorm: pre-trained and tuned privately, the network of the best figures on CIFAR.

Zagoruyko & Komodakis, "Wide Residual Networks", BMVC 2016; and De, Berrada, Hayes, Smith & Balle, "Unlocking
High-Accuracy Differentially Private Image Classification through Scale", 2022, which standardises the weights.
"""

from torch import nn

from ..core.nets.shapes import Natural
from ..core.nets.wide import wide_resnet

NATURAL = Natural((3, 32, 32), classes=10)


def wrn_28_10(
    *, input_shape: tuple[int, ...], classes: int, standardised: bool = False, bias: bool = False, groups: int = 16
) -> nn.Module:
    """Four blocks a stage, 10 times as wide (36,479,194 parameters on CIFAR-10; 36,500,378 standardised).

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
        depth=28,
        widening=10,
        input_shape=input_shape,
        classes=classes,
        standardise=standardised,
        bias=bias,
        groups=groups,
        model="wrn_28_10",
    )
