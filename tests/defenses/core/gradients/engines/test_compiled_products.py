"""Norms by compiled inner products are those of rows, whatever the geometry, the neighbours and the vectors."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import TypeCheckError
from torch.nn import functional as F

from leakbench.defenses.core.gradients.layerwise.cost import Shape, Strategy, cheapest, estimates
from leakbench.defenses.core.gradients.layerwise.layers import compiled_products, compiled_rows
from leakbench.defenses.core.gradients.layerwise.layers.compiled_products import (
    product_flops,
    product_kernel,
    product_squares,
    right,
)
from leakbench.defenses.core.gradients.layerwise.layers.convolution import Convolution
from leakbench.defenses.core.gradients.layerwise.layers.linear import OuterSum
from leakbench.defenses.core.kernels import product_norms
from leakbench.defenses.core.kernels.machine_code import Processor

from .....parameters import pairwise, subtests
from .convolutions import geometry_of, images, outputs

CHANNELS = st.sampled_from([1, 3, 12, 17, 36, 64])
PAIRS = st.tuples(st.integers(1, 4), st.integers(1, 4))


def by_rows(inputs, signals, g):
    """Squared norms of rows, and the sums over positions of |x_t|² |s_t|², by PyTorch's own patches in float64."""
    top, bottom, left, right = g.padding
    padded = F.pad(inputs.double(), (left, right, top, bottom))
    patches = F.unfold(padded, g.kernel, dilation=g.dilation, stride=g.stride)
    derivatives = signals.double().flatten(2)
    rows = torch.einsum("npt,not->npo", patches, derivatives)
    sizes = patches.square().sum(dim=1) * derivatives.square().sum(dim=1)
    return rows.square().sum(dim=(1, 2)), sizes.sum(dim=1)


def squares_of(inputs, signals, g):
    found = product_squares(inputs, signals, g)
    assert found is not None
    return found


def assert_right(inputs, signals, g, *, tolerance=1e-6):
    kernel = product_kernel(g, inputs.shape[2:], signals.shape[2:], signals.dtype == torch.float64)
    value, sizes = compiled_products._measured(inputs, signals, kernel)
    expected, expected_sizes = by_rows(inputs, signals, g)
    assert bool(((value - expected).abs() <= tolerance * expected_sizes).all())
    assert bool(((sizes - expected_sizes).abs() <= tolerance * expected_sizes).all())
    found = squares_of(inputs, signals, g)
    terms = signals.shape[2] * signals.shape[3]
    assert bool(((found.value - expected).abs() <= (found.slack if terms > 1 else tolerance * expected)).all())


@pytest.fixture
def anew():
    """Kernels are compiled and tried anew, and forgotten afterwards."""
    cached = compiled_products.product_kernel, compiled_products.right
    for each in cached:
        each.cache_clear()
    yield
    for each in cached:
        each.cache_clear()


@given(
    channels=st.tuples(CHANNELS, CHANNELS),
    kernel=PAIRS,
    stride=PAIRS,
    dilation=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.tuples(*[st.integers(0, 3)] * 4),
    size=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    count=st.integers(1, 5),
)
def test_norms_are_those_of_rows(channels, kernel, stride, dilation, padding, size, count):
    g = geometry_of(channels=channels, kernel=kernel, stride=stride, dilation=dilation, padding=padding)
    if min(outputs(size, g)) < 1:
        return
    inputs, signals = images(count, g, size)
    assert_right(inputs, signals, g)


@subtests(
    "channels, vector, dtype",
    pairwise([(1, 3), (20, 8), (3, 49), (64, 33)], [16, 32, 64], [torch.float32, torch.float64]),
)
def test_processors_of_all_vectors_have_the_same_norms(monkeypatch, anew, vector, dtype, channels):
    host = Processor(vector=vector, sums=12 if vector == 32 else 24)
    monkeypatch.setattr(product_norms, "processor", lambda: host)
    for cached in (compiled_products.product_kernel, compiled_products.right):
        cached.cache_clear()
    g = geometry_of(channels=channels, kernel=(3, 3))
    inputs, signals = images(3, g, (6, 11), dtype=dtype)
    assert_right(inputs, signals, g, tolerance=1e-6 if dtype is torch.float32 else 1e-14)


@pytest.mark.parametrize("size", [(3, 2), (17, 15), (1, 200), (200, 1)])
def test_one_position_and_many(size):
    # Of a row of 3 x 2 pixels there is one position.
    g = geometry_of(channels=(5, 20), kernel=(3, 2) if min(size) > 1 else (1, 1), padding=(0, 0, 0, 0), stride=(1, 1))
    inputs, signals = images(3, g, size)
    assert_right(inputs, signals, g)


@subtests("broken", [torch.nan, torch.inf, 3e38])
@subtests("channels", [(1, 1), (3, 5), (17, 33)])
def test_a_norm_does_not_depend_on_its_neighbours(channels, broken):
    g = geometry_of(channels=channels)
    inputs, signals = images(7, g, (8, 8))
    before = squares_of(inputs, signals, g)
    others = torch.tensor([0, 1, 2, 4, 5, 6])
    inputs[3], signals[3] = broken, broken
    after = squares_of(inputs, signals, g)
    assert torch.equal(before.value[others], after.value[others])
    assert torch.equal(before.slack[others], after.slack[others])
    # Numbers of 3e38 have products in float64, which nobody trusts.
    assert not bool(after.value[3] <= 1e20)
    alone = squares_of(inputs[4:5], signals[4:5], g)
    assert torch.equal(alone.value, before.value[4:5])


@pytest.mark.parametrize("channels", [(1, 1), (3, 5), (17, 33), (16, 32)])
def test_nothing_beside_the_batch_counts(channels):
    g = geometry_of(channels=channels)
    inputs, signals = images(3, g, (8, 9))
    expected = squares_of(inputs, signals, g)
    beside = []
    for values in (inputs, signals):
        whole = torch.full((9 * values[0].numel(),), torch.nan).view(9, *values.permute(0, 2, 3, 1).shape[1:])
        whole[3:6] = values.permute(0, 2, 3, 1)
        beside.append(whole[3:6].permute(0, 3, 1, 2))
    assert torch.equal(squares_of(beside[0], beside[1], g).value, expected.value)


def test_pixels_that_no_position_reads_may_be_anything():
    g = geometry_of(channels=(3, 5), kernel=(1, 2), stride=(2, 3), padding=(0, 0, 1, 0))
    inputs, signals = images(2, g, (6, 9))
    expected = squares_of(inputs, signals, g)
    read = torch.zeros(6, 9, dtype=torch.bool)
    # Of the padded input columns 0, 1, 3, 4, ... are read.
    read[::2] = torch.arange(1, 10) % 3 < 2
    assert torch.equal(squares_of(torch.where(read, inputs, torch.nan), signals, g).value, expected.value)


def test_threads_change_no_norm(monkeypatch):
    g = geometry_of()
    inputs, signals = images(11, g, (7, 6))
    alone = squares_of(inputs, signals, g)
    monkeypatch.setattr(compiled_rows, "_WORTH_A_THREAD", 1.0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert torch.equal(squares_of(inputs, signals, g).value, alone.value)


def test_products_of_the_two_matrices_overflow_no_float32():
    g = geometry_of()
    inputs, signals = images(2, g, (7, 6))
    for scale in (1e-15, 1e15):  # their squares are in the format, and the squares' products are not
        assert_right(inputs * scale, signals * scale, g)
    # Beyond it a norm is no number that anybody would trust.
    assert not bool((squares_of(inputs * 1e25, signals, g).value <= 1e20).any())


def test_what_cancels_is_within_the_slack():
    # Every position sees the same pixel, with derivatives that sum to nearly nothing.
    g = geometry_of(channels=(20, 1), kernel=(1, 1), stride=(1, 1), padding=(0, 0, 0, 0))
    inputs, signals = torch.ones(1, 20, 4, 5), torch.ones(1, 1, 4, 5)
    signals[..., ::2, :] = -1 - 1e-6
    assert_right(inputs, signals, g)
    signals[..., ::2, :] = -1
    assert float(squares_of(inputs, signals, g).value) == 0


def test_both_kinds_of_layer_take_it_and_know_how_to_do_without(monkeypatch, anew):
    g = geometry_of(channels=(12, 17))
    inputs, signals = images(4, g, (7, 6))
    flat = geometry_of(channels=(12, 17), kernel=(1, 1), stride=(1, 1), padding=(0, 0, 0, 0))
    sequence = torch.randn(4, 5, 12), torch.randn(4, 5, 17)
    lines = [values.mT.unsqueeze(2) for values in sequence]
    for name in ("convolution", "linear"):
        monkeypatch.setattr(
            f"leakbench.defenses.core.gradients.layerwise.layers.{name}.cheapest", lambda *_: Strategy.PAIRS
        )

    def found():
        return Convolution(inputs, signals, g).squares(), OuterSum(*sequence).squares()

    with_kernel = found()
    assert torch.equal(with_kernel[0].value, squares_of(inputs, signals, g).value)
    assert torch.equal(with_kernel[1].value, squares_of(lines[0], lines[1], flat).value)
    real = compiled_products._measured
    monkeypatch.setattr(compiled_products, "_measured", lambda *of: tuple(1.001 * value for value in real(*of)))
    right.cache_clear()
    assert product_squares(inputs, signals, g) is None
    for one, other, of in zip(found(), with_kernel, ((inputs, signals, g), (*lines, flat)), strict=True):
        assert not torch.equal(one.value, other.value)
        assert bool(((one.value - by_rows(*of)[0]).abs() <= one.slack).all())
        assert bool(((one.slack - other.slack).abs() <= 1e-5 * other.slack).all())


def test_a_kernel_that_reads_its_neighbours_is_not_used(monkeypatch, anew):
    g = geometry_of()
    inputs, signals = images(4, g, (7, 6))
    real = compiled_products._measured

    def mixed(*of):
        value, sizes = real(*of)
        return value + 0 * value.sum(), sizes

    monkeypatch.setattr(compiled_products, "_measured", mixed)
    assert product_squares(inputs, signals, g) is None


def test_tensors_that_a_kernel_would_read_past_the_end_of_are_refused():
    g = geometry_of()
    inputs, signals = images(2, g, (7, 6))
    for x, s in (
        (inputs[:1], signals),
        (inputs[:, :1], signals),
        (inputs, signals[:, :1]),
        (inputs[:, :, :-1], signals),
        (inputs, signals.bfloat16()),
        (inputs.double(), signals),
    ):
        with pytest.raises((ValueError, TypeCheckError)):
            product_squares(x, s, g)


def test_no_examples_have_no_norms():
    g = geometry_of()
    inputs, signals = images(2, g, (7, 6))
    assert squares_of(inputs[:0], signals[:0], g).value.shape == (0,)
    assert OuterSum(torch.ones(2, 0, 3), torch.ones(2, 0, 4))._shape.products is None  # nor have no positions


def test_matrices_that_leave_the_cache_and_long_kernels_are_left_to_others():
    g = geometry_of(channels=(64, 64), kernel=(3, 3), stride=(1, 1), padding=(1, 1, 1, 1))
    assert product_flops(g, (16, 16), (16, 16)) is not None
    assert product_flops(g, (32, 32), (32, 32)) is None
    wide = geometry_of(channels=(64, 64), kernel=(13, 13), stride=(1, 1), padding=(0, 0, 0, 0))
    assert product_flops(wide, (13, 13), (1, 1)) is None


def test_code_does_not_grow_with_channels():
    def length(channels):
        g = geometry_of(channels=(channels, channels))
        kernel = product_kernel(g, (7, 6), outputs((7, 6), g), False)
        return len(str(product_norms._ProductWriter(kernel).module))

    assert length(4096) <= 1.05 * length(64)


def test_the_cost_model_takes_it_for_few_positions_and_many_channels():
    def shape(channels, size, **more):
        g = geometry_of(channels=channels, kernel=(3, 3), stride=(1, 1), padding=(1, 1, 1, 1))
        stored = sum(channels) * size**2
        return Shape(
            size**2,
            9 * channels[0],
            channels[1],
            stored,
            pixels=(size + 2) ** 2,
            channels=channels[0],
            kernel=(3, 3),
            lanes=16,
            multiplied=9 * channels[0] * channels[1],
            products=product_flops(g, (size, size), (size, size)),
            **more,
        )

    for channels, size in (((64, 128), 8), ((128, 256), 4), ((512, 512), 2)):
        assert cheapest(shape(channels, size), "cpu") is Strategy.PAIRS
    assert cheapest(shape((32, 32), 16), "cpu") is Strategy.KEEP
    assert Strategy.PAIRS not in estimates(shape((32, 32), 32), "cpu")
    sequence = OuterSum(torch.empty(2, 16, 768), torch.empty(2, 16, 768))
    assert cheapest(sequence._shape, "cpu") is Strategy.PAIRS
