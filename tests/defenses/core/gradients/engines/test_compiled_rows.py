"""Layers take rows and norms from kernels that agree with their reference, in pieces, and do without the others."""

import pytest
import torch
from jaxtyping import TypeCheckError
from torch import nn

from leakbench.defenses.core import Layout, cross_entropy
from leakbench.defenses.core.gradients.engines.interface import Unsupported
from leakbench.defenses.core.gradients.executor import Engine
from leakbench.defenses.core.gradients.layerwise.cost import Shape, Strategy, cheapest, estimates, made_by_kernel
from leakbench.defenses.core.gradients.layerwise.engine import Layerwise
from leakbench.defenses.core.gradients.layerwise.layers import compiled_rows
from leakbench.defenses.core.gradients.layerwise.layers.compiled_rows import (
    CompiledRows,
    product_flops,
    product_kernel,
    product_squares,
)
from leakbench.defenses.core.gradients.layerwise.layers.convolution import Convolution
from leakbench.defenses.core.gradients.layerwise.layers.convolution_settings import Geometry
from leakbench.defenses.core.gradients.layerwise.layers.kept_rows import along
from leakbench.defenses.core.gradients.layerwise.layers.linear import OuterSum
from leakbench.defenses.core.gradients.layerwise.layers.patch_rows import PatchProducts
from leakbench.defenses.core.kernels.convolution_rows import RowKernel
from leakbench.defenses.core.kernels.machine_code import processor
from leakbench.defenses.core.kernels.product_norms import ProductKernel

from .....parameters import subtests
from .architectures import NAMES, problem
from .convolutions import geometry_of, images
from .duties import by_loop
from .modules import Problem


def rows_of(maker, which: slice | torch.Tensor = slice(None)):
    return maker.order.in_order(maker.made(which))


def exact(inputs, signals, g, views=1):
    maker = CompiledRows(inputs, signals, g, views)
    return maker.order.in_order(maker.kernel.reference_rows(inputs, signals))


def assert_close(found, expected):
    assert found.shape == expected.shape
    assert float((found.double() - expected).norm()) <= 1e-6 * float(expected.norm())


@pytest.fixture
def everywhere(monkeypatch):
    """The way is taken wherever it applies, as if it were the cheapest."""
    compiled_rows.row_kernel.cache_clear()
    monkeypatch.setattr(
        "leakbench.defenses.core.gradients.layerwise.layers.convolution.made_by_kernel",
        lambda shape, _: shape.lanes > 0,
    )


def test_nothing_beside_the_rows_is_written():
    g = geometry_of(channels=(12, 20))
    maker = CompiledRows(*images(3, g, (8, 9)), g, 1)
    expected, size = maker.made(slice(None)), maker.size
    rows, apart = torch.full((9, size), 7.0), torch.full((3, 2 * size), 7.0)
    for out in (rows[3:6], apart[:, :size]):
        assert torch.equal(maker.squares(out), maker.squares()) and torch.equal(out, expected)
    assert all(bool((untouched == 7).all()) for untouched in (rows[:3], rows[6:], apart[:, size:]))


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


def test_outputs_that_a_kernel_would_write_past_the_end_of_are_refused():
    g = geometry_of()
    inputs, signals = images(2, g, (7, 6))
    with pytest.raises(ValueError, match="rows and columns must be those of the layer's output"):
        CompiledRows(inputs[:, :, :-1], signals, g, 1)
    with pytest.raises(ValueError, match="3 for each example"):
        CompiledRows(inputs, signals, g, 3).squares()
    maker = CompiledRows(inputs, signals, g, 1)
    size = maker.size
    for out in (torch.empty(1, size), torch.empty(2, size - 1), torch.empty(size, 2).T, torch.empty(2, size).double()):
        with pytest.raises((ValueError, TypeCheckError)):
            maker.squares(out)


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


@pytest.mark.long
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
    call = RowKernel.__call__
    monkeypatch.setattr(RowKernel, "__call__", lambda *of: [1.001 * result for result in call(*of)])
    compiled_rows.row_kernel.cache_clear()
    term, slack, *answers = found()
    assert isinstance(term._maker, PatchProducts)
    assert bool((slack > 0).all())  # of rows that are added up in another way
    assert_right(*answers)
    compiled_rows.row_kernel.cache_clear()


def test_it_is_for_one_group_of_channels_on_a_cpu():
    plain = geometry_of(channels=(4, 4))
    inputs, signals = images(2, plain, (7, 6))
    grouped = Geometry(channels=(4, 4), kernel=(3, 3), stride=(1, 1), dilation=(1, 1), padding=(0, 0, 0, 0), groups=2)
    assert RowKernel.usable(inputs, signals) == (processor() is not None)
    assert not Convolution(*images(2, grouped, (7, 6)), grouped)._plan.compiled
    for changed in (inputs.bfloat16(), inputs.double(), inputs.to("meta"), inputs[:, :0]):
        assert not RowKernel.usable(changed, signals) and not RowKernel.usable(signals, changed)
    assert not RowKernel.usable(inputs.bfloat16(), signals.bfloat16())


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


def test_every_layer_of_a_model_is_tried_once(everywhere, monkeypatch):
    compared, examples = [], RowKernel.examples
    monkeypatch.setattr(RowKernel, "examples", lambda kernel: (compared.append(kernel), examples(kernel))[1])
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 3))
    engine = Layerwise(model, cross_entropy, Layout.of(model))
    for size in (3, 5):
        engine.rows(torch.randn(size, 2, 8, 8), torch.arange(size) % 3)
    assert len(compared) == 2


def kernel_of(inputs, signals, g):
    return product_kernel(g, inputs.shape[2:], signals.shape[2:], signals.dtype == torch.float64)


def squares_of(inputs, signals, g):
    found = product_squares(inputs, signals, g)
    assert found is not None
    return found


def test_pixels_that_no_position_reads_may_be_anything():
    g = geometry_of(channels=(3, 5), kernel=(1, 2), stride=(2, 3), padding=(0, 0, 1, 0))
    inputs, signals = images(2, g, (6, 9))
    expected = squares_of(inputs, signals, g)
    read = torch.zeros(6, 9, dtype=torch.bool)
    # Columns 0, 1, 3, 4, ... of the padded input are read.
    read[::2] = torch.arange(1, 10) % 3 < 2
    assert torch.equal(squares_of(torch.where(read, inputs, torch.nan), signals, g).value, expected.value)


def test_what_cancels_is_within_the_slack():
    # Every position sees the same pixel, with derivatives that sum to nearly nothing.
    g = geometry_of(channels=(20, 1), kernel=(1, 1), stride=(1, 1), padding=(0, 0, 0, 0))
    inputs, signals = torch.ones(1, 20, 4, 5), torch.ones(1, 1, 4, 5)
    signals[..., ::2, :] = -1 - 1e-6
    found, expected = squares_of(inputs, signals, g), kernel_of(inputs, signals, g).reference(inputs, signals)[0].value
    assert bool(((found.value - expected).abs() <= found.slack).all())
    signals[..., ::2, :] = -1
    assert float(squares_of(inputs, signals, g).value) == 0


@pytest.mark.long
def test_both_kinds_of_layer_take_it_and_know_how_to_do_without(monkeypatch):
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
    real = ProductKernel.__call__
    monkeypatch.setattr(ProductKernel, "__call__", lambda *of: [1.001 * value for value in real(*of)])
    monkeypatch.setattr(compiled_rows, "product_kernel", product_kernel.__wrapped__)
    assert product_squares(inputs, signals, g) is None
    for one, other, (x, s, of) in zip(found(), with_kernel, ((inputs, signals, g), (*lines, flat)), strict=True):
        expected = kernel_of(x, s, of).reference(x, s)[0].value
        assert not torch.equal(one.value, other.value)
        assert bool(((one.value - expected).abs() <= one.slack).all())
        assert bool(((one.slack - other.slack).abs() <= 1e-5 * other.slack).all())


def test_a_sequence_without_positions_is_left_to_others():
    assert OuterSum(torch.ones(2, 0, 3), torch.ones(2, 0, 4))._shape.products is None


def test_matrices_that_leave_the_cache_and_long_kernels_are_left_to_others():
    g = geometry_of(channels=(64, 64), kernel=(3, 3), stride=(1, 1), padding=(1, 1, 1, 1))
    assert product_flops(g, (16, 16), (16, 16)) is not None
    assert product_flops(g, (32, 32), (32, 32)) is None
    wide = geometry_of(channels=(64, 64), kernel=(13, 13), stride=(1, 1), padding=(0, 0, 0, 0))
    assert product_flops(wide, (13, 13), (1, 1)) is None


def test_the_cost_model_takes_inner_products_for_few_positions_and_many_channels():
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
