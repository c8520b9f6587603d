"""Wide residual networks with GroupNorm, as published and as De et al. train them privately.

Zagoruyko & Komodakis, "Wide Residual Networks", BMVC 2016: (depth - 4) / 6 blocks per stage, norm -> ReLU -> conv, and
the first block of a stage projects the output of its first norm and ReLU.
De, Berrada, Hayes, Smith & Balle, "Unlocking High-Accuracy Differentially Private Image Classification through Scale",
2022: ReLU -> norm -> standardised convolution with bias, and a separate norm on each of the three projections.
Deviation: convolutions with stride 2 are padded by a pixel on each side, where theirs pad after the image only.
"""

from torch import nn

from ..core.catalogue import Natural, Variant
from ..core.nets.residual import Residual, conv, he_normal
from ..core.nets.shapes import image_shape, refuse_groups
from ..core.nets.standardise import standardise

COLOUR = Natural((3, 32, 32), classes=10)
STEM = 16
"""Channels of the first convolution's output, which enter the narrowest norm."""


def wide_resnet(
    *,
    input_shape: tuple[int, ...],
    classes: int,
    standardised: bool = False,
    bias: bool = False,
    groups: int = 16,
    depth: int,
    widening: int,
    model: str,
) -> nn.Sequential:
    """A convolution, three stages of 16, 32 and 64 times `widening` channels, norm, average, linear layer.

    Args:
        input_shape: (channels, height, width), at least 8x8.
        classes: number of logits.
        standardised: the variant of De et al.: standardised convolutions with gains and biases, ReLU before norm, and a
            norm on each projection.
        bias: whether plain convolutions have biases; standardised convolutions always do.
        groups: of every GroupNorm; divides 16.
        depth: in the published name; 4 more than a multiple of 6.
        widening: in the published name.
        model: name of the architecture, for errors.

    Raises:
        ValueError: the input does not fit, or the groups do not divide 16.
    """
    refuse_groups(groups, STEM)
    channels, _, _ = image_shape(input_shape, smallest=8, model=model)

    def layer(entering: int, leaving: int, size: int, stride: int = 1) -> nn.Conv2d:
        return conv(entering, leaving, size, stride=stride, bias=bias or standardised)

    def before(width: int) -> tuple[nn.Module, nn.Module]:
        norm = nn.GroupNorm(groups, width)
        return (nn.ReLU(), norm) if standardised else (norm, nn.ReLU())

    def block(entering: int, width: int, stride: int) -> nn.Module:
        first = layer(entering, width, 3, stride)
        second_half = (*before(width), layer(width, width, 3))
        # Identity shortcut; the other blocks project, He et al.'s option B.
        if stride == 1 and entering == width:
            return Residual(nn.Sequential(*before(entering), first, *second_half))
        projection = layer(entering, width, 1, stride)
        if standardised:
            skip = nn.Sequential(*before(entering), projection)
            return Residual(nn.Sequential(*before(entering), first, *second_half), skip)
        return nn.Sequential(*before(entering), Residual(nn.Sequential(first, *second_half), projection))

    layers: list[nn.Module] = [layer(channels, STEM, 3)]
    entering = STEM
    for stage, width in enumerate((16 * widening, 32 * widening, 64 * widening)):
        for position in range((depth - 4) // 6):
            layers.append(block(entering, width, 2 if stage and not position else 1))
            entering = width
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(entering, classes))
    network = nn.Sequential(*layers, *before(entering), *head)
    (_draw_as_de_et_al if standardised else he_normal)(network)
    return network


def _draw_as_de_et_al(network: nn.Module) -> None:
    """Draws weights of variance 1 / fan-in, zero biases; a standardised weight's scale sets only its learning rate."""
    # A list, because `standardise` adds modules during the iteration.
    for layer in list(network.modules()):
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.normal_(layer.weight, std=layer.weight[0].numel() ** -0.5)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        if isinstance(layer, nn.Conv2d):
            standardise(layer)


VARIANTS = {
    "wrn_16_4": Variant(
        wide_resnet,
        COLOUR,
        title="WRN-16-4 with GroupNorm: private training on CIFAR-10 from scratch.",
        summary="Two blocks a stage, 4 times as wide (2,748,890 parameters on CIFAR-10; 2,753,818 standardised).",
        fixed={"depth": 16, "widening": 4},
    ),
    "wrn_28_10": Variant(
        wide_resnet,
        COLOUR,
        title="WRN-28-10 with GroupNorm: pre-trained and tuned privately, the network of the best figures on CIFAR.",
        summary="Four blocks a stage, 10 times as wide (36,479,194 parameters on CIFAR-10; 36,500,378 standardised).",
        fixed={"depth": 28, "widening": 10},
    ),
}
