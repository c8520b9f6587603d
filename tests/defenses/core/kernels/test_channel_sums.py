"""Sums over positions, and of products, are those of each image's own numbers."""

import pytest
import torch

from leakbench.defenses.core.gradients.layerwise.layers import rules

from ....parameters import subtests

SHAPES = (
    (1, 1, 1, 1),
    (3, 1, 5, 2),
    (2, 7, 3, 3),
    (4, 8, 1, 1),
    (3, 16, 2, 3),
    (2, 17, 4, 1),
    (2, 40, 3, 5),
    (5, 33, 7),
)


def sums(values, others):
    """Of a norm that neither shifts nor scales: its weight's gradients are the sums of products."""
    mean = values.new_zeros(len(values), 1)
    return rules._normal_sums(values, others, mean, mean + 1)[::-1]


def last(values):
    """The same numbers with their channels last in memory."""
    return values.movedim(1, -1).contiguous().movedim(-1, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_sums_are_those_of_float64(shape, dtype, monkeypatch):
    coins = torch.Generator().manual_seed(sum(shape))
    values, others = (last(torch.randn(shape, generator=coins, dtype=dtype)) for _ in range(2))
    over = tuple(range(2, len(shape)))
    expected = values.double().sum(dim=over), (values.double() * others.double()).sum(dim=over)
    called = []
    compiled = rules.channel_sums
    monkeypatch.setattr(rules, "channel_sums", lambda **kind: called.append(kind) or compiled(**kind))
    found, limit = sums(values, others), 1e-6 if dtype == torch.float32 else 1e-13
    assert shape[1] == 1 or called == [{"wide": dtype == torch.float64}]  # the stride of one channel may be any
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one.double(), other, rtol=limit, atol=limit)
    # In another order in memory, and where there is no position: by PyTorch.
    plain = sums(values.contiguous(), others.flip(0).flip(0).contiguous())
    flat = sums(values.flatten(2)[:, :, 0], others.flatten(2)[:, :, 0])
    for one, other in zip(plain, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(flat[1], values.flatten(2)[:, :, 0] * others.flatten(2)[:, :, 0])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 3e38])
def test_an_image_spoils_no_other_and_nothing_is_written_beside_the_sums(bad):
    values, others = last(torch.ones(3, 21, 5, 5)), last(torch.ones(3, 21, 5, 5))
    values[1], others[1] = bad, bad
    room = [torch.full((3 * 21 + 2,), -7.0) for _ in range(2)]
    memory = torch.full((2 * 21 + 2,), -7.0, dtype=torch.float64)
    mean, scale = torch.zeros(3, 7), torch.ones(3, 7)
    given = (values, others, memory[1:], mean, scale, *(each[1:] for each in room))
    rules.channel_sums(wide=False)(*(each.data_ptr() for each in given), 3, 25, 21, 7)
    for each in (*room, memory):
        assert each[0] == each[-1] == -7
    for each in room:
        assert bool((each[1:-1].view(3, 21)[[0, 2]] == 25).all())


@subtests("dtype", [torch.float32, torch.float64])
@subtests(("channels", "groups"), [(6, 1), (6, 2), (6, 6), (40, 8), (33, 3)])
@subtests("arranged", [last, torch.Tensor.contiguous])
def test_gradients_of_a_norm_are_those_of_autograd(channels, groups, dtype, arranged):
    coins = torch.Generator().manual_seed(channels + groups)
    inputs, signals = (
        arranged(torch.randn(3, channels, 5, 4, generator=coins, dtype=dtype) + shift) for shift in (2.0, 0.5)
    )
    norm = torch.nn.GroupNorm(groups, channels).to(dtype)
    weight, bias = rules._normal_sums(signals, inputs, *rules._statistics(inputs, norm))
    # In float64 and contiguous order: with channels last PyTorch's own sums are off in the last digits of float32, and
    # up to 2.13 its backward pass crashes where nobody wants the derivative by the input.
    exact = torch.nn.GroupNorm(groups, channels).double()
    for number in range(3):
        one = exact(inputs[number : number + 1].double().contiguous())
        expected = torch.autograd.grad(one, [exact.weight, exact.bias], signals[number : number + 1].double())
        for found, other in zip((weight, bias), expected, strict=True):
            limit = 2e-5 if dtype == torch.float32 else 1e-12
            torch.testing.assert_close(found[number], other.to(dtype), rtol=limit, atol=limit)


def test_a_tensor_that_is_worth_several_threads_is_left_to_pytorch(monkeypatch):
    monkeypatch.setattr(rules, "_WORTH_A_THREAD", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(rules, "channel_sums", lambda **_: pytest.fail("called"))
    values = last(torch.ones(3, 4, 2, 2))
    assert bool((sums(values, values)[1] == 4).all())
