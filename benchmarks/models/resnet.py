"""ResNets with GroupNorm: a stem, four stages of residual blocks, a global average and a linear layer.

He, Zhang, Ren & Sun, "Deep Residual Learning for Image Recognition", CVPR 2016, with GroupNorm (Wu & He, "Group
Normalization", ECCV 2018) instead of BatchNorm, because DP-SGD needs per-example gradients. Initial weights are those
of He et al. The layout is torchvision's: no biases in convolutions, the stride of a bottleneck in its 3x3 convolution,
1x1 projections at shortcuts that change shape.

ResNet-20 has the shortcuts without parameters of He et al., section 4.2, and the norms without parameters, in four
groups, of Yu, Zhang, Chen & Liu, "Do Not Let Privacy Overbill Utility: Gradient Embedding Perturbation for Private
Learning", ICLR 2021.
"""

from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.nn import functional

from ..core.catalogue import Natural, Variant
from ..core.nets.residual import Residual, conv, he_normal
from ..core.nets.shapes import image_shape, refuse_groups

COLOUR = Natural((3, 32, 32), classes=10)
WIDTHS = (64, 128, 256, 512)
"""Channels of the four stages, before a bottleneck's expansion."""
# 6 n + 2 layers with n blocks per stage (He et al., section 4.2): n = 3 is ResNet-20.
GROUPS_OF_GEP, BLOCKS_OF_GEP = 4, 3


def resnet(
    *,
    input_shape: tuple[int, ...],
    classes: int,
    stem: str = "cifar",
    groups: int = 32,
    block: Callable[[int, int, int, int], Residual],
    expansion: int,
    depths: Sequence[int],
    model: str,
) -> nn.Sequential:
    """Stem, four stages, global average, linear layer.

    Args:
        input_shape: (channels, height, width), at least 8x8; 32x32 with the stem of ImageNet.
        classes: number of logits.
        stem: "cifar", a 3x3 convolution, or "imagenet", a 7x7 convolution with stride 2 and a pooling.
        groups: of every GroupNorm; divides 64.
        block: maps (input channels, width, stride, groups) to a block.
        expansion: output channels of a block, in widths.
        depths: number of blocks in each stage.
        model: name of the architecture, for errors.

    Raises:
        ValueError: the input does not fit, the stem is unknown, or the groups do not divide 64.
    """
    if stem not in ("cifar", "imagenet"):
        raise ValueError(f"stem must be 'cifar' or 'imagenet', got {stem!r}")
    # The narrowest width, of which all others are multiples.
    refuse_groups(groups, WIDTHS[0])
    channels, _, _ = image_shape(input_shape, smallest=8 if stem == "cifar" else 32, model=model)
    entering = WIDTHS[0]
    # At 32x32 pixels, ImageNet's stem would leave 8x8 pixels to the first stage.
    if stem == "cifar":
        layers: list[nn.Module] = [conv(channels, entering, 3), nn.GroupNorm(groups, entering), nn.ReLU()]
    else:
        layers = [conv(channels, entering, 7, stride=2), nn.GroupNorm(groups, entering), nn.ReLU()]
        layers.append(nn.MaxPool2d(3, stride=2, padding=1))
    for stage, (width, depth) in enumerate(zip(WIDTHS, depths, strict=True)):
        for position in range(depth):
            layers.append(block(entering, width, 2 if stage and not position else 1, groups))
            entering = expansion * width
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(entering, classes))
    network = nn.Sequential(*layers, *head)
    he_normal(network)
    return network


def basic(entering: int, width: int, stride: int, groups: int) -> Residual:
    """Block of two 3x3 convolutions (ResNet-18 and 34)."""
    body = nn.Sequential(
        conv(entering, width, 3, stride=stride),
        nn.GroupNorm(groups, width),
        nn.ReLU(),
        conv(width, width, 3),
        nn.GroupNorm(groups, width),
    )
    return Residual(body, _projection(entering, width, stride, groups), nn.ReLU())


def bottleneck(entering: int, width: int, stride: int, groups: int) -> Residual:
    """Block of a 3x3 convolution between 1x1 convolutions, the last with four times the channels (ResNet-50)."""
    body = nn.Sequential(
        conv(entering, width, 1),
        nn.GroupNorm(groups, width),
        nn.ReLU(),
        conv(width, width, 3, stride=stride),
        nn.GroupNorm(groups, width),
        nn.ReLU(),
        conv(width, 4 * width, 1),
        nn.GroupNorm(groups, 4 * width),
    )
    return Residual(body, _projection(entering, 4 * width, stride, groups), nn.ReLU())


def _projection(entering: int, leaving: int, stride: int, groups: int) -> nn.Module | None:
    if stride == 1 and entering == leaving:
        return None
    return nn.Sequential(conv(entering, leaving, 1, stride=stride), nn.GroupNorm(groups, leaving))


class Subsampled(nn.Module):
    """Shortcut without parameters: every other pixel, with channels of zeros added on both sides."""

    # Option A of He et al. (section 3.3), their choice on CIFAR-10; projections would add parameters.
    def forward(self, inputs: Tensor) -> Tensor:
        """Returns twice the channels at half the resolution."""
        new = inputs.shape[1] // 2
        return functional.pad(inputs[:, :, ::2, ::2], (0, 0, 0, 0, new, new))


def resnet20(*, input_shape: tuple[int, ...], classes: int, model: str) -> nn.Module:
    """Nine blocks of two 3x3 convolutions, norms without parameters (268,346 parameters on CIFAR-10).

    Args:
        input_shape: (channels, height, width), at least 8x8.
        classes: number of logits.
        model: name of the architecture, for errors.

    Raises:
        ValueError: the input does not fit.
    """
    channels, _, _ = image_shape(input_shape, smallest=8, model=model)

    def normalised(entering: int, leaving: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
        return conv(entering, leaving, 3, stride=stride), nn.GroupNorm(GROUPS_OF_GEP, leaving, affine=False)

    layers: list[nn.Module] = [*normalised(channels, 16), nn.ReLU()]
    for width in (16, 32, 64):
        for position in range(BLOCKS_OF_GEP):
            halves = width > 16 and position == 0
            first = normalised(width // 2, width, 2) if halves else normalised(width, width)
            body = nn.Sequential(*first, nn.ReLU(), *normalised(width, width))
            layers.append(Residual(body, Subsampled() if halves else None, nn.ReLU()))
    return he_normal(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes)))


VARIANTS = {
    "resnet18": Variant(
        resnet,
        COLOUR,
        title="ResNet-18 with GroupNorm: DPDR's network for SVHN, and a common target of gradient inversion.",
        summary="Eight blocks of two 3x3 convolutions (11,173,962 parameters on CIFAR-10).",
        fixed={"block": basic, "expansion": 1, "depths": (2, 2, 2, 2)},
    ),
    "resnet20": Variant(
        resnet20,
        COLOUR,
        title="ResNet-20 as GEP trains it: nothing but convolutions and one linear layer has parameters.",
    ),
    "resnet34": Variant(
        resnet,
        COLOUR,
        title="ResNet-34 with GroupNorm: the network that random sparsification is attacked on.",
        summary="Sixteen blocks of two 3x3 convolutions (21,282,122 parameters on CIFAR-10).",
        fixed={"block": basic, "expansion": 1, "depths": (3, 4, 6, 3)},
    ),
    "resnet50": Variant(
        resnet,
        COLOUR,
        title="ResNet-50 with GroupNorm, which DP-SSGD trains on ImageNet.",
        summary="Sixteen bottlenecks of three convolutions (23,520,842 parameters on CIFAR-10).",
        fixed={"block": bottleneck, "expansion": 4, "depths": (3, 4, 6, 3)},
    ),
}
