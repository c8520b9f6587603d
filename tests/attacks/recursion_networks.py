"""Small networks of every kind that the recursion inverts."""

import torch
from torch import nn

LEAKY = nn.LeakyReLU


class Skip(nn.Module):
    """A block whose activation follows the sum, with an identity or a projection beside it."""

    def __init__(
        self,
        activation: type[nn.Module],
        *,
        projection: bool,
        norm: bool,
        before: bool = False,
        channels: tuple[int, int, int] | None = None,
    ) -> None:
        super().__init__()
        # Of the block's input, between its layers, and of its result; the last one's padding where they are given.
        low, middle, width = channels or (4, 6, 12 if projection else 4)
        padding = 1 if channels or not projection else 0
        self.first, self.one, self.two = (
            nn.Conv2d(1, low, 3, padding=1),
            nn.Conv2d(low, middle, 3, padding=1),
            nn.Conv2d(middle, width, 3, padding=padding),
        )
        self.pad = nn.Conv2d(low, width, 3, padding=padding) if projection else nn.Identity()
        self.norm = nn.BatchNorm2d(width) if norm else nn.Identity()
        self.act, self.mid, self.last = activation(), activation(), activation()
        self.before, self.out = before, nn.Linear(width * (36 if padding else 16), 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.act(self.first(x))
        inner = self.norm(self.two(self.mid(self.one(x))))
        x = self.last(inner) + self.pad(x) if self.before else self.last(inner + self.pad(x))
        return self.out(torch.flatten(x, 1))


class Parallel(nn.Module):
    """Two convolutions of one input, added; each alone leaves it open."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.act = nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1), nn.Tanh()
        self.out = nn.Linear(72, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.flatten(self.act(self.one(x) + self.two(x)), 1))


def conv(*layers: nn.Module, features: int, classes: int = 4, bias: bool = True) -> nn.Sequential:
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(features, classes, bias=bias))


NETWORKS = {
    "ten classes, three convolutions": lambda: conv(
        nn.Conv2d(1, 8, 3, padding=1, bias=False),
        LEAKY(0.2),
        nn.Conv2d(8, 12, 3, padding=1, bias=False),
        LEAKY(0.2),
        nn.Conv2d(12, 16, 3, padding=1, bias=False),
        LEAKY(0.2),
        features=16 * 36,
        classes=10,
        bias=False,
    ),
    "biases and strides": lambda: conv(
        nn.Conv2d(1, 8, 3, padding=1), LEAKY(0.2), nn.Conv2d(8, 12, 3, stride=2, padding=1), LEAKY(0.2), features=108
    ),
    "tanh": lambda: conv(
        nn.Conv2d(1, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 40, 3, stride=2, padding=1), nn.Tanh(), features=360
    ),
    "sigmoid": lambda: conv(nn.Conv2d(1, 8, 3, padding=1), nn.Sigmoid(), features=8 * 36),
    "dilation and groups": lambda: conv(
        nn.Conv2d(1, 8, 3, padding=2, dilation=2),
        LEAKY(0.2),
        nn.Conv2d(8, 32, 3, padding=1, groups=2),
        features=32 * 36,
    ),
    "relu, convolutions": lambda: conv(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), features=32 * 36
    ),
    "relu, linear": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(36, 60), nn.ReLU(), nn.Identity(), nn.Linear(60, 30), nn.ReLU(), nn.Linear(30, 4)
    ),
    "average pooling before the activation": lambda: conv(
        nn.Conv2d(1, 16, 3, padding=1), nn.AvgPool2d(2), LEAKY(0.2), features=16 * 9
    ),
    "batch norm": lambda: conv(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), LEAKY(0.2), features=16 * 36),
    "no activation": lambda: conv(nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 8, 3), features=8 * 16),
    "identity skip": lambda: Skip(nn.Tanh, projection=False, norm=False),
    "identity skip, leaky ReLU, batch norm": lambda: Skip(LEAKY, projection=False, norm=True),
    "projection skip": lambda: Skip(nn.Tanh, projection=True, norm=False),
    "projection skip, batch norm": lambda: Skip(LEAKY, projection=True, norm=True),
    "branches of a sum together": lambda: Skip(LEAKY, projection=True, norm=False, channels=(1, 2, 2)),
    "branches of a sum together, batch norm": lambda: Skip(nn.Tanh, projection=True, norm=True, channels=(2, 6, 3)),
}


def built(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = NETWORKS[name]()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            for values in (module.running_mean, module.running_var, module.weight, module.bias):
                assert values is not None
                nn.init.uniform_(values, 0.5, 1.5)
    return model
