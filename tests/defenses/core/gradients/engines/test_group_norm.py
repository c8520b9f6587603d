"""Gradients of a GroupNorm's weight and bias are those of autograd, of each image by itself."""

import pytest
import torch
from torch import nn

from leakbench.defenses.core.gradients.layerwise.layers import rules
from leakbench.defenses.core.gradients.layerwise.recorder import Use

from .....parameters import subtests


def last(values):
    """The same numbers with their channels last in memory."""
    return values.movedim(1, -1).contiguous().movedim(-1, 1)


def gradients(norm, inputs, signals):
    terms = rules.group_norm(Use(norm, "norm", inputs, signals), norm, len(inputs))
    return [terms[slot].rows(slice(None)) for slot in ("weight", "bias")]


@subtests("dtype", [torch.float32, torch.float64])
@subtests(("channels", "groups", "size"), [(6, 1, (5, 4)), (6, 2, (7,)), (6, 6, (5, 4)), (40, 8, ()), (33, 3, (5, 4))])
@subtests("arranged", [last, torch.Tensor.contiguous])
def test_gradients_are_those_of_autograd(channels, groups, size, dtype, arranged):
    coins = torch.Generator().manual_seed(channels + groups)
    inputs, signals = (
        arranged(torch.randn(3, channels, *size, generator=coins, dtype=dtype) + shift) for shift in (2.0, 0.5)
    )
    norm = nn.GroupNorm(groups, channels).to(dtype)
    weight, bias = gradients(norm, inputs, signals)
    # In float64 and contiguous order: with channels last PyTorch's own sums are off in the last digits of float32, and
    # up to 2.13 its backward pass crashes where nobody wants the derivative by the input.
    exact = nn.GroupNorm(groups, channels).double()
    for number in range(3):
        one = exact(inputs[number : number + 1].double().contiguous())
        expected = torch.autograd.grad(one, [exact.weight, exact.bias], signals[number : number + 1].double())
        for found, other in zip((weight, bias), expected, strict=True):
            limit = 2e-5 if dtype == torch.float32 else 1e-12
            torch.testing.assert_close(found[number], other.to(dtype), rtol=limit, atol=limit)


def test_digits_survive_a_mean_that_is_a_thousand_deviations():
    coins = torch.Generator().manual_seed(0)
    inputs, signals = torch.randn(2, 8, 16, 16, generator=coins) + 1000, torch.randn(2, 8, 16, 16, generator=coins)
    found = gradients(nn.GroupNorm(2, 8), inputs, signals)
    expected = gradients(nn.GroupNorm(2, 8).double(), inputs.double(), signals.double())
    for one, other in zip(found, expected, strict=True):
        assert float((one - other).norm()) <= 7e-5 * float(other.norm())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 3e38])
def test_an_image_spoils_no_other(bad):
    inputs, signals = (last(torch.randn(3, 21, 5, 5)) for _ in range(2))
    norm = nn.GroupNorm(7, 21)
    before = gradients(norm, inputs, signals)
    inputs[1], signals[1] = bad, bad
    for one, other in zip(gradients(norm, inputs, signals), before, strict=True):
        assert torch.equal(one[::2], other[::2])
