"""Residual networks against independent ones: torchvision's, and forward passes written out from the papers."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrize

from leakbench.benchmarks import models
from leakbench.benchmarks.core.nets.residual import Residual
from leakbench.benchmarks.core.nets.standardise import Standardised, standardise
from leakbench.benchmarks.models.resnet import Subsampled


def images(*shape):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def shaken(model):
    """The model in float64, all parameters moved off their initial values, so that no zero or one hides a mistake."""
    coins = torch.Generator().manual_seed(1)
    model.double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=coins, dtype=torch.float64))
    return model


class Weights:
    """The parameters of a model, handed out in the order of its layers."""

    def __init__(self, model):
        self._left = [p.detach() for p in model.parameters()]

    def take(self, n):
        taken, self._left = self._left[:n], self._left[n:]
        return taken

    def conv(self, x, stride=1):
        (weight,) = self.take(1)
        return functional.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2)

    def standardised_conv(self, x, stride=1):
        bias, weight, gain = self.take(3)
        flat = weight.flatten(1)
        centred = flat - flat.mean(1, keepdim=True)
        flat = centred / (centred.square().mean(1, keepdim=True) * flat.shape[1]).clamp(min=1e-4).sqrt()
        weight = (flat * gain.flatten(1)).view_as(weight)
        return functional.conv2d(x, weight, bias, stride=stride, padding=weight.shape[-1] // 2)

    def norm(self, x, groups):
        return functional.group_norm(x, groups, *self.take(2))

    def head(self, x):
        found = functional.linear(x.mean(dim=(2, 3)), *self.take(2))
        assert not self._left
        return found


@pytest.mark.peers
@pytest.mark.parametrize(
    "name",
    ["resnet18", pytest.param("resnet34", marks=pytest.mark.slow), pytest.param("resnet50", marks=pytest.mark.slow)],
)
def test_resnets_agree_with_torchvisions(name):
    torchvision = pytest.importorskip("torchvision", reason="needs torchvision, of the extra 'images'")
    with torch.random.fork_rng(devices=[]):
        peer = getattr(torchvision.models, name)(
            weights=None, num_classes=10, norm_layer=lambda channels: nn.GroupNorm(32, channels)
        )
    peer = shaken(peer)
    ours = models.build(name, input_shape=(3, 40, 32), classes=10, stem="imagenet").double()
    # Both have their layers in the order of the forward pass, projections last in a block.
    names = dict(zip(ours.state_dict(), peer.state_dict(), strict=True))
    state = peer.state_dict()
    ours.load_state_dict({own: state[theirs] for own, theirs in names.items()})
    batch = images(2, 3, 40, 32)
    torch.testing.assert_close(ours(batch), peer(batch), rtol=1e-9, atol=1e-9)


def test_a_cifar_stem_keeps_the_resolution_and_an_imagenet_stem_quarters_it():
    for stem, size in (("cifar", 32), ("imagenet", 8)):
        model = models.build("resnet18", input_shape=(3, 32, 32), classes=10, stem=stem)
        entering = []
        block = next(layer for layer in model.modules() if isinstance(layer, Residual))
        block.register_forward_hook(lambda layer, given, output, seen=entering: seen.append(given[0].shape))
        model(images(1, 3, 32, 32).float())
        assert entering == [(1, 64, size, size)]


def test_resnet20_is_the_network_of_gep():
    model = shaken(models.build("resnet20", input_shape=(3, 16, 16), classes=10))
    weights, x = Weights(model), images(2, 3, 16, 16)
    x = functional.relu(functional.group_norm(weights.conv(x), 4))
    for stage in range(3):
        for position in range(3):
            stride = 2 if stage and not position else 1
            inner = functional.relu(functional.group_norm(weights.conv(x, stride), 4))
            inner = functional.group_norm(weights.conv(inner), 4)
            if stride == 2:
                x = x[:, :, ::2, ::2]
                zeros = torch.zeros_like(x[:, : x.shape[1] // 2])
                x = torch.cat([zeros, x, zeros], dim=1)
            x = functional.relu(x + inner)
    torch.testing.assert_close(model(images(2, 3, 16, 16)), weights.head(x), rtol=1e-9, atol=1e-9)


def test_a_shortcut_without_parameters_pads_as_many_channels_before_as_after():
    x = images(1, 4, 3, 5)
    found = Subsampled()(x)
    assert found.shape == (1, 8, 2, 3)
    assert torch.equal(found[:, 2:6], x[:, :, ::2, ::2])
    assert not found[:, :2].any() and not found[:, 6:].any()


def test_a_plain_wide_resnet_is_that_of_zagoruyko_and_komodakis():
    model = shaken(models.build("wrn_16_4", input_shape=(3, 8, 8), classes=10))
    weights, x = Weights(model), images(2, 3, 8, 8)
    x = weights.conv(x)
    for stage in range(3):
        for position in range(2):
            stride = 2 if stage and not position else 1
            before = functional.relu(weights.norm(x, 16))
            inner = functional.relu(weights.norm(weights.conv(before, stride), 16))
            inner = weights.conv(inner)
            x = inner + (x if position else weights.conv(before, stride))
    x = functional.relu(weights.norm(x, 16))
    torch.testing.assert_close(model(images(2, 3, 8, 8)), weights.head(x), rtol=1e-9, atol=1e-9)


def test_a_standardised_wide_resnet_is_that_of_de_et_al():
    model = shaken(models.build("wrn_16_4", input_shape=(3, 8, 8), classes=10, standardised=True))
    weights, x = Weights(model), images(2, 3, 8, 8)
    x = weights.standardised_conv(x)
    for stage in range(3):
        for position in range(2):
            stride = 2 if stage and not position else 1
            inner = weights.standardised_conv(weights.norm(functional.relu(x), 16), stride)
            inner = weights.standardised_conv(weights.norm(functional.relu(inner), 16))
            # The projection comes last among the parameters of its block, and first in theirs: order is no matter.
            skip = x if position else weights.standardised_conv(weights.norm(functional.relu(x), 16), stride)
            x = inner + skip
    x = weights.norm(functional.relu(x), 16)
    torch.testing.assert_close(model(images(2, 3, 8, 8)), weights.head(x), rtol=1e-9, atol=1e-9)


def test_standardised_weights_have_mean_zero_and_variance_gain_squared_over_fan_in():
    layer = standardise(nn.Conv2d(6, 5, 3).double())
    gain = torch.linspace(0.5, 2.0, 5, dtype=torch.float64)
    with torch.no_grad():
        layer.get_parameter("parametrizations.weight.0.gain").copy_(gain.view(5, 1, 1, 1))
    weight = layer.weight.detach().flatten(1)
    torch.testing.assert_close(weight.mean(dim=1), torch.zeros(5, dtype=torch.float64), rtol=0, atol=1e-15)
    torch.testing.assert_close(weight.var(dim=1, correction=0), gain**2 / 54, rtol=1e-12, atol=0)


def test_constant_weights_are_standardised_to_zero_and_keep_a_finite_derivative():
    weight = torch.full((2, 3, 3, 3), 0.7, dtype=torch.float64, requires_grad=True)
    found = Standardised(2).double()(weight)
    torch.testing.assert_close(found, torch.zeros_like(found), rtol=0, atol=1e-12)
    (slope,) = torch.autograd.grad(found[0, 0, 0, 0], weight)
    torch.testing.assert_close(slope[0, 0, 0, 0].item(), (1 - 1 / 27) / 0.01, rtol=1e-9, atol=0)


def test_initial_weights_are_those_of_the_papers():
    plain = models.build("resnet18", input_shape=(3, 32, 32), classes=10)
    widest = [layer for layer in plain.modules() if isinstance(layer, nn.Conv2d)][-1]
    assert widest.weight.std().item() == pytest.approx((2 / (512 * 9)) ** 0.5, rel=0.01)
    wide = models.build("wrn_16_4", input_shape=(3, 32, 32), classes=10, standardised=True)
    for layer in wide.modules():
        if parametrize.is_parametrized(layer, "weight"):
            assert isinstance(layer, nn.Conv2d) and layer.bias is not None and not layer.bias.any()
            assert (layer.get_parameter("parametrizations.weight.0.gain") == 1).all()
    last = [layer for layer in wide.modules() if isinstance(layer, nn.Linear)][-1]
    assert last.weight.std().item() == pytest.approx(256**-0.5, rel=0.05)


def test_what_does_not_fit_a_residual_network_is_refused():
    def refused(name, message, shape=(3, 32, 32), **settings):
        with pytest.raises(ValueError, match=message):
            models.build(name, input_shape=shape, classes=10, **settings)

    refused("resnet18", "stem must be 'cifar' or 'imagenet', got 'cifer'", stem="cifer")
    refused("resnet50", "groups must divide 64, the channels of the narrowest norm, got 24", groups=24)
    refused("wrn_16_4", "groups must divide 16, the channels of the narrowest norm, got 0", groups=0)
    refused("resnet34", "with at least 32 x 32 pixels, got", shape=(3, 31, 32), stem="imagenet")
