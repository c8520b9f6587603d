"""Sums by tiles are the vendor's to the last digits, whatever the size, and round within what is allowed for."""

import pytest
import torch
from torch.nn import functional as F
from torch.nn.grad import conv2d_weight

from leakbench.defenses.core import clip
from leakbench.defenses.core.gradients.layerwise.block_sums import _doubtful
from leakbench.defenses.core.gradients.layerwise.cost import Shape, Strategy, Summation, summation
from leakbench.defenses.core.gradients.layerwise.factors import Squares
from leakbench.defenses.core.gradients.layerwise.layers import convolution
from leakbench.defenses.core.gradients.layerwise.layers import winograd as tiles
from leakbench.defenses.core.gradients.layerwise.layers.convolution import Convolution
from leakbench.defenses.core.gradients.layerwise.layers.convolution_settings import Geometry


def piece(images, entering, leaving, size, *, padding=(1, 1, 1, 1), views=1, dtype=torch.float64, seed=0):
    coins = torch.Generator().manual_seed(seed)
    high, wide = size
    top, bottom, left, right = padding
    shape = (images, entering, high, wide), (images, leaving, high + top + bottom - 2, wide + left + right - 2)
    inputs, signals = (torch.randn(s, generator=coins, dtype=dtype) for s in shape)
    geometry = Geometry(
        channels=(entering, leaving), kernel=(3, 3), stride=(1, 1), dilation=(1, 1), padding=padding, groups=1
    )
    last = torch.channels_last
    return Convolution(
        inputs.contiguous(memory_format=last), signals.contiguous(memory_format=last), geometry, views=views
    )


def exact(made, factors):
    g, inputs, signals = made.geometry, made.inputs.double(), made.signals.double()
    top, bottom, left, right = g.padding
    weighted = signals * factors.double().repeat_interleave(made.views).view(-1, 1, 1, 1)
    return conv2d_weight(F.pad(inputs, (left, right, top, bottom)), g.weight_shape, weighted)


@pytest.fixture
def by_tiles(monkeypatch):
    monkeypatch.setattr(
        convolution, "summation", lambda shape, _: Summation.VENDOR if shape.tiles is None else Summation.TILES
    )


@pytest.mark.parametrize("images_at_a_time", [1, 2, 100])
@pytest.mark.parametrize(
    ("size", "padding"),
    [
        ((4, 4), (1, 1, 1, 1)),
        ((5, 4), (1, 1, 1, 1)),
        ((6, 7), (0, 0, 0, 0)),
        ((3, 3), (0, 0, 0, 0)),
        ((1, 1), (1, 1, 1, 1)),
        ((5, 3), (2, 1, 0, 2)),
        ((2, 9), (1, 0, 3, 3)),
    ],
)
def test_the_sum_is_that_of_plain_products(by_tiles, monkeypatch, size, padding, images_at_a_time):
    made = piece(6, 3, 5, size, padding=padding, views=2)
    rows, columns = made.signals.shape[2:]
    monkeypatch.setattr(tiles, "_CACHED_BYTES", images_at_a_time * 8 * tiles.factor_numbers(rows, columns, 8))
    factors = torch.rand(3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found, expected = made.weighted(factors), exact(made, factors)
    assert made._summation is Summation.TILES
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) <= 1e-13 * float(expected.abs().max())


@pytest.mark.parametrize("scene", ["noise", "smooth", "opposite", "one pixel"])
@pytest.mark.parametrize("way", [Summation.TILES, Summation.VENDOR])
def test_a_sum_rounds_by_less_than_its_slack_allows(monkeypatch, way, scene):
    monkeypatch.setattr(convolution, "summation", lambda *_: way)
    monkeypatch.setattr(convolution, "cheapest", lambda *_: Strategy.FREE)
    worst = 0.0
    for seed in range(8):
        made = piece(1, 8, 6, (8, 8), dtype=torch.float32, seed=seed)
        if scene == "smooth":
            made.inputs.mul_(1e-3).add_(1.0)
        elif scene == "opposite":  # patches alike, signals that cancel: what is left is small beside its terms
            made.inputs.mul_(1e-3).add_(1.0)
            made.signals[:, :, :, 1::2] = -made.signals[:, :, :, ::2]
        elif scene == "one pixel":
            made.inputs[:, :, :4].mul_(1e-4)
            made.signals[:, :, 4:].mul_(1e-4)
        squares = made.squares()
        norm = squares.value.sqrt()
        allowed = (squares.value + squares.slack).sqrt() - norm
        error = (made.weighted(torch.ones(1)).double() - exact(made, torch.ones(1))).norm()
        worst = max(worst, float(error / allowed))
    assert worst < 1
    # A bound that nothing comes near would send every example to the reference.
    assert worst > 1e-4


def test_only_kernels_of_three_by_three_and_stride_one_have_tiles():
    def shape(**changes):
        settings = {
            "channels": (4, 4), "kernel": (3, 3), "stride": (1, 1), "dilation": (1, 1), "padding": (1,) * 4, "groups": 1
        }  # fmt: skip
        g, inputs = Geometry(**{**settings, **changes}), piece(2, 4, 4, (6, 6)).inputs
        signals = F.conv2d(inputs, inputs.new_zeros(g.weight_shape), None, g.stride, 1, g.dilation, g.groups)
        return Convolution(inputs, signals, g).shape

    assert shape().tiles == 9
    for change in ({"kernel": (3, 1)}, {"stride": (2, 1)}, {"dilation": (1, 2)}, {"groups": 2}):
        assert shape(**change).tiles is None


def test_wide_layers_are_summed_by_tiles_on_a_cpu_only():
    wide = Shape(positions=16, inputs=512 * 9, outputs=512, stored=16 * 1024, channels=512, kernel=(3, 3), tiles=4)
    narrow = Shape(positions=1024, inputs=32 * 9, outputs=32, stored=2**16, channels=32, kernel=(3, 3), tiles=256)
    assert summation(wide, "cpu") is Summation.TILES
    assert summation(wide, "cuda") is Summation.VENDOR
    assert summation(narrow, "cpu") is Summation.VENDOR


@pytest.mark.parametrize("way", [Summation.TILES, Summation.VENDOR])
def test_an_example_at_the_end_of_the_format_is_doubted(monkeypatch, way):
    # Sums of inputs overflow while the gradient does not, and the squares of its signals underflow.
    monkeypatch.setattr(convolution, "summation", lambda *_: way)
    monkeypatch.setattr(convolution, "cheapest", lambda *_: Strategy.FREE)
    made = piece(1, 2, 2, (4, 4), dtype=torch.float32)
    made.inputs.fill_(3e38)
    made.signals.fill_(1e-31)
    squares = made.squares()
    assert torch.isinf(squares.slack).all()
    assert _doubtful(clip(1.0), squares).all()


def test_a_slack_that_is_no_number_vouches_for_nothing():
    squares = Squares(torch.ones(1, dtype=torch.float64), torch.full((1,), torch.nan, dtype=torch.float64))
    assert _doubtful(clip(1.0), squares).all() and _doubtful(clip(1e9), squares).all()


def test_factors_of_large_images_are_not_made():
    wide = Shape(positions=224**2, inputs=64 * 9, outputs=64, stored=1, channels=64, kernel=(3, 3), tiles=112**2)
    assert summation(wide, "cpu") is Summation.VENDOR
