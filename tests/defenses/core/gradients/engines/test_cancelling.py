"""One example moves a sum by its bound at most where what its gradient is made from cancels, or vanishes in squares."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from leakbench.defenses.core import Block, Coordinates, Engine, Layout, StepPlan, clip
from leakbench.defenses.core.gradients.layerwise.cost import Strategy
from leakbench.defenses.core.gradients.layerwise.factors import Lookup
from leakbench.defenses.core.gradients.layerwise.layers import convolution, linear
from leakbench.defenses.core.gradients.layerwise.layers.convolution import Convolution
from leakbench.defenses.core.gradients.layerwise.layers.linear import Outer, OuterSum
from leakbench.defenses.core.plan.codec import Everything

from .....parameters import subtests
from .convolutions import geometry_of

LARGEST = 1 + 1e-5


def products(outputs, targets):
    return (outputs * targets).flatten(1).sum(dim=1)


def moved(model, example, norm, *, codec=None):
    """By how many norms a clipped sum moves without an example of these inputs and derivatives by the outputs."""
    plan = StepPlan(Block(codec=codec or Everything(Layout.of(model).dim), bound=clip(norm)))
    engine, coins = Engine(model, loss=products, engine="layerwise"), torch.Generator().manual_seed(0)
    inputs, targets = (
        torch.cat([values, 1e-3 * torch.randn(3, *values.shape[1:], generator=coins)]) for values in example
    )
    whole, rest = (engine.clipped_sums(plan, inputs[i:], targets[i:])[0] for i in (0, 1))
    return float((whole - rest).norm()) / norm


@pytest.mark.parametrize("positions", [2, 4, 8])
@pytest.mark.parametrize("kind", ["linear", "convolution", "embedding"])
@pytest.mark.parametrize("way", [Strategy.GRAM, Strategy.PIXELS, Strategy.PAIRS])
def test_norms_are_as_right_as_they_say_where_positions_cancel(monkeypatch, positions, kind, way):
    for module in (linear, convolution):
        monkeypatch.setattr(module, "cheapest", lambda *_: way)
    # Numbers that are alike are rounded alike: in float32 what a long sum loses does not average out.
    width, out, count, coins = 4096, 4, 40, torch.Generator().manual_seed(0)
    sizes = 1 + torch.rand(count, generator=coins)
    near = sizes * (1 + 10 ** (-3.5 + 1.5 * torch.rand(count, generator=coins)))
    inputs = torch.stack([sizes, near], dim=1).repeat(1, positions // 2).unsqueeze(2).repeat(1, 1, width)
    signals = torch.tensor([1.0, -1.0]).repeat(positions // 2).view(1, -1, 1).repeat(count, 1, out)
    rows = torch.bmm(signals.double().mT, inputs.double()).flatten(1)
    if kind == "linear":
        squares = OuterSum(inputs, signals).squares()
    elif kind == "embedding":
        rows = (inputs.double() * signals[:, :, :1]).sum(dim=1)
        squares = Lookup(torch.full((count, positions), 7), inputs * signals[:, :, :1], vocabulary=9).squares()
    else:
        pixels, derivatives = (values.mT.unflatten(2, (2, -1)).contiguous() for values in (inputs, signals))
        geometry = geometry_of(
            channels=(width, out), kernel=(1, 1), stride=(1, 1), dilation=(1, 1), padding=(0, 0, 0, 0)
        )
        squares = Convolution(pixels, derivatives, geometry).squares()
    assert bool(((squares.value - rows.square().sum(dim=1)).abs() <= squares.slack).all())


@pytest.mark.long
@subtests(("small", "large"), [(2.6e-23, 1.8e19), (1e-22, 1e18)])
@subtests("swapped", [False, True])
@subtests("masked", [False, True])
def test_factors_whose_squares_vanish(small, large, swapped, masked):
    width, out, positions = (64, 1024, 8) if swapped else (1024, 64, 8)
    one, few = torch.full((1, positions, width), small), torch.zeros(1, positions, out)
    few[..., 0] = large
    if swapped:
        one, few = torch.zeros(1, positions, width), torch.full((1, positions, out), small)
        one[..., 0] = large
    kept = torch.ones(width * out, dtype=torch.bool)
    if masked:  # of one position: several go by rows
        one, few, kept[1] = one[:, 0], few[:, 0] / 2, False
    codec = Coordinates.of(kept) if masked else None
    length = float((few.reshape(-1, out).double().T @ one.reshape(-1, width).double()).norm())
    assert moved(nn.Linear(width, out, bias=False), (one, few), length / 3, codec=codec) <= LARGEST


class Twice(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, inputs):
        return torch.stack([self.layer(inputs[:, 0]), self.layer(inputs[:, 1])], dim=1)


@subtests("size", [1e2, 1e4, 1e6])
@subtests("layer", ["linear", "convolution"])
def test_uses_of_a_weight_that_cancel(size, layer):
    coins = torch.Generator().manual_seed(0)
    shapes = {"linear": ((300,), (40,)), "convolution": ((16, 8, 8), (16, 8, 8))}[layer]
    inputs, signals = (torch.randn(1, *shape, generator=coins) for shape in shapes)
    module = nn.Linear(300, 40) if layer == "linear" else nn.Conv2d(16, 16, 3, padding=1)
    example = torch.stack([inputs, inputs * (1 + 1e-6)], dim=1) * size, torch.stack([signals, -signals], dim=1)
    for norm in (1e-4, 1e-6):
        assert moved(Twice(module), example, norm * size) <= LARGEST


@pytest.mark.parametrize("size", [1e2, 1e4, 1e6])
def test_what_a_parametrisation_takes_away(size):
    torch.manual_seed(0)
    model = parametrizations.weight_norm(nn.Linear(64, 8, bias=False))
    model.get_parameter("parametrizations.weight.original0").requires_grad_(False)
    inputs = (nn.functional.normalize(torch.as_tensor(model.weight)[:1]) * size).detach()
    signals = torch.eye(8)[:1]
    for norm in (1e-7, 1e-8):
        assert moved(model, (inputs, signals), norm * size) <= LARGEST


@subtests("spread", [0.5, 8.0, 18.0])
@subtests("share", [0.02, 0.5, 1.0])
def test_masked_norms_of_linear_layers_are_right_whatever_the_sizes_of_factors(spread, share):
    coins = torch.Generator().manual_seed(0)

    def sizes(width):
        return torch.randn(400, width, generator=coins) * 10.0 ** (spread * torch.randn(400, width, generator=coins))

    inputs, signals = (sizes(width).clamp(-1e18, 1e18) for width in (9, 7))
    mask = torch.rand(63, generator=coins) < share
    mask[5] = True
    wide = (signals.double().unsqueeze(2) * inputs.double().unsqueeze(1)).flatten(1) * mask
    expected = wide.square().sum(dim=1)
    found = Outer(inputs, signals).masked_squares(mask).value
    assert bool(((found - expected).abs() <= 2e-6 * expected).all())


@subtests("rows", [1, 2, 5])
@subtests("width", [8, 64])
def test_masked_norms_of_many_outputs_that_are_alike_do_not_drift(rows, width):
    for size in (1.0001, 1.3, 1.7):
        inputs, signals = torch.full((rows, width), 1.37), torch.full((rows, 50_000), size)
        mask = torch.ones(width * 50_000, dtype=torch.bool)
        mask[::7] = False
        squares = signals.double().square() @ mask.view(50_000, width).double()
        expected = (squares * inputs.double().square()).sum(dim=1)
        found = Outer(inputs, signals).masked_squares(mask).value
        assert bool(((found - expected).abs() <= 1e-5 * expected).all())
