"""ScatterNet features: kymatio's, for any derivative, dtype and shape; and what is normalised of them."""

import copy
import sys
from typing import Any

import numpy as np
import pytest
import torch

from leakbench.benchmarks import models
from leakbench.benchmarks.core.nets import scatter
from leakbench.benchmarks.core.nets.scatter import Scattering, scattered_shape

pytestmark = pytest.mark.peers

pytest.importorskip("kymatio", reason="needs kymatio, of the extra 'images'")

SHAPES = [(3, 32, 32), (1, 28, 28), (2, 30, 37), (1, 8, 9)]


def images(shape, n=2, dtype=torch.float64):
    return torch.rand(n, *shape, generator=torch.Generator().manual_seed(0), dtype=dtype)


@pytest.mark.parametrize("shape", SHAPES)
def test_features_are_those_of_kymatios_numpy(shape):
    from kymatio import Scattering2D

    peer: Any = Scattering2D(J=2, shape=shape[1:], frontend="numpy")  # it changes its class when it is made
    batch = images(shape)
    found = Scattering(*shape[1:]).double()(batch)
    assert found.shape == (2, *scattered_shape(shape))
    # Its filters are float32, and its Gaussian is a product of two only up to that.
    torch.testing.assert_close(found, torch.from_numpy(np.array(peer(batch.numpy()))).flatten(1, 2), rtol=0, atol=5e-7)


def test_single_precision_loses_what_single_precision_loses():
    scattering = Scattering(32, 32)
    batch = images((3, 32, 32), dtype=torch.float32)
    exact = copy.deepcopy(scattering).double()(batch.double())
    torch.testing.assert_close(scattering(batch).double(), exact, rtol=0, atol=2e-6)


def test_derivatives_of_any_order_are_right():
    scattering = Scattering(8, 8).double()
    image = images((1, 8, 8), n=1).requires_grad_()
    assert torch.autograd.gradcheck(scattering, (image,), fast_mode=True)
    for order in (slice(0, 1), slice(3, 4), slice(14, 15), slice(40, 41)):  # average, fine, coarse, second
        assert torch.autograd.gradgradcheck(lambda x, o=order: scattering(x)[:, o], (image,), fast_mode=True)


def test_derivatives_of_a_black_image_are_finite():
    black = torch.zeros(1, 1, 8, 8, requires_grad=True)
    (first,) = torch.autograd.grad(Scattering(8, 8)(black).sum(), black, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), black)
    assert first.isfinite().all() and second.isfinite().all()
    assert (first != 0).any()


def test_it_can_be_mapped_and_differentiated_by_torch_func():
    scattering = Scattering(12, 12).double()
    batch = images((2, 12, 12), n=3)

    def energy(image):
        return scattering(image.unsqueeze(0)).square().sum()

    mapped = torch.func.vmap(torch.func.grad(energy))(batch)
    each = torch.stack([torch.func.grad(energy)(image) for image in batch])
    torch.testing.assert_close(mapped, each, rtol=1e-10, atol=1e-12)


def test_a_channels_last_batch_gives_the_same():
    scattering = Scattering(32, 32)
    batch = images((3, 32, 32), dtype=torch.float32)
    found = scattering(batch.contiguous(memory_format=torch.channels_last))
    torch.testing.assert_close(found, scattering(batch), rtol=0, atol=1e-6)


def test_filters_are_constants_that_follow_the_model_and_are_not_saved():
    scattering = Scattering(8, 8)
    assert not list(scattering.parameters())
    assert not scattering.state_dict()
    copied = copy.deepcopy(scattering).double()
    assert {values.dtype for values in copied.buffers()} == {torch.float64}
    assert {values.dtype for values in scattering.buffers()} == {torch.float32}
    assert Scattering(8, 8).fine.dtype == torch.float32  # the copy did not touch what other models share
    assert scattering.to("meta").fine.is_meta


@pytest.mark.parametrize("name", ["h_cnn", "h_cnn_small", "scatter_linear"])
def test_groups_of_channels_are_normalised_within_each_example(name):
    model = models.build(name, input_shape=(3, 32, 32), classes=10)
    seen = []
    (norm,) = [layer for layer in model.modules() if isinstance(layer, torch.nn.GroupNorm)]
    norm.register_forward_hook(lambda layer, given, output: seen.append(output))
    model(images((3, 32, 32), dtype=torch.float32))
    groups = seen[0].unflatten(1, (27, 9)).flatten(2)
    torch.testing.assert_close(groups.mean(dim=2), torch.zeros(2, 27), rtol=0, atol=1e-5)
    # Less than 1 where a group has little energy, by GroupNorm's constant.
    variances = groups.var(dim=2, correction=0)
    assert variances.max() < 1.001 and variances.min() > 0.8
    with pytest.raises(ValueError, match="groups must divide 243, the channels of the narrowest norm, got 10"):
        models.build(name, input_shape=(3, 32, 32), classes=10, groups=10)


def test_colours_are_standardised_by_public_constants_and_grey_images_are_not():
    colour, grey = (scatter.scattering((channels, 16, 16), groups=27) for channels in (3, 1))
    batch = images((3, 16, 16), dtype=torch.float32)
    mean, deviation = (torch.tensor(v).view(3, 1, 1) for v in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
    bare = torch.nn.Sequential(Scattering(16, 16), torch.nn.GroupNorm(27, 243, affine=False))
    torch.testing.assert_close(colour(batch), bare((batch - mean) / deviation), rtol=0, atol=1e-5)
    bare = torch.nn.Sequential(Scattering(16, 16), torch.nn.GroupNorm(27, 81, affine=False))
    torch.testing.assert_close(grey(batch[:, :1]), bare(batch[:, :1]), rtol=0, atol=1e-5)


def test_without_kymatio_the_extra_is_named_and_models_can_be_counted_still(monkeypatch):
    monkeypatch.setitem(sys.modules, "kymatio", None)
    monkeypatch.setitem(sys.modules, "kymatio.scattering2d.filter_bank", None)
    scatter._filters.cache_clear()
    with pytest.raises(ModuleNotFoundError, match=r"kymatio, which is not installed: .*leakbench\[images\]") as missing:
        models.build("h_cnn", input_shape=(3, 32, 32), classes=10)
    assert missing.value.name == "kymatio"
    assert models.count("h_cnn") == 187_210


def test_features_may_be_left_as_they_are_for_training_to_standardise():
    images = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(3))
    plain, normed = (scatter.scattering((1, 8, 8), groups=groups) for groups in (0, 27))
    features = plain(images)
    torch.testing.assert_close(normed(images), torch.nn.functional.group_norm(features, 27))
    assert features.shape == (2, *scattered_shape((1, 8, 8))) and not features.isnan().any()
