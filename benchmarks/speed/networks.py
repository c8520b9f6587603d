"""Workloads of the speed benchmarks: networks of the papers, two families of growing width, random data.

Speed depends on the shapes of network and data alone, so weights are untrained and data random.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import models

CLASSES = 10
GREY, COLOUR = (1, 28, 28), (3, 32, 32)


def widening_cnn(width: int) -> nn.Module:
    """Three 3x3 tanh convolutions with poolings and a linear layer; parameters grow with the square of the width."""
    layers: list[nn.Module] = []
    entering = 3
    for channels in (width, 2 * width, 4 * width):
        layers += [nn.Conv2d(entering, channels, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2)]
        entering = channels
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * 4 * entering, CLASSES))


def _catalogued(
    name: str, shape: tuple[int, ...], **settings: Any
) -> tuple[tuple[int, ...], Callable[[int], nn.Module]]:
    return shape, lambda _width: models.build(name, input_shape=shape, classes=CLASSES, **settings)


# name -> (shape of an input, its builder from a width)
_NETWORKS: dict[str, tuple[tuple[int, ...], Callable[[int], nn.Module]]] = {
    "dp_cnn_small": _catalogued("dp_cnn_small", GREY),
    "dp_cnn": _catalogued("dp_cnn", COLOUR),
    "resnet18_gn": _catalogued("resnet18", COLOUR, groups=16),
    "mlp": (GREY, lambda width: models.build("mlp", input_shape=GREY, classes=CLASSES, hidden=width)),
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
        """Builds a freshly initialised network on the CPU; torch's own generator is left unchanged."""
        with torch.random.fork_rng(devices=[]):
            # The CPU's generator alone: torch.manual_seed would also reseed every GPU.
            torch.default_generator.manual_seed(0)
            return _NETWORKS[self.network][1](self.width)

    def data(self) -> tuple[Tensor, Tensor]:
        """Returns random images and labels on the CPU, always the same."""
        generator = torch.Generator().manual_seed(0)
        shape, _ = _NETWORKS[self.network]
        return (
            torch.randn(self.batch, *shape, generator=generator),
            torch.randint(0, CLASSES, (self.batch,), generator=generator),
        )


def parameters(model: nn.Module) -> int:
    """Number of trained parameters."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)
