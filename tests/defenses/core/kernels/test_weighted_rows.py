"""Sums of rows by one call are the weighted sums of each matrix, in the weight's order and where they belong."""

import torch

from leakbench.defenses.core.gradients.layerwise.factors import GradientRows
from leakbench.defenses.core.gradients.layerwise.layers.convolution_settings import Geometry
from leakbench.defenses.core.gradients.layerwise.layers.kept_rows import KeptRows, ProductOrder
from leakbench.defenses.core.gradients.layerwise.layers.linear import Outer
from leakbench.defenses.core.gradients.layerwise.tables import SumTable

from ....parameters import subtests

COUNTS = (1, 2, 7, 8, 9, 16, 64, 257)
SIZES = (1, 3, 15, 16, 17, 40, 100, 1030)


def random(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=dtype)


@subtests("dtype", [torch.float32, torch.float64])
@subtests("count", COUNTS)
def test_sums_are_those_of_float64_and_nothing_else_is_written(dtype, count):
    factors, flat = random(count, dtype=dtype), torch.full((sum(SIZES) + len(SIZES),), 7.0, dtype=dtype)
    matrices, start, table = [], 0, SumTable(factors, flat)
    for size in SIZES:
        wide = torch.full((count, 2 * size + 3), torch.nan, dtype=dtype)  # rows with something between them
        wide[:, :size] = random(count, size, dtype=dtype)
        matrices.append((start, wide[:, :size]))
        assert GradientRows(wide[:, :size]).enter_sum(table, start)
        start += size + 1
    table.run()
    for start, rows in matrices:
        stop = start + rows.shape[1]
        expected, lengths = factors.double() @ rows.double(), factors.double().abs() @ rows.double().abs()
        # Rounded to the dtype once, however many rows there are and however they cancel.
        limit = (2.0**-24 if dtype == torch.float32 else 0) * expected.abs() + 1e-14 * lengths
        assert bool(((flat[start:stop].double() - expected).abs() <= limit).all())
        assert flat[stop] == 7


@subtests("dtype", [torch.float32, torch.float64])
@subtests("shape", [(1, 1, 1, 1), (5, 3, 2, 4), (16, 1, 8, 8), (7, 9, 1, 1), (2, 33, 3, 3)])
def test_rows_of_a_convolution_are_brought_into_the_weights_order(shape, dtype):
    out, entering, *kernel = shape
    geometry = Geometry((entering, out), tuple(kernel), (1, 1), (1, 1), (0, 0, 0, 0), 1)
    size = torch.Size(shape).numel()
    rows, factors = random(9, size, dtype=dtype), random(9, dtype=dtype)
    kept, flat = KeptRows(rows, ProductOrder(geometry)), torch.zeros(size + 2, dtype=dtype)
    table = SumTable(factors, flat)
    assert kept.enter_sum(table, 1)
    table.run()
    expected = factors.double() @ kept.rows(slice(None)).double()
    torch.testing.assert_close(flat[1:-1].double(), expected, rtol=0, atol=1e-5 if dtype == torch.float32 else 1e-13)
    assert flat[0] == flat[-1] == 0


def test_a_sum_without_one_row_is_that_row_less():
    """Rows of more than half of the sum's last digit: in float32 the others would be rounded up with the one."""
    rows = torch.zeros(4096, 3)
    rows[:2104] = 1.0
    rows[2104::16], rows[2111::16] = 1.3e-4, 1.3e-4
    ones = torch.ones(4096)
    sums = []
    for kept in (slice(0, None), slice(1, None)):
        flat = torch.zeros(3)
        table = SumTable(ones[kept], flat)
        assert GradientRows(rows[kept]).enter_sum(table, 0)
        table.run()
        sums.append(flat)
    torch.testing.assert_close(sums[0] - sums[1], rows[0], rtol=3e-4, atol=0)
    torch.testing.assert_close(sums[0].double(), rows.double().sum(dim=0), rtol=2.0**-24, atol=0)


@subtests("dtype", [torch.float32, torch.float64])
@subtests("count", [1, 2, 9, 64])
def test_sums_of_outer_products_are_those_of_float64_beside_others(dtype, count):
    factors, shapes = random(count, dtype=dtype).abs(), [(a, b) for a in (1, 2, 7, 8, 11, 33) for b in (1, 7, 16, 41)]
    flat = torch.full((sum(a * b + 1 for a, b in shapes) + 3,), 7.0, dtype=dtype)
    matrices, start, table = [], 0, SumTable(factors, flat)
    for number, (a, b) in enumerate(shapes):
        wide = [torch.full((count, size + 3), torch.nan, dtype=dtype) for size in (a, b)]  # with something between them
        for part, size in zip(wide, (a, b), strict=True):
            part[:, :size] = random(count, size, number + 1, dtype=dtype)[..., 0]
        signals, inputs = wide[0][:, :a], wide[1][:, :b]
        matrices.append((start, signals, inputs))
        assert Outer(inputs, signals).enter_sum(table, start)
        start += a * b + 1
    rows = random(count, 2, dtype=dtype)
    assert GradientRows(rows).enter_sum(table, start)
    table.run()
    for start, signals, inputs in matrices:
        stop = start + signals.shape[1] * inputs.shape[1]
        every = torch.einsum("n,no,ni->noi", factors.double(), signals.double(), inputs.double()).flatten(1)
        limit = (2.0**-24 if dtype == torch.float32 else 0) * every.sum(dim=0).abs() + 1e-14 * every.abs().sum(dim=0)
        assert bool(((flat[start:stop].double() - every.sum(dim=0)).abs() <= limit).all())
        assert flat[stop] == 7
    torch.testing.assert_close(flat[-3:-1], (factors.double() @ rows.double()).to(dtype))
    assert flat[-1] == 7


def test_many_products_are_left_to_matrix_products():
    factors, flat = torch.ones(64), torch.zeros(256 * 128)
    assert Outer(torch.ones(64, 128), torch.ones(64, 128)).enter_sum(SumTable(factors, flat), 0)
    assert not Outer(torch.ones(64, 128), torch.ones(64, 256)).enter_sum(SumTable(factors, flat), 0)
    assert Outer(torch.ones(64, 8), torch.ones(64, 512)).enter_sum(SumTable(factors, flat), 0)
    assert not Outer(torch.ones(64, 8), torch.ones(64, 513)).enter_sum(SumTable(factors, flat), 0)
    assert not Outer(torch.ones(64, 0), torch.ones(64, 2)).enter_sum(SumTable(factors, flat), 0)
    assert not Outer(torch.ones(64, 2).double(), torch.ones(64, 2)).enter_sum(SumTable(factors, flat), 0)


def test_what_another_way_adds_up_is_left_to_it(monkeypatch):
    factors, flat = torch.ones(3), torch.zeros(20)
    table = SumTable(factors, flat)
    assert not GradientRows(torch.ones(20, 3).T).enter_sum(table, 0)
    assert not GradientRows(torch.ones(3, 20, dtype=torch.float64)).enter_sum(table, 0)
    grouped = ProductOrder(Geometry((4, 4), (1, 1), (1, 1), (1, 1), (0, 0, 0, 0), 2))
    assert not KeptRows(torch.ones(3, 8), grouped).enter_sum(table, 0)
    table.run()
    assert not flat.any()
    assert not GradientRows(torch.ones(3, 20)).enter_sum(SumTable(factors.double(), flat), 0)
    assert not GradientRows(torch.ones(0, 20)).enter_sum(SumTable(torch.ones(0), flat), 0)
    many = GradientRows(torch.ones(3, 2**21))
    for threads, compiled in ((1, True), (2, False)):  # PyTorch's sums run on all threads, ours on one
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert many.enter_sum(SumTable(factors, torch.zeros(2**21)), 0) == compiled
