"""Residual networks with GroupNorm: blocks, initial weights, and the ResNets of one to many depths.

He, Zhang, Ren & Sun, "Deep Residual Learning for Image Recognition", CVPR 2016, in torchvision's layout: no
biases in convolutions, the stride of a bottleneck in its 3x3 convolution, 1x1 projections where a shortcut
changes shape. GroupNorm (Wu & He, ECCV 2018) takes the place of BatchNorm, with as many parameters, because
each example needs a gradient of its own.
"""

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from .shapes import image_shape, refuse_groups

WIDTHS = (64, 128, 256, 512)
"""Channels of the four stages, before a bottleneck's expansion."""


class Residual(nn.Module):
    """What a body makes of its input, added to what a shortcut makes of it, and something done to the sum.

    Args:
        body: the branch with the weights.
        skip: the other branch; passes its input on where None.
        after: of the sum; nothing where None.
    """

    def __init__(self, body: nn.Module, skip: nn.Module | None = None, after: nn.Module | None = None) -> None:
        super().__init__()
        self.body, self.skip, self.after = body, skip or nn.Identity(), after or nn.Identity()

    def forward(self, inputs: Tensor) -> Tensor:
        """The sum, and what is done to it."""
        return self.after(self.body(inputs) + self.skip(inputs))


def conv(entering: int, leaving: int, size: int, *, stride: int = 1, bias: bool = False) -> nn.Conv2d:
    """A convolution that keeps the resolution up to its stride."""
    return nn.Conv2d(entering, leaving, size, stride=stride, padding=size // 2, bias=bias)


def he_normal(model: nn.Module) -> nn.Module:
    """Draws the weights of all convolutions as He et al. do, for ReLUs and by what leaves them; returns the model."""
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return model


def basic(entering: int, width: int, stride: int, groups: int) -> Residual:
    """Two 3x3 convolutions (ResNet-18 and 34)."""
    body = nn.Sequential(
        conv(entering, width, 3, stride=stride),
        nn.GroupNorm(groups, width),
        nn.ReLU(),
        conv(width, width, 3),
        nn.GroupNorm(groups, width),
    )
    return Residual(body, _projection(entering, width, stride, groups), nn.ReLU())


def bottleneck(entering: int, width: int, stride: int, groups: int) -> Residual:
    """A 3x3 convolution between two 1x1 ones, the last of which has four times the channels (ResNet-50)."""
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


def resnet(
    block: Callable[[int, int, int, int], Residual],
    depths: Sequence[int],
    *,
    expansion: int,
    input_shape: tuple[int, ...],
    classes: int,
    stem: str,
    groups: int,
    model: str,
) -> nn.Sequential:
    """Stem, four stages, global average, linear layer.

    Args:
        block: from (channels entering, width, stride, groups) to a block.
        depths: number of blocks in each stage.
        expansion: channels that leave a block, in widths.
        input_shape: (channels, height, width).
        classes: number of logits.
        stem: "cifar", a 3x3 convolution at full resolution; or "imagenet", 7x7 with stride 2 and a pooling.
        groups: of every GroupNorm.
        model: name of the architecture, for errors.

    Raises:
        ValueError: for an input that does not fit, an unknown stem, or groups that do not divide 64.
    """
    if stem not in ("cifar", "imagenet"):
        raise ValueError(f"stem must be 'cifar' or 'imagenet', got {stem!r}")
    refuse_groups(groups, WIDTHS[0])
    channels, _, _ = image_shape(input_shape, smallest=8 if stem == "cifar" else 32, model=model)
    entering = WIDTHS[0]
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


def _projection(entering: int, leaving: int, stride: int, groups: int) -> nn.Module | None:
    if stride == 1 and entering == leaving:
        return None
    return nn.Sequential(conv(entering, leaving, 1, stride=stride), nn.GroupNorm(groups, leaving))
