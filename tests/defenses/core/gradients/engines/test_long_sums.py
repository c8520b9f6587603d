"""Sums over thousands of examples, chosen so that float32 would round all later ones otherwise without the first."""

import math

import pytest
import torch
from torch import nn

from leakbench.defenses.core import Block, Engine, Everything, StepPlan, clip

from .....parameters import subtests


class Mean(nn.Module):
    """The mean over all places of a layer's first channel."""

    def __init__(self, layer, channel):
        super().__init__()
        self.layer, self.channel = layer, channel

    def forward(self, x):
        out = self.layer(x).movedim(self.channel, 1)
        return out[:, :1].flatten(1).mean(dim=1)


def one(*shape, at=0):
    """So many inputs that are 1 in one place and 0 elsewhere."""

    def made(n):
        x = torch.zeros(n, *shape)
        x.view(n, -1)[:, at] = 1.0
        return x

    return made


CASES = {
    "few products": (nn.Linear(8, 2, bias=False), 1, one(8)),
    "linear": (nn.Linear(256, 40, bias=False), 1, one(256)),
    "bias": (nn.Linear(1, 3), 1, lambda n: torch.zeros(n, 1)),
    "sequence": (nn.Linear(8, 2, bias=False), 2, one(3, 8)),
    "embedding": (nn.Embedding(20, 4), 2, lambda n: torch.full((n, 1), 5)),
    "convolution, rows": (nn.Conv2d(3, 8, 3, padding=1, bias=False), 1, one(3, 4, 4, at=5)),
    "convolution, sums": (nn.Conv2d(16, 32, 3, padding=1, bias=False), 1, one(16, 3, 3, at=4)),
    "convolution, one pixel": (nn.Conv2d(64, 128, 1, bias=False), 1, one(64, 2, 2)),
    "weight norm": (nn.utils.parametrizations.weight_norm(nn.Linear(8, 2, bias=False)), 1, one(8)),
}


def removal(layer, channel, made, n):
    """How far the first of 2n chosen examples moves the sum, in bounds."""
    engine = Engine(Mean(layer, channel), loss=lambda outputs, targets: outputs * targets, engine="layerwise")
    plan = StepPlan(Block(codec=Everything(engine.layout.dim), bound=clip(1.0)))

    def summed(targets):
        return engine.clipped_sums(plan, made(len(targets)), targets)[0]

    # What one example adds to the number that it moves most: clipped, and for a derivative of 1.
    clipped, unit = (float(summed(torch.tensor([y])).abs().max()) * z for y, z in ((1e6, 1.0), (1e-6, 1e6)))
    edge = 2.0 ** round(math.log2(n * clipped))
    first = min(round(edge / clipped), 2 * n - 3)
    # With the first example just above a power of two, where a last digit is twice as large as below, without it.
    targets = torch.full((2 * n,), -0.4 * edge * 2.0**-23 / unit)
    targets[:first] = 1e6
    targets[first] = (edge + clipped / 2 - clipped * first) / unit
    return float((summed(targets) - summed(targets[1:])).norm())


@pytest.mark.long
@subtests("name", CASES)
def test_without_one_example_a_sum_is_that_example_less(name):
    layer, channel, made = CASES[name]
    assert removal(layer, channel, made, 4096) <= 1.03


def test_float32_would_lose_it():
    # What the test above would find: the same numbers, added up in float32.
    n, edge = 4096, 2.0**12
    terms = torch.full((2 * n,), -0.4 * edge * 2.0**-23)
    terms[:n], terms[n] = 1.0, 0.5
    sums = [[float(s) for s in t.numpy().cumsum(dtype="float32")][-1] for t in (terms, terms[1:])]
    assert sums[0] - sums[1] > 1.3
