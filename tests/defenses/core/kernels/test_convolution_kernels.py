"""Kernels for a layer's sizes give PyTorch's rows and norms, whatever the geometry, the neighbours and the vectors."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

from leakbench.defenses.core.gradients.layerwise.layers.compiled_rows import product_kernel, row_kernel
from leakbench.defenses.core.kernels import convolution_rows, images, product_norms
from leakbench.defenses.core.kernels.machine_code import Processor, processor

from ....parameters import pairwise, subtests
from ..gradients.engines.convolutions import geometry_of, outputs
from ..gradients.engines.convolutions import images as images_for

if processor() is None:
    pytest.skip("nothing is compiled for a processor without fused multiply-add", allow_module_level=True)
each = pytest.mark.parametrize("kind", ["rows", "norms"])
PAIRS = st.tuples(st.integers(1, 4), st.integers(1, 4))
FLAT = {"kernel": (1, 1), "stride": (1, 1), "padding": (0, 0, 0, 0)}
OTHERS = torch.tensor([0, 1, 2, 4, 5, 6])


def kernel_for(kind, g, inputs, signals) -> Any:
    sizes, wide = (g, tuple(inputs.shape[2:]), tuple(signals.shape[2:])), signals.dtype == torch.float64
    return row_kernel(*sizes, 1, wide) if kind == "rows" else product_kernel(*sizes, wide)


def results(kind, g, inputs, signals):
    kernel = kernel_for(kind, g, inputs, signals)
    return kernel(inputs, signals, *([signals.new_empty(len(signals), kernel.size)] if kind == "rows" else []))


def assert_right(kind, g, inputs, signals, *, tolerance=0.1):
    """Compares results with the reference's, within a tenth of what is taken for rounding."""
    expected = kernel_for(kind, g, inputs, signals).reference(inputs, signals, *([signals] if kind == "rows" else []))
    for result, (value, error) in zip(results(kind, g, inputs, signals), expected, strict=True):
        assert bool(((result.double() - value).abs() <= tolerance * error).all())


def assert_same(first, second):
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@each
@given(
    channels=st.tuples(*[st.sampled_from([1, 2, 3, 5, 8, 12, 17, 36, 64])] * 2),
    kernel=PAIRS,
    stride=PAIRS,
    dilation=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.tuples(*[st.integers(0, 3)] * 4),
    size=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    count=st.integers(1, 5),
)
def test_results_are_those_of_the_reference(kind, channels, kernel, stride, dilation, padding, size, count):
    g = geometry_of(channels=channels, kernel=kernel, stride=stride, dilation=dilation, padding=padding)
    if min(outputs(size, g)) > 0:
        assert_right(kind, g, *images_for(count, g, size))


@pytest.mark.long
@each
@subtests(
    "vector, dtype, channels",
    pairwise(
        [16, 32, 64],
        [torch.float32, torch.float64],
        # Groups of channels that share their code, and remaining ones.
        [(1, 3), (20, 8), (3, 49), (64, 33), *((3, leaving) for leaving in (48, 95, 96, 97, 112, 160, 200))],
    ),
)
def test_processors_of_all_vectors_have_the_same_results(monkeypatch, kind, vector, dtype, channels):
    for module in (convolution_rows, product_norms):
        monkeypatch.setattr(module, "processor", lambda: Processor(vector=vector, sums=12 if vector == 32 else 24))
    row_kernel.cache_clear()
    product_kernel.cache_clear()
    g = geometry_of(channels=channels, kernel=(3, 3))
    exact = 1e-9 if dtype is torch.float64 else 0.1
    assert_right(kind, g, *images_for(3, g, (6, 11), dtype=dtype), tolerance=exact)
    row_kernel.cache_clear()
    product_kernel.cache_clear()


@each
@pytest.mark.parametrize("size", [(3, 2), (17, 15), (40, 30), (1, 600), (600, 1)])
def test_one_position_and_many(kind, size):
    g = geometry_of(channels=(5, 20), **(FLAT if size != (3, 2) else FLAT | {"kernel": (3, 2)}))
    assert_right(kind, g, *(1 + 0.01 * values for values in images_for(3, g, size)))  # nothing cancels


@each
@subtests("broken", [torch.nan, torch.inf, 3e38])
@subtests("channels", [(1, 1), (3, 5), (17, 33)])
def test_a_result_does_not_depend_on_its_neighbours(kind, channels, broken):
    g = geometry_of(channels=channels)
    inputs, signals = images_for(7, g, (8, 8))
    before = results(kind, g, inputs, signals)
    assert_same(results(kind, g, inputs[4:5], signals[4:5]), [result[4:5] for result in before])
    inputs[3], signals[3] = broken, broken
    after = results(kind, g, inputs, signals)
    assert_same([result[OTHERS] for result in after], [result[OTHERS] for result in before])
    # Numbers of 3e38 have products in float64, which nobody trusts.
    assert not bool(after[0][3] <= 1e20)


@pytest.mark.long
@each
@subtests("padding", [(0, 0, 0, 0), (1, 0, 2, 1)])
@subtests("channels", [(1, 1), (3, 5), (17, 33), (16, 32)])
def test_nothing_beside_the_batch_is_read(kind, channels, padding):
    g = geometry_of(channels=channels, padding=padding)
    batch, beside = images_for(3, g, (8, 9)), []
    for values in batch:
        whole = torch.full((9 * values[0].numel(),), torch.nan).view(9, *values.permute(0, 2, 3, 1).shape[1:])
        whole[3:6] = values.permute(0, 2, 3, 1)
        beside.append(whole[3:6].permute(0, 3, 1, 2))
    assert_same(results(kind, g, *beside), results(kind, g, *batch))


@each
def test_threads_change_nothing(monkeypatch, kind):
    g = geometry_of()
    batch = images_for(11, g, (7, 6))
    alone = results(kind, g, *batch)
    monkeypatch.setattr(images, "_WORTH_A_THREAD", 1.0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert_same(results(kind, g, *batch), alone)


@each
def test_squares_leave_no_float32(kind):
    g = geometry_of()
    for scale in (1e-15, 1e15):  # their squares are in the format, and the squares' products are not
        assert_right(kind, g, *(scale * values for values in images_for(2, g, (7, 6))))


@each
def test_tensors_that_a_kernel_would_read_past_the_end_of_are_refused(kind):
    g = geometry_of()
    inputs, signals = images_for(2, g, (7, 6))
    for x, s in (
        (inputs[:1], signals),
        (inputs, signals[:1]),
        (inputs[:, :1], signals),
        (inputs, signals[:, :1]),
        (inputs[:, :, :-1], signals),
        (inputs, signals.bfloat16()),
        (inputs.double(), signals),
    ):
        with pytest.raises((ValueError, TypeCheckError)):
            kernel_for(kind, g, inputs, signals)(x, s)


@each
def test_no_examples_have_no_results(kind):
    # A compiled loop takes its first round before it asks whether there is one.
    g = geometry_of()
    assert all(len(result) == 0 for result in results(kind, g, *(values[:0] for values in images_for(2, g, (7, 6)))))


@each
def test_code_does_not_grow_with_channels(kind):
    # A layer of 4096 channels and a kernel of 12 x 13 took minutes to compile.
    def length(channels):
        sizes = FLAT | ({"kernel": (12, 13), "channels": (1, channels)} if kind == "rows" else {})
        g = geometry_of(**{"channels": (channels, channels)} | sizes)
        kernel = kernel_for(kind, g, *images_for(1, g, (16, 16) if kind == "rows" else (7, 6)))
        write = convolution_rows._RowWriter if kind == "rows" else product_norms._ProductWriter
        return len(str(write(kernel).module))

    assert length(4096) <= 1.05 * length(64)
