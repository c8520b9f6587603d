"""Rows by compiled kernels are those of patches, whatever the geometry, the neighbours and the processor's vectors."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import TypeCheckError
from torch import nn

from leakbench.defenses.core import Layout, cross_entropy
from leakbench.defenses.core.gradients.engines.interface import Unsupported
from leakbench.defenses.core.gradients.executor import Engine
from leakbench.defenses.core.gradients.layerwise.cost import (
    Shape,
    Strategy,
    cheapest,
    made_by_kernel,
)
from leakbench.defenses.core.gradients.layerwise.engine import Layerwise
from leakbench.defenses.core.gradients.layerwise.layers import compiled_rows
from leakbench.defenses.core.gradients.layerwise.layers.compiled_rows import CompiledRows
from leakbench.defenses.core.gradients.layerwise.layers.convolution import Convolution
from leakbench.defenses.core.gradients.layerwise.layers.convolution_settings import Geometry
from leakbench.defenses.core.gradients.layerwise.layers.kept_rows import along
from leakbench.defenses.core.gradients.layerwise.layers.patch_rows import PatchProducts
from leakbench.defenses.core.kernels import convolution_rows
from leakbench.defenses.core.kernels.machine_code import Processor, processor

from .....parameters import pairwise, subtests
from .architectures import NAMES, problem
from .convolutions import geometry_of, images, outputs
from .duties import by_loop
from .modules import Problem

VECTORS, DTYPES = (16, 32, 64), (torch.float32, torch.float64)
SIZES = st.tuples(st.integers(1, 9), st.integers(1, 9))
PAIRS = st.tuples(st.integers(1, 4), st.integers(1, 4))


def rows_of(maker, which: slice | torch.Tensor = slice(None)):
    return maker.order.in_order(maker.made(which))


def exact(inputs, signals, g, views=1):
    return rows_of(PatchProducts(inputs.double(), signals.double(), g, views))


def assert_close(found, expected):
    assert found.shape == expected.shape
    assert float((found.double() - expected).norm()) <= 1e-6 * float(expected.norm())


@pytest.fixture
def everywhere(monkeypatch):
    """The way is taken wherever it applies, as if it were the cheapest."""
    compiled_rows.right.cache_clear()
    monkeypatch.setattr(
        "leakbench.defenses.core.gradients.layerwise.layers.convolution.made_by_kernel",
        lambda shape, _: shape.lanes > 0,
    )


@given(
    channels=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    kernel=PAIRS,
    stride=PAIRS,
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    padding=st.tuples(*[st.integers(0, 3)] * 4),
    size=SIZES,
    count=st.integers(1, 6),
)
def test_rows_norms_and_sums_are_those_of_patches(channels, kernel, stride, dilation, padding, size, count):
    g = Geometry(channels=channels, kernel=kernel, stride=stride, dilation=dilation, padding=padding, groups=1)
    if min(outputs(size, g)) < 1:
        return
    inputs, signals = images(count, g, size)
    maker, expected = CompiledRows(inputs, signals, g, 1), exact(inputs, signals, g)
    assert_close(rows_of(maker), expected)
    for out in (None, torch.empty(count, maker.size)):
        assert_close(maker.squares(out).sqrt(), expected.norm(dim=1))


@subtests("vector, dtype, channels", pairwise(VECTORS, DTYPES, [(1, 3), (20, 8), (3, 49)]))
def test_processors_of_all_vectors_have_the_same_rows(monkeypatch, vector, dtype, channels):
    monkeypatch.setattr(
        convolution_rows, "processor", lambda: Processor(vector=vector, sums=12 if vector == 32 else 24)
    )
    compiled_rows.row_kernel.cache_clear()
    g = geometry_of(channels=channels, kernel=(3, 3))
    inputs, signals = images(3, g, (9, 40), dtype=dtype)
    maker = CompiledRows(inputs, signals, g, 1)
    assert_close(rows_of(maker), exact(inputs, signals, g))
    compiled_rows.row_kernel.cache_clear()


@pytest.mark.parametrize("views", [1, 2])
@pytest.mark.parametrize("chunk", [1, 4000, 10**9])
def test_chunks_views_and_chosen_examples(monkeypatch, views, chunk):
    monkeypatch.setattr(compiled_rows, "_CHUNK_BYTES", chunk)
    g = geometry_of()
    inputs, signals = images(6, g, (7, 6))
    maker, expected = CompiledRows(inputs, signals, g, views), exact(inputs, signals, g, views)
    parts = list(maker.parts())
    assert [number for part in parts for number in range(part.start, part.stop)] == list(range(6 // views))
    buffer = torch.empty(6 // views, maker.size)
    for part in parts:
        assert maker.made(part, out=buffer[part]).data_ptr() == buffer[part].data_ptr()
        assert_close(rows_of(maker, part), expected[part])
    some = torch.tensor([2, 0])
    assert_close(rows_of(maker, some), expected[some])
    assert_close(maker.order.restored(buffer[1]).flatten(), expected[1])


@pytest.mark.parametrize("size", [(40, 30), (1, 2000), (2000, 1)])
def test_many_positions_are_added_up_in_blocks(size):
    # One sum over all positions in float32 would be off by more.
    g = geometry_of(kernel=(1, 1), stride=(1, 1), padding=(0, 0, 0, 0))
    inputs, signals = (1 + 0.01 * values for values in images(3, g, size))  # nothing cancels
    maker = CompiledRows(inputs, signals, g, 1)
    assert not maker.kernel.exact
    expected = exact(inputs, signals, g)
    assert float((rows_of(maker) - expected).abs().max()) <= 4e-6 * float(expected.abs().max())


@subtests("padding", [(0, 0, 0, 0), (1, 0, 2, 1)])
@subtests("channels", [(1, 1), (3, 5), (17, 33), (12, 20)])
def test_nothing_beside_the_batch_is_read_or_written(padding, channels):
    g = geometry_of(channels=channels, padding=padding)
    inputs, signals = images(3, g, (8, 9))
    expected = CompiledRows(inputs, signals, g, 1)
    around = [
        torch.full((9 * v[0].numel(),), torch.nan).view(9, *v.permute(0, 2, 3, 1).shape[1:]) for v in (inputs, signals)
    ]
    for whole, values in zip(around, (inputs, signals), strict=True):
        whole[3:6] = values.permute(0, 2, 3, 1)
    beside = [whole[3:6].permute(0, 3, 1, 2) for whole in around]
    maker = CompiledRows(beside[0], beside[1], g, 1)
    rows = torch.full((9, maker.size), 7.0)
    squares = maker.squares(rows[3:6])
    assert torch.equal(rows[3:6], expected.made(slice(None))) and torch.equal(squares, expected.squares())
    assert bool((rows[:3] == 7).all()) and bool((rows[6:] == 7).all())
    sparse = torch.full((3, 2 * maker.size), 7.0)  # rows with something between them
    maker.squares(sparse[:, : maker.size])
    assert torch.equal(sparse[:, : maker.size], rows[3:6]) and bool((sparse[:, maker.size :] == 7).all())


def test_threads_change_no_row(monkeypatch):
    g = geometry_of()
    inputs, signals = images(11, g, (7, 6))
    alone = CompiledRows(inputs, signals, g, 1)
    expected = alone.made(slice(None))
    monkeypatch.setattr(compiled_rows, "_WORTH_A_THREAD", 1.0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert torch.equal(CompiledRows(inputs, signals, g, 1).made(slice(None)), expected)


def test_squares_overflow_no_float32():
    g = geometry_of()
    inputs, signals = images(2, g, (7, 6))
    for scale in (1e-18, 1e18):
        rows = exact(inputs * scale, signals, g)
        assert_close(CompiledRows(inputs * scale, signals, g, 1).squares().sqrt(), rows.norm(dim=1))


def test_sizes_that_are_no_convolutions_are_refused():
    g = geometry_of()
    inputs, signals = images(2, g, (7, 6))
    with pytest.raises(ValueError, match="rows and columns must be those of the layer's output"):
        CompiledRows(inputs[:, :, :-1], signals, g, 1)
    with pytest.raises(ValueError, match="out must have rows in one piece"):
        CompiledRows(inputs, signals, g, 1).squares(torch.empty(90, 2).T)
    with pytest.raises(ValueError, match="out must have rows in one piece"):
        CompiledRows(inputs, signals, g, 1).squares(torch.empty(1, 90))


@subtests("broken", [torch.nan, torch.inf, 3e38])
@subtests("channels", [(1, 1), (3, 5), (17, 33)])
def test_a_row_does_not_depend_on_its_neighbours(channels, broken):
    g = geometry_of(channels=channels)
    inputs, signals = images(7, g, (8, 8))
    before = CompiledRows(inputs, signals, g, 1).made(slice(None))
    others = torch.tensor([0, 1, 2, 4, 5, 6])
    inputs[3], signals[3] = broken, broken
    after = CompiledRows(inputs, signals, g, 1).made(slice(None))
    assert torch.equal(before[others], after[others])
    assert not bool(torch.isfinite(after[3]).all())


def test_numbers_and_bases_are_brought_into_the_order_of_rows():
    g = geometry_of()
    inputs, signals = images(4, g, (7, 6))
    maker, rows = CompiledRows(inputs, signals, g, 1), exact(inputs, signals, g)
    made, coins = maker.made(slice(None)), torch.Generator().manual_seed(1)
    direction = torch.randn(maker.size, generator=coins)
    assert_close(made @ maker.order.ordered(direction), rows @ direction.double())
    for start, stop in ((0, maker.size), (0, 18), (7, 40), (18, 19), (maker.size - 5, maker.size)):
        for directions in (3, 9):  # fewer than rows, and more
            basis = torch.randn(stop - start, directions, generator=coins)
            (found,) = along(maker.order, made, [(start, basis)])
            assert_close(found, rows[:, start:stop] @ basis.double())


@subtests("name", [n for n in NAMES if "conv2d" in n or n == "small_resnet"])
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
    mask, factors = torch.rand(g.weight_shape).flatten() > 0.5, torch.rand(4)
    monkeypatch.setattr(
        "leakbench.defenses.core.gradients.layerwise.layers.convolution.cheapest", lambda *_: Strategy.FREE
    )
    monkeypatch.setattr(Convolution, "_worth_keeping", False)

    def found():
        term = Convolution(inputs, signals, g)
        whole, masked = term.squares(), term.masked_squares(mask)
        return term, masked.slack, whole, masked, term.weighted(factors).flatten()

    expected = exact(inputs, signals, g)

    def assert_right(whole, masked, total):
        assert_close(whole.value.sqrt(), expected.norm(dim=1))
        assert_close(masked.value.sqrt(), (expected * mask).norm(dim=1))
        assert_close(total, factors.double() @ expected)

    term, slack, *answers = found()
    assert isinstance(term._maker, CompiledRows)
    assert_right(*answers)
    squares = CompiledRows.squares

    monkeypatch.setattr(CompiledRows, "squares", lambda self, out=None: squares(self, out) * 1.001)
    compiled_rows.right.cache_clear()
    term, slack, *answers = found()
    assert isinstance(term._maker, PatchProducts)
    assert bool((slack > 0).all())  # of rows that are added up in another way
    assert_right(*answers)
    compiled_rows.right.cache_clear()


def test_a_kernel_that_reads_its_neighbours_is_not_used(monkeypatch, everywhere):
    g = geometry_of()
    inputs, signals = images(4, g, (7, 6))
    real = CompiledRows.squares

    def mixed(self, out=None):
        answer = real(self, out)
        if out is not None:
            out[:-1] += 0 * out[1:]
        return answer

    monkeypatch.setattr(CompiledRows, "squares", mixed)
    compiled_rows.right.cache_clear()
    assert isinstance(Convolution(inputs, signals, g)._maker, PatchProducts)
    compiled_rows.right.cache_clear()


def test_it_is_for_one_group_of_channels_on_a_cpu():
    plain = geometry_of(channels=(4, 4))
    inputs, signals = images(2, plain, (7, 6))
    grouped = Geometry(channels=(4, 4), kernel=(3, 3), stride=(1, 1), dilation=(1, 1), padding=(0, 0, 0, 0), groups=2)
    assert compiled_rows.usable(inputs, signals, plain) == (processor() is not None)
    assert not compiled_rows.usable(inputs, signals, grouped)
    for changed in (inputs.bfloat16(), inputs.double(), inputs.to("meta")):
        assert not compiled_rows.usable(changed, signals, plain)
        assert not compiled_rows.usable(signals, changed, plain)
    assert not compiled_rows.usable(inputs, signals.bfloat16(), plain)
    assert not compiled_rows.usable(inputs[:, :0], signals, geometry_of(channels=(0, 4)))


def test_tensors_that_a_kernel_would_read_past_the_end_of_are_refused():
    g = geometry_of()
    inputs, signals = images(2, g, (7, 6))
    for x, s, views in (
        (inputs[:1], signals, 1),
        (inputs, signals[:1], 1),
        (inputs[:, :1], signals, 1),
        (inputs, signals[:, :1], 1),
        (inputs, signals, 3),
        (inputs, signals.bfloat16(), 1),
        (inputs.double(), signals, 1),
    ):
        with pytest.raises((ValueError, TypeCheckError)):
            CompiledRows(x, s, g, views)
    maker = CompiledRows(inputs, signals, g, 1)
    size = maker.size
    for out in (torch.empty(1, size), torch.empty(2, size - 1), torch.empty(size, 2).T, torch.empty(2, size).double()):
        with pytest.raises((ValueError, TypeCheckError)):
            maker.squares(out)


def test_no_examples_have_no_rows():
    # A compiled loop takes its first round before it asks whether there is one.
    g = geometry_of()
    inputs, signals = images(2, g, (7, 6))
    maker = CompiledRows(inputs, signals, g, 1)
    assert maker.made(slice(0, 0)).shape == maker.made(torch.tensor([], dtype=torch.long)).shape == (0, maker.size)
    none = CompiledRows(inputs[:0], signals[:0], g, 1)
    assert none.squares().shape == (0,)


@pytest.mark.parametrize("wide", [False, True])
def test_code_does_not_grow_with_the_channels_that_leave(wide):
    # Of 4096 channels and a kernel of 12 x 13 it took minutes to compile.
    def length(leaving):
        g = geometry_of(channels=(1, leaving), kernel=(12, 13), stride=(1, 1), padding=(0, 0, 0, 0))
        inputs, signals = images(1, g, (16, 16), dtype=torch.float64 if wide else torch.float32)
        return len(str(convolution_rows._RowWriter(CompiledRows(inputs, signals, g, 1).kernel).module))

    assert length(4096) <= 1.05 * length(64)


@subtests(
    "leaving, vector", [(n, VECTORS[i % 3]) for i, n in enumerate([48, 49, 95, 96, 97, 112, 160, 200, 48, 96, 97])]
)
def test_groups_of_channels_that_share_their_code_and_those_left_over(monkeypatch, vector, leaving):
    sums = 12 if vector == 32 else 24
    monkeypatch.setattr(convolution_rows, "processor", lambda: Processor(vector=vector, sums=sums))
    compiled_rows.row_kernel.cache_clear()
    g = geometry_of(channels=(3, leaving))
    inputs, signals = images(3, g, (7, 6))
    maker, expected = CompiledRows(inputs, signals, g, 1), exact(inputs, signals, g)
    assert_close(rows_of(maker), expected)
    assert_close(maker.squares(torch.empty(3, maker.size)).sqrt(), expected.norm(dim=1))
    compiled_rows.row_kernel.cache_clear()


class Rounding(nn.Module):
    """A convolution under an autocast of the model's own, whose output is cast back to what the weights have."""

    def __init__(self):
        super().__init__()
        self.convolution, self.head = nn.Conv2d(3, 16, 3, padding=1), nn.Linear(16 * 64, 4)

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.convolution(x)
        return self.head(x.flatten(1).to(self.head.weight.dtype))


def test_a_layer_under_an_autocast_of_its_own_is_left_to_another_engine():
    # Its derivatives have half the bytes of its inputs: read as float32 they end halfway, and the process crashed.
    torch.manual_seed(0)
    model, x, y = Rounding(), torch.randn(6, 3, 8, 8), torch.arange(6) % 4
    engine = Layerwise(model, cross_entropy, Layout.of(model))
    with pytest.raises(Unsupported, match="'convolution' must compute in"):
        engine.rows(x, y)
    chosen = Engine(model).prepare(x, y)
    assert chosen.engine.name == "torch.func" and "must compute in torch.float32" in chosen.note


def test_the_cost_model_takes_it_where_patches_are_dear():
    def shape(channels, outputs, positions, kernel, stored, **more):
        inputs = channels * kernel[0] * kernel[1]
        products = inputs * outputs
        return Shape(positions, inputs, outputs, stored, channels=channels, kernel=kernel, multiplied=products, **more)

    wide = shape(32, 32, 1024, (3, 3), 2**16, lanes=16, pixels=34**2)
    assert made_by_kernel(wide, "cpu") and cheapest(wide, "cpu") is Strategy.KEEP
    assert not made_by_kernel(shape(32, 32, 1024, (3, 3), 2**16), "cpu")
    # Few positions and many channels: a row is longer than all that it is made of.
    deep = shape(256, 256, 16, (3, 3), 2**13, lanes=16, pixels=36)
    assert cheapest(deep, "cpu") in (Strategy.GRAM, Strategy.PIXELS)


def test_a_convolution_whose_rows_are_not_kept_has_the_same_sums(everywhere, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(
        "leakbench.defenses.core.gradients.layerwise.layers.convolution.cheapest", lambda *_: Strategy.FREE
    )
    g = geometry_of()
    inputs, signals = images(5, g, (7, 6))
    made, factors = Convolution(inputs, signals, g), torch.rand(5)
    expected = exact(inputs, signals, g)
    assert_close(made.squares().value.sqrt(), expected.norm(dim=1))
    assert_close(made.weighted(factors).flatten(), factors.double() @ expected)


def test_every_layer_of_a_model_is_tried_once(everywhere):
    compiled_rows.right.cache_clear()
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 3))
    engine = Layerwise(model, cross_entropy, Layout.of(model))
    for size in (3, 5):
        engine.rows(torch.randn(size, 2, 8, 8), torch.arange(size) % 3)
    assert compiled_rows.right.cache_info().misses == 2
