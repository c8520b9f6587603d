"""Sums of rows by one call are the weighted sums of each matrix, in the weight's order and where they belong."""

import torch

from leakbench.defenses.core.gradients.layerwise.factors import GradientRows
from leakbench.defenses.core.gradients.layerwise.layers.convolution_settings import Geometry
from leakbench.defenses.core.gradients.layerwise.layers.kept_rows import KeptRows, ProductOrder
from leakbench.defenses.core.gradients.layerwise.layers.linear import Outer
from leakbench.defenses.core.kernels.weighted_rows import SumTable


def random(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=dtype)


def test_nothing_beside_the_sums_is_written():
    factors, flat = random(9), torch.full((300,), 7.0)
    table = SumTable(factors, flat)
    assert table.add(random(9, 17), 1) and table.outer(random(9, 7), random(9, 16), 20)
    assert table.add(random(9, 120), 140, (8, 3, 5))
    table.run()
    sums = [slice(1, 18), slice(20, 132), slice(140, 260)]
    assert all(bool((flat[each] != 7).all()) for each in sums)
    assert int((flat == 7).sum()) == 300 - 17 - 112 - 120


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
