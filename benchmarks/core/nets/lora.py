"""Low-rank adaptation (LoRA): layers with a frozen weight W plus a trained product of two small layers.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022, section 4.1: W x + (alpha / rank) B A x,
where A is Gaussian and B is zero, so that training starts from the original network. Private training: Yu et al.,
"Differentially Private Fine-tuning of Language Models", ICLR 2022. As in their classification, the last layer is
trained in full, and biases and norms stay frozen.
Deviation: all linear layers and convolutions get a product, where the papers choose among those of a transformer.

A and B are ordinary layers without bias, so engines for per-example gradients support them. For a convolution, A has
its kernel, stride and padding and `rank` output channels, and B is 1 x 1: together they are a product of matrices
[input channels x kernel, rank] and [rank, output channels], for each of its groups.
"""

import math
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

ADAPTED = (nn.Linear, nn.Conv2d)
"""Layers to which products are added, also if their weights are parametrised. Subclasses are left alone, because they
may compute another function."""


class LoRALayer(nn.Module):
    """frozen(x) + scale * up(down(x)).

    Args:
        frozen: linear layer or convolution, which is frozen here.
        name: of that layer, for errors.
        rank: of the product, for each group of channels.
        scale: factor of the product (dimensionless).
        generator: source of the initial weights of `down`.

    Raises:
        ValueError: `rank` exceeds that of the layer.
    """

    def __init__(
        self, frozen: nn.Linear | nn.Conv2d, name: str, *, rank: int, scale: float, generator: torch.Generator
    ) -> None:
        super().__init__()
        entering, leaving = frozen.weight[0].numel(), len(frozen.weight)
        self.frozen, self.scale = frozen.requires_grad_(False), scale
        if isinstance(frozen, nn.Linear):
            groups, self.down = 1, nn.Linear(entering, rank, bias=False)
            self.up: nn.Module = nn.Linear(rank, leaving, bias=False)
        else:
            groups = frozen.groups
            down = nn.Conv2d(
                frozen.in_channels,
                rank * groups,
                (frozen.kernel_size[0], frozen.kernel_size[1]),
                (frozen.stride[0], frozen.stride[1]),
                frozen.padding if isinstance(frozen.padding, str) else (frozen.padding[0], frozen.padding[1]),
                (frozen.dilation[0], frozen.dilation[1]),
                groups,
                bias=False,
                padding_mode=frozen.padding_mode,
            )
            self.down, self.up = down, nn.Conv2d(rank * groups, leaving, 1, groups=groups, bias=False)
        if rank > (most := min(entering, leaving // groups)):
            raise ValueError(f"rank must be at most {most}, that of layer '{name}', got {rank}")
        with torch.no_grad():
            # Variance 1 / fan-in keeps the entries of A x as large as those of x. Drawn on the CPU, so that a seed
            # gives the same weights on every device.
            drawn = torch.randn(self.down.weight.shape, generator=generator) / math.sqrt(entering)
            self.down.weight.copy_(drawn)
            nn.init.zeros_(self.up.get_parameter("weight"))
        self.to(frozen.weight)

    def forward(self, inputs: Tensor) -> Tensor:
        """Output of the frozen layer plus that of the product."""
        return self.frozen(inputs) + self.scale * self.up(self.down(inputs))


def adapt(model: nn.Module, head: nn.Module, *, rank: int, scale: float, generator: torch.Generator) -> nn.Module:
    """Freezes a model except its head, and adds a product to each other linear layer and convolution, in place.

    Args:
        model: changed in place and returned.
        head: layer of it that is trained in full, because a new task needs a new head.
        rank: of the products.
        scale: of the products.
        generator: source of their initial weights.

    Raises:
        ValueError: the rank exceeds that of a layer, or there is no other layer.
    """
    model.requires_grad_(False)
    adapted: dict[nn.Module, LoRALayer] = {}  # a layer used in several places stays a single layer
    # Constructors' draws are discarded, and must not advance the caller's generator.
    with torch.random.fork_rng(devices=[]):
        for above, parent in list(model.named_modules()):
            for name, layer in parent._modules.items():
                if layer is head or not _known(layer):
                    continue
                if layer not in adapted:
                    full = f"{above}.{name}" if above else name
                    adapted[layer] = LoRALayer(layer, full, rank=rank, scale=scale, generator=generator)
                parent._modules[name] = adapted[layer]
    if not adapted:
        raise ValueError("there must be a linear layer or convolution before the last layer, got none")
    head.requires_grad_(True)
    return model


def _known(layer: nn.Module | None) -> TypeGuard[nn.Linear | nn.Conv2d]:
    return isinstance(layer, ADAPTED) and (type(layer) in ADAPTED or parametrize.is_parametrized(layer))
