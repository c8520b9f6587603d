"""Products by oneDNN's convolutions are products, whoever else is in the batch."""

import pytest
import torch

from defenses.core.plan import onednn


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


def test_products_of_a_row_are_the_same_whoever_else_is_there():
    coins = torch.Generator().manual_seed(0)
    rows, basis = torch.randn(70, 4096, generator=coins), torch.randn(100, 4096, generator=coins).T
    if not onednn.faster_here(rows):
        pytest.skip("oneDNN's kernels are taken on CPUs with AVX-512")
    whole = onednn.product(rows, basis)
    for count in (69, 65, 64, 63, 50):
        assert torch.equal(onednn.product(rows[:count].contiguous(), basis), whole[:count])
        assert torch.equal(onednn.product(rows[-count:].contiguous(), basis), whole[-count:])
