"""Networks that begin with GroupNorm, which PyTorch 2.10 to 2.13 cannot train where channels are last."""

import importlib
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from leakbench.defenses.core import Execution, poisson, train
from leakbench.defenses.core.gradients.numerics import torch_workarounds
from leakbench.defenses.dp_sgd import dp_sgd

from .....parameters import subtests

ORDERS = (torch.channels_last, torch.contiguous_format)
WANTED = [some for some in itertools.product((False, True), repeat=3) if any(some)]


class ChannelsLast(nn.Module):
    """Arranges images by itself, in front of its first layer."""

    def forward(self, images):
        return images.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)


@subtests("dtype", [torch.float32, torch.float64])
@subtests("wanted", WANTED)
def test_derivatives_of_a_group_norm_are_the_same_in_both_orders(wanted, dtype):
    coins = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=coins, dtype=dtype) for shape in ((20, 6, 8, 8), (6,), (6,))]
    signals = torch.randn(20, 6, 8, 8, generator=coins, dtype=dtype)

    def derivatives(order):
        images, weight, bias = (v.clone().requires_grad_(w) for v, w in zip(values, wanted, strict=True))
        out = F.group_norm(images.contiguous(memory_format=order), 2, weight, bias)
        asked = [each for each in (images, weight, bias) if each.requires_grad]
        return torch.autograd.grad(out, asked, signals.contiguous(memory_format=order))

    limit = 1e-4 if dtype == torch.float32 else 1e-11
    for one, other in zip(*map(derivatives, ORDERS), strict=True):
        torch.testing.assert_close(one, other, rtol=limit, atol=limit)


@pytest.mark.long
@subtests("order", ORDERS)
@subtests("first", [nn.Identity, ChannelsLast])
@subtests("engine", ["auto", "torch.func", "one_by_one"])
def test_a_network_that_begins_with_a_group_norm_is_trained(engine, first, order):
    torch.manual_seed(0)
    model = nn.Sequential(first(), nn.GroupNorm(1, 6), nn.Conv2d(6, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 3))
    data = torch.randn(40, 6, 8, 8).contiguous(memory_format=order), torch.arange(40) % 3
    defense, execution = dp_sgd(noise_multiplier=1.0), Execution(engine=engine)
    run = train(model, data, defense, sampling=poisson(0.5), steps=2, execution=execution)
    assert run.claim(1e-5).epsilon < 10
    for parameter in run.model.parameters():
        assert bool(parameter.isfinite().all())


def test_where_pytorch_holds_its_own_kernel_is_left_alone():
    assert (torch_workarounds._REGISTRATION is None) == (torch_workarounds._release() >= (2, 14))


def test_a_module_that_is_loaded_again_leaves_the_kernel_as_it_is():
    before = torch_workarounds._REGISTRATION
    importlib.reload(torch_workarounds)
    assert torch_workarounds._REGISTRATION is before
    images = torch.randn(2, 6, 4, 4)
    torch.nn.GroupNorm(3, 6)(images).sum().backward()
