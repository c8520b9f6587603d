"""ResNet-50 with GroupNorm, which DP-SSGD trains on ImageNet.

He, Zhang, Ren & Sun, "Deep Residual Learning for Image Recognition", CVPR 2016, with Wu & He, "Group Normalization",
ECCV 2018, in the place of BatchNorm. Weights are drawn as in the first of the two.
"""

from torch import nn

from ..core.nets.residual import bottleneck, resnet
from ..core.nets.shapes import Natural

NATURAL = Natural((3, 32, 32), classes=10)


def resnet50(*, input_shape: tuple[int, ...], classes: int, stem: str = "cifar", groups: int = 32) -> nn.Module:
    """Sixteen bottlenecks of three convolutions (23,520,842 parameters on CIFAR-10).

    Args:
        input_shape: (channels, height, width), at least 8x8; 32x32 with the stem of ImageNet.
        classes: number of logits.
        stem: "cifar", one 3x3 convolution, or "imagenet", a 7x7 one with stride 2 and a pooling.
        groups: of every GroupNorm; divides 64.

    Raises:
        ValueError: for an input that does not fit, an unknown stem, or groups that do not divide 64.
    """
    return resnet(
        bottleneck,
        (3, 4, 6, 3),
        expansion=4,
        input_shape=input_shape,
        classes=classes,
        stem=stem,
        groups=groups,
        model="resnet50",
    )
