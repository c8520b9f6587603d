"""One overfitted and one honest classifier of digits, and the examples behind them, as a user would have them."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn


@dataclass(frozen=True)
class World:
    """A model that was trained elsewhere, members, non-members and public examples (inputs, labels)."""

    model: nn.Module
    members: tuple[torch.Tensor, torch.Tensor]
    non_members: tuple[torch.Tensor, torch.Tensor]
    public: tuple[torch.Tensor, torch.Tensor]

    def write(self, folder):
        """The examples as .npz, and the model's parameters as safetensors."""
        from safetensors.torch import save_file

        for name in ("members", "non_members", "public"):
            inputs, labels = getattr(self, name)
            np.savez(folder / f"{name}.npz", inputs=inputs.numpy(), labels=labels.numpy())
        save_file(self.model.state_dict(), str(folder / "model.safetensors"))
        return folder


@pytest.fixture(scope="session")
def overfitted() -> World:
    """Digits, 600 members known by heart."""
    from benchmarks import models

    data, target = load_digits(return_X_y=True)
    inputs = torch.tensor(data / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    labels = torch.tensor(target, dtype=torch.int64)
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
    inside, outside, public = order[:600], order[600:1200], order[1200:]
    model = models.build("mlp", input_shape=(1, 8, 8), classes=10, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    coins = torch.Generator().manual_seed(1)
    for _ in range(100):
        for batch in inside[torch.randperm(600, generator=coins)].split(50):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs[batch]), labels[batch]).backward()
            optimizer.step()
    pairs = [(inputs[chosen], labels[chosen]) for chosen in (inside, outside, public)]
    return World(model.eval(), *pairs)
