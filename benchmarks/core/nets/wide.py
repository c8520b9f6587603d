"""Wide residual networks with GroupNorm, as they were published and as De et al. train them privately.

Zagoruyko & Komodakis, "Wide Residual Networks", BMVC 2016: (depth - 4) / 6 blocks a stage, norm -> ReLU -> conv, and
the first block of a stage projects what has been through its first norm and ReLU.
De, Berrada, Hayes, Smith & Balle, "Unlocking High-Accuracy Differentially Private Image Classification through Scale",
2022: ReLU -> norm -> standardised convolution with bias, and a norm of its own on each of the three projections.
Deviation: convolutions with stride 2 are padded by one pixel on each side, where theirs pad after the image only.
"""

from torch import nn

from .residual import Residual, conv, he_normal
from .shapes import image_shape, refuse_groups
from .standardise import standardised

STEM = 16
"""Channels that leave the first convolution, and enter the narrowest norm."""


def wide_resnet(
    *,
    depth: int,
    widening: int,
    input_shape: tuple[int, ...],
    classes: int,
    standardise: bool,
    bias: bool,
    groups: int,
    model: str,
) -> nn.Sequential:
    """A first convolution, three stages of 16, 32 and 64 times `widening` channels, norm, average, linear layer.

    Args:
        depth: of the published name: 4 more than a multiple of 6.
        widening: of the published name.
        input_shape: (channels, height, width).
        classes: number of logits.
        standardise: the variant of De et al.
        bias: in the convolutions of the published network; standardised ones always have one.
        groups: of every GroupNorm.
        model: name of the architecture, for errors.

    Raises:
        ValueError: for an input that does not fit, or groups that do not divide 16.
    """
    refuse_groups(groups, STEM)
    channels, _, _ = image_shape(input_shape, smallest=8, model=model)

    def layer(entering: int, leaving: int, size: int, stride: int = 1) -> nn.Conv2d:
        return conv(entering, leaving, size, stride=stride, bias=bias or standardise)

    def before(width: int) -> tuple[nn.Module, nn.Module]:
        norm = nn.GroupNorm(groups, width)
        return (nn.ReLU(), norm) if standardise else (norm, nn.ReLU())

    def block(entering: int, width: int, stride: int) -> nn.Module:
        first = layer(entering, width, 3, stride)
        rest = (*before(width), layer(width, width, 3))
        if stride == 1 and entering == width:
            return Residual(nn.Sequential(*before(entering), first, *rest))
        projection = layer(entering, width, 1, stride)
        if standardise:
            skip = nn.Sequential(*before(entering), projection)
            return Residual(nn.Sequential(*before(entering), first, *rest), skip)
        return nn.Sequential(*before(entering), Residual(nn.Sequential(first, *rest), projection))

    layers: list[nn.Module] = [layer(channels, STEM, 3)]
    entering = STEM
    for stage, width in enumerate((16 * widening, 32 * widening, 64 * widening)):
        for position in range((depth - 4) // 6):
            layers.append(block(entering, width, 2 if stage and not position else 1))
            entering = width
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(entering, classes))
    network = nn.Sequential(*layers, *before(entering), *head)
    if standardise:
        _standardise(network)
    else:
        he_normal(network)
    return network


def _standardise(network: nn.Module) -> None:
    """De et al.: variance 1 / fan-in, biases zero; the scale of standardised weights only sets their learning rate."""
    for layer in list(network.modules()):
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.normal_(layer.weight, std=layer.weight[0].numel() ** -0.5)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        if isinstance(layer, nn.Conv2d):
            standardised(layer)
