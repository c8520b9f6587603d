"""ResNet-20 as GEP trains it: nothing but convolutions and one linear layer has parameters.

He, Zhang, Ren & Sun, "Deep Residual Learning for Image Recognition", CVPR 2016, section 4.2, with their shortcuts
without parameters; and Yu, Zhang, Chen & Liu, "Do Not Let Privacy Overbill Utility: Gradient Embedding Perturbation for
Private Learning", ICLR 2021, for GroupNorm with four groups and no affine parameters.
"""

from torch import Tensor, nn
from torch.nn import functional

from ..core.nets.residual import Residual, conv, he_normal
from ..core.nets.shapes import Natural, image_shape

NATURAL = Natural((3, 32, 32), classes=10)
GROUPS, BLOCKS = 4, 3


class Subsampled(nn.Module):
    """Every other pixel, and further channels of zeros on both sides: the shortcut without parameters."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Twice the channels at half the resolution."""
        new = inputs.shape[1] // 2
        return functional.pad(inputs[:, :, ::2, ::2], (0, 0, 0, 0, new, new))


def resnet20(*, input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Nine blocks of two 3x3 convolutions, norms without parameters (268,346 parameters on CIFAR-10).

    Args:
        input_shape: (channels, height, width), at least 8x8.
        classes: number of logits.

    Raises:
        ValueError: if the input does not fit.
    """
    channels, _, _ = image_shape(input_shape, smallest=8, model="resnet20")

    def normalised(entering: int, leaving: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
        return conv(entering, leaving, 3, stride=stride), nn.GroupNorm(GROUPS, leaving, affine=False)

    layers: list[nn.Module] = [*normalised(channels, 16), nn.ReLU()]
    for width in (16, 32, 64):
        for position in range(BLOCKS):
            halves = width > 16 and position == 0
            first = normalised(width // 2, width, 2) if halves else normalised(width, width)
            body = nn.Sequential(*first, nn.ReLU(), *normalised(width, width))
            layers.append(Residual(body, Subsampled() if halves else None, nn.ReLU()))
    return he_normal(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes)))
