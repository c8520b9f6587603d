"""Rows by the vendor's grouped kernel are those of patches, in float32, whatever the geometry and the neighbours."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from defenses.core import Layout, cross_entropy
from defenses.core.gradients.layerwise import example_groups
from defenses.core.gradients.layerwise.convolution import Convolution
from defenses.core.gradients.layerwise.cost import Shape, Strategy, cheapest, made_by_groups
from defenses.core.gradients.layerwise.engine import Layerwise
from defenses.core.gradients.layerwise.example_groups import ExampleGroups, rows_of
from defenses.core.gradients.layerwise.geometry import Geometry
from defenses.core.gradients.layerwise.kept_rows import along
from defenses.core.gradients.layerwise.patches import PatchProducts
from defenses.core.plan import onednn

from .architectures import NAMES, problem
from .duties import by_loop
from .modules import Problem

SIZES = st.tuples(st.integers(1, 9), st.integers(1, 9))
PAIRS = st.tuples(st.integers(1, 4), st.integers(1, 4))


def geometry_of(**changes):
    plain = {"channels": (3, 5), "kernel": (3, 2), "stride": (1, 2), "dilation": (1, 1), "padding": (1, 0, 2, 1)}
    return Geometry(**{**plain, **changes}, groups=1)


def outputs(size, g):
    top, bottom, left, right = g.padding
    full = (size[0] + top + bottom, size[1] + left + right)
    spans = zip(full, g.kernel, g.stride, g.dilation, strict=True)
    return tuple((length - d * (k - 1) - 1) // s + 1 for length, k, s, d in spans)


def images(count, g, size, *, dtype=torch.float32, seed=0):
    coins, places = torch.Generator().manual_seed(seed), outputs(size, g)
    inputs = torch.randn(count, g.channels[0], *size, generator=coins)
    signals = torch.randn(count, g.channels[1], *places, generator=coins)
    last = torch.channels_last
    return inputs.to(dtype).contiguous(memory_format=last), signals.to(dtype).contiguous(memory_format=last)


def exact(inputs, signals, g, views=1):
    return rows_of(PatchProducts(inputs.double(), signals.double(), g, views))


def assert_close(found, expected):
    assert found.shape == expected.shape
    assert float((found.double() - expected).norm()) <= 1e-6 * float(expected.norm())


@pytest.fixture
def everywhere(monkeypatch):
    """The way is taken on any CPU, and wherever it applies, as if it were the cheapest."""
    example_groups.right.cache_clear()
    monkeypatch.setattr(onednn, "faster_here", lambda values: values.dtype == torch.float32)
    monkeypatch.setattr(
        "defenses.core.gradients.layerwise.convolution.made_by_groups", lambda shape, _: shape.by_groups
    )


@settings(max_examples=60)
@given(
    channels=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    kernel=PAIRS,
    stride=PAIRS,
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    padding=st.tuples(*[st.integers(0, 3)] * 4),
    size=SIZES,
    count=st.integers(1, 6),
)
def test_rows_are_those_of_patches(channels, kernel, stride, dilation, padding, size, count):
    g = Geometry(channels=channels, kernel=kernel, stride=stride, dilation=dilation, padding=padding, groups=1)
    if min(outputs(size, g)) < 1:
        return
    inputs, signals = images(count, g, size)
    assert_close(rows_of(ExampleGroups(inputs, signals, g, 1)), exact(inputs, signals, g))


@pytest.mark.parametrize("views", [1, 2])
@pytest.mark.parametrize("chunk", [1, 4000, 10**9])
def test_chunks_views_and_chosen_examples(monkeypatch, views, chunk):
    monkeypatch.setattr(example_groups, "_CHUNK_BYTES", chunk)
    g = geometry_of()
    inputs, signals = images(6, g, (7, 6))
    maker, expected = ExampleGroups(inputs, signals, g, views), exact(inputs, signals, g, views)
    parts = list(maker.parts())
    assert [number for part in parts for number in range(part.start, part.stop)] == list(range(6 // views))
    buffer = torch.empty(6 // views, maker.size)
    for part in parts:
        assert maker.made(part, out=buffer[part]).data_ptr() == buffer[part].data_ptr()
        assert_close(rows_of(maker, part), expected[part])
    some = torch.tensor([2, 0])
    assert_close(rows_of(maker, some), expected[some])
    assert_close(maker.order.restored(buffer[1]).flatten(), expected[1])


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, 3e38])
@pytest.mark.parametrize("channels", [(1, 1), (3, 5), (17, 33)])
def test_a_row_does_not_depend_on_its_neighbours(channels, broken):
    g = geometry_of(channels=channels)
    inputs, signals = images(7, g, (8, 8))
    before = ExampleGroups(inputs, signals, g, 1).made(slice(None))
    others = torch.tensor([0, 1, 2, 4, 5, 6])
    inputs[3], signals[3] = broken, broken
    after = ExampleGroups(inputs, signals, g, 1).made(slice(None))
    assert torch.equal(before[others], after[others])
    assert not bool(torch.isfinite(after[3]).all())


def test_numbers_and_bases_are_brought_into_the_order_of_rows():
    g = geometry_of()
    inputs, signals = images(4, g, (7, 6))
    maker, rows = ExampleGroups(inputs, signals, g, 1), exact(inputs, signals, g)
    made, coins = maker.made(slice(None)), torch.Generator().manual_seed(1)
    direction = torch.randn(maker.size, generator=coins)
    assert_close(made @ maker.order.ordered(direction), rows @ direction.double())
    for start, stop in ((0, maker.size), (0, 18), (7, 40), (18, 19), (maker.size - 5, maker.size)):
        for directions in (3, 9):  # fewer than rows, and more
            basis = torch.randn(stop - start, directions, generator=coins)
            (found,) = along(maker.order, made, [(start, basis)])
            assert_close(found, rows[:, start:stop] @ basis.double())


@pytest.mark.parametrize("name", [n for n in NAMES if "conv2d" in n or n == "small_resnet"])
def test_an_engine_has_the_same_rows_in_float32(name, everywhere):
    made = problem(name)
    expected = by_loop(made)
    single = Problem(made.model.float(), made.inputs.float(), made.targets)
    engine = Layerwise(single.model, cross_entropy, Layout.of(single.model))
    found = engine.rows(single.inputs, single.targets).double()
    assert float((found - expected).norm()) <= 1e-4 * float(expected.norm())


def test_a_kernel_that_is_wrong_is_not_used(monkeypatch, everywhere):
    g = geometry_of()
    inputs, signals = images(4, g, (7, 6))
    assert isinstance(Convolution(inputs, signals, g)._maker, ExampleGroups)
    real = ExampleGroups.made
    monkeypatch.setattr(ExampleGroups, "made", lambda self, which, out=None: real(self, which) * 1.001)
    example_groups.right.cache_clear()
    assert isinstance(Convolution(inputs, signals, g)._maker, PatchProducts)
    # Or reads what its neighbours hold.
    monkeypatch.setattr(
        ExampleGroups, "made", lambda self, which, out=None: real(self, which).flip(0).cumsum(0).flip(0)
    )
    example_groups.right.cache_clear()
    assert isinstance(Convolution(inputs, signals, g)._maker, PatchProducts)
    example_groups.right.cache_clear()


def test_it_is_for_float32_and_for_one_group_of_channels(everywhere):
    inputs, _ = images(2, geometry_of(channels=(4, 4)), (7, 6))
    grouped = Geometry(channels=(4, 4), kernel=(3, 3), stride=(1, 1), dilation=(1, 1), padding=(0, 0, 0, 0), groups=2)
    assert example_groups.usable(inputs, geometry_of(channels=(4, 4)))
    assert not example_groups.usable(inputs, grouped)
    assert not example_groups.usable(inputs.double(), geometry_of(channels=(4, 4)))


def test_the_cost_model_takes_it_where_patches_are_dear():
    def shape(channels, outputs, positions, kernel, stored, **more):
        inputs = channels * kernel[0] * kernel[1]
        return Shape(positions, inputs, outputs, stored, channels=channels, kernel=kernel, **more)

    wide = shape(32, 32, 1024, (3, 3), 2**16, by_groups=True, pixels=34**2)
    assert made_by_groups(wide, "cpu") and cheapest(wide, "cpu") is Strategy.KEEP
    assert not made_by_groups(shape(32, 32, 1024, (3, 3), 2**16), "cpu")
    # Few positions and many channels: a row is longer than all that it is made of.
    deep = shape(256, 256, 16, (3, 3), 2**13, by_groups=True, pixels=36)
    assert cheapest(deep, "cpu") in (Strategy.GRAM, Strategy.PIXELS)


@pytest.mark.parametrize(
    ("count", "width", "directions"), [(256, 512, 100), (263, 512, 100), (16, 4096, 200), (3, 9, 2)]
)
def test_a_product_by_a_convolution_is_a_product(monkeypatch, count, width, directions):
    monkeypatch.setattr(onednn, "faster_here", lambda values: values.dtype == torch.float32)
    coins = torch.Generator().manual_seed(0)
    rows = torch.randn(count, width, generator=coins)
    basis = torch.randn(directions, width, generator=coins).T
    for some in (basis, basis.contiguous()):
        found, expected = onednn.product(rows, some), rows.double() @ some.double()
        assert found.shape == expected.shape and found.dtype == torch.float32
        assert float((found - expected).abs().max()) <= 1e-5 * float(expected.abs().max())
    strided = torch.randn(count, 2 * width, generator=coins)[:, ::2]
    assert float((onednn.product(strided, basis) - strided.double() @ basis.double()).abs().max()) <= 1e-3


def test_a_row_that_is_not_finite_spoils_no_other_product(monkeypatch):
    monkeypatch.setattr(onednn, "faster_here", lambda values: values.dtype == torch.float32)
    rows, basis = torch.randn(256, 512), torch.randn(100, 512).T
    before = onednn.product(rows, basis)
    rows[100] = torch.nan
    after = onednn.product(rows, basis)
    others = torch.arange(256) != 100
    assert torch.equal(before[others], after[others]) and bool(after[100].isnan().all())


def test_a_convolution_whose_rows_are_not_kept_has_the_same_sums(everywhere, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr("defenses.core.gradients.layerwise.convolution.cheapest", lambda *_: Strategy.FREE)
    g = geometry_of()
    inputs, signals = images(5, g, (7, 6))
    made, factors = Convolution(inputs, signals, g), torch.rand(5)
    expected = exact(inputs, signals, g)
    assert_close(made.squares().value.sqrt(), expected.norm(dim=1))
    assert_close(made.weighted(factors).flatten(), factors.double() @ expected)


def test_every_layer_of_a_model_is_tried_once(everywhere):
    example_groups.right.cache_clear()
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 3))
    engine = Layerwise(model, cross_entropy, Layout.of(model))
    for size in (3, 5):
        engine.rows(torch.randn(size, 2, 8, 8), torch.arange(size) % 3)
    assert example_groups.right.cache_info().misses == 2


def test_products_of_a_row_are_the_same_whoever_else_is_there():
    coins = torch.Generator().manual_seed(0)
    rows, basis = torch.randn(70, 4096, generator=coins), torch.randn(100, 4096, generator=coins).T
    if not onednn.faster_here(rows):
        pytest.skip("oneDNN's kernels are taken on CPUs with AVX-512")
    whole = onednn.product(rows, basis)
    for count in (69, 65, 64, 63, 50):
        assert torch.equal(onednn.product(rows[:count].contiguous(), basis), whole[:count])
        assert torch.equal(onednn.product(rows[-count:].contiguous(), basis), whole[-count:])
