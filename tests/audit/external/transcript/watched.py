"""A loop of DP-SGD as somebody else would write it, for tests of what is watched of it."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

RECORDS, BATCH = 200, 32


def digits() -> tuple[Tensor, Tensor]:
    """Images of 8 by 8 whose first column is dark in all of them."""
    coins = torch.Generator().manual_seed(0)
    inputs = torch.rand(RECORDS, 1, 8, 8, generator=coins)
    inputs[..., 0] = 0
    return inputs, torch.randint(0, 10, (RECORDS,), generator=coins)


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))


def rows(model: nn.Module, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Per-example gradients, clipped to 1 over all parameters."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters: Any, one: Tensor, label: Tensor) -> Tensor:
        return nn.functional.cross_entropy(functional_call(model, parameters, (one[None],)), label[None])

    found = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, inputs, labels)
    norms = torch.stack([each.flatten(1).square().sum(1) for each in found.values()]).sum(0).sqrt()
    scale = 1 / norms.clamp(min=1)
    return {name: each * scale.view(-1, *[1] * (each.ndim - 1)) for name, each in found.items()}


def private_steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    examples: tuple[Tensor, Tensor],
    *,
    sigma: float,
    steps: int,
    rate: float = BATCH / RECORDS,
    batch: float = BATCH,
    seed: int = 1,
) -> None:
    """Poisson sampling, clipping to 1, noise of `sigma` on the sum, division by a constant."""
    inputs, labels = examples
    coins = torch.Generator().manual_seed(seed)
    named = dict(model.named_parameters())
    for _ in range(steps):
        chosen = torch.rand(len(inputs), generator=coins) < rate
        for name, each in rows(model, inputs[chosen], labels[chosen]).items():
            noise = torch.randn(each.shape[1:], generator=coins)
            named[name].grad = (each.sum(0) + sigma * noise) / batch
        optimizer.step()
