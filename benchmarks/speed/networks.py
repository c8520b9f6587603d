"""Workloads of the speed benchmarks: networks of the papers, two families of growing width, random data.

Speed depends on the shape of a network alone, so weights are fresh and data random.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .. import models

CLASSES = 10
GREY, COLOUR = (1, 28, 28), (3, 32, 32)


class ResNetBlock(nn.Module):
    """Residual block: two 3x3 convolutions with GroupNorm, and a shortcut."""

    def __init__(self, entering: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(*_normed(entering, width, 3, stride), nn.ReLU(), *_normed(width, width, 3, 1))
        same = stride == 1 and entering == width
        self.around = nn.Identity() if same else nn.Sequential(*_normed(entering, width, 1, stride))
        self.last = nn.ReLU()

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns ReLU(body + shortcut)."""
        return self.last(self.body(inputs) + self.around(inputs))


def _normed(entering: int, width: int, kernel: int, stride: int) -> list[nn.Module]:
    padding = (kernel - 1) // 2
    # Without biases: the following GroupNorm has one for each channel.
    return [nn.Conv2d(entering, width, kernel, stride, padding, bias=False), nn.GroupNorm(16, width)]


def resnet18_gn() -> nn.Module:
    """ResNet-18 for 32x32 images with GroupNorm of 16 groups: a 3x3 stem and no max-pool.

    He et al., "Deep Residual Learning for Image Recognition", CVPR 2016; GroupNorm because BatchNorm mixes examples.
    """
    layers: list[nn.Module] = [*_normed(3, 64, 3, 1), nn.ReLU()]
    entering = 64
    for width, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [ResNetBlock(entering, width, stride), ResNetBlock(width, width, 1)]
        entering = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, CLASSES))


def widening_cnn(width: int) -> nn.Module:
    """Three 3x3 tanh convolutions with poolings and a linear layer; parameters grow with the square of the width."""
    layers: list[nn.Module] = []
    entering = 3
    for channels in (width, 2 * width, 4 * width):
        layers += [nn.Conv2d(entering, channels, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2)]
        entering = channels
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * 4 * entering, CLASSES))


def widening_mlp(width: int) -> nn.Module:
    """One hidden layer on 28x28 images; parameters grow with the width."""
    return models.build("mlp", input_shape=GREY, classes=CLASSES, hidden=width)


def _named(name: str, shape: tuple[int, ...]) -> Callable[[], nn.Module]:
    return lambda: models.build(name, input_shape=shape, classes=CLASSES)


# name -> (shape of an input, its builder, its required number of parameters)
_FIXED: dict[str, tuple[tuple[int, ...], Callable[[], nn.Module], int]] = {
    "dp_cnn_small": (GREY, _named("dp_cnn_small", GREY), 26_010),
    "dp_cnn": (COLOUR, _named("dp_cnn", COLOUR), 550_570),
    "resnet18_gn": (COLOUR, resnet18_gn, 11_173_962),
}
_FAMILIES: dict[str, tuple[tuple[int, ...], Callable[[int], nn.Module]]] = {
    "mlp": (GREY, widening_mlp),
    "cnn": (COLOUR, widening_cnn),
}


@dataclass(frozen=True)
class Workload:
    """Network at a batch size.

    Attributes:
        network: "dp_cnn_small", "dp_cnn", "resnet18_gn", or a family, "mlp" or "cnn".
        batch: number of examples.
        width: of a network of a family; 0 for the others.
    """

    network: str
    batch: int
    width: int = 0

    @property
    def name(self) -> str:
        """Name on the command line."""
        return f"{self.network}{self.width or ''}-{self.batch}"

    def model(self) -> nn.Module:
        """Builds a freshly initialised network on the CPU; torch's own generator is left unchanged.

        Raises:
            ValueError: it does not have the number of parameters that is quoted for it.
        """
        with torch.random.fork_rng(devices=[]):
            # The CPU's generator alone: torch.manual_seed would also reseed every GPU.
            torch.default_generator.manual_seed(0)
            if self.network in _FAMILIES:
                return _FAMILIES[self.network][1](self.width)
            _, build, expected = _FIXED[self.network]
            model = build()
        if (count := parameters(model)) != expected:
            raise ValueError(f"{self.network} must have {expected} parameters, got {count}")
        return model

    def data(self) -> tuple[Tensor, Tensor]:
        """Returns random images and labels on the CPU, always the same."""
        coins = torch.Generator().manual_seed(0)
        shape = (_FAMILIES if self.network in _FAMILIES else _FIXED)[self.network][0]
        return (
            torch.randn(self.batch, *shape, generator=coins),
            torch.randint(0, CLASSES, (self.batch,), generator=coins),
        )


def parameters(model: nn.Module) -> int:
    """Number of trained parameters."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)
