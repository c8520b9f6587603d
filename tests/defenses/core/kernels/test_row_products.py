"""Products of rows by a kernel are products, in vectors of any length, and a row's are its own."""

import pytest
import torch

from leakbench.defenses.core.kernels import row_products
from leakbench.defenses.core.kernels.machine_code import Processor, processor
from leakbench.defenses.core.kernels.row_products import RowProducts
from leakbench.defenses.core.plan.linear_algebra import products

from ....parameters import subtests

HOST = processor() or Processor(vector=16, sums=24)
if processor() is None:
    pytest.skip("nothing is compiled for a processor without fused multiply-add", allow_module_level=True)


@pytest.fixture(autouse=True)
def everywhere(monkeypatch):
    """The kernel is usable for small rows too, without AVX-512, and by several threads."""
    monkeypatch.setattr(row_products, "_wide", lambda: HOST)
    for name, value in (("_WORTH_IT", 0), ("_STRIPS_A_THREAD", 1), ("_WORTH_A_THREAD", 1)):
        monkeypatch.setattr(row_products, name, value)


@pytest.fixture(params=[1, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def normal(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.long
@subtests("given, number, scaled", [(4, 4, False), (4, 8, True), (8, 8, False)])
def test_threads_compute_products(given, number, scaled, threads):
    assert RowProducts(HOST, given, number, scaled).agrees


@subtests("dtype", [torch.float32, torch.float64])
def test_products_are_those_of_the_kernel_in_the_rows_dtype_or_exact(dtype, threads):
    rows, others = normal(40, 3000, dtype=dtype), normal(20, 3000, dtype=dtype, seed=1)
    for exact, found in ((False, products.product(rows, others.T)), (True, products.exact_products(rows, others))):
        expected = row_products.row_products(rows, exact=exact)(rows, others)[0]
        assert torch.equal(found, expected if exact else expected.to(dtype))


def test_products_of_a_row_are_the_same_whoever_else_is_there(threads):
    rows, others = normal(70, 2100), normal(20, 2100, seed=1)
    signals, inputs, basis = normal(70, 3), normal(70, 700, seed=1), normal(20, 2100, seed=2).T
    whole, outer = products.product(rows, others.T), products.outer_products(signals, inputs, 0, basis)
    for some in (slice(0, 69), slice(1, 70), slice(0, 1), slice(13, 50), slice(69, 70)):
        assert torch.equal(products.product(rows[some], others.T), whole[some])
        assert torch.equal(products.outer_products(signals[some], inputs[some], 0, basis), outer[some])


def test_rows_of_zeros_and_huge_rows_give_what_floats_give():
    rows, others = torch.zeros(3, 50), normal(4, 50)
    rows[1], rows[2] = 1e30, 1e-30
    found = products.product(rows, others.T)
    assert not bool(found[0].any())
    torch.testing.assert_close(found[1:], rows[1:] @ others.T, rtol=1e-5, atol=0)
    huge = torch.full((2, 50), 3e38)
    assert bool(products.product(huge, huge.T).isinf().all())
    assert bool(products.exact_products(huge, huge).isfinite().all())


def test_rows_of_other_lengths_are_refused_not_read_past_the_end():
    # Shapes that annotations forbid, which nobody checks outside of tests.
    with pytest.raises(ValueError, match="one length"):
        products.product(normal(3, 40), normal(4, 41).T)
    for start in (5, -1):
        with pytest.raises(ValueError, match="within their products"):
            products.outer_products(normal(3, 2), normal(3, 10), start, normal(17, 16).T)


def test_what_the_kernel_cannot_read_goes_another_way():
    rows, others = normal(4, 30), normal(5, 30, seed=1)
    for one, other in (
        (rows.T.contiguous().T, others),
        (rows, others.double()),
        (rows.half(), others.half()),
        (rows.requires_grad_(), others),
        (rows[:0], others),
    ):
        assert not RowProducts.usable(one, other)
    assert products.product(rows.detach()[:0], others.T).shape == (0, 5)
    products.product(rows, others.T).sum().backward()
    torch.testing.assert_close(rows.grad, others.sum(dim=0).expand(4, -1))
    with torch.no_grad():
        assert RowProducts.usable(rows, others)
