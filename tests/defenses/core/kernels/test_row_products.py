"""Products of rows by a kernel are products, in vectors of any length, and a row's are its own."""

import pytest
import torch

from leakbench.defenses.core.kernels.machine_code import Processor, processor
from leakbench.defenses.core.plan.linear_algebra import products

from ....parameters import subtests

HOST = processor()
if HOST is None:
    pytest.skip("nothing is compiled for a processor without fused multiply-add", allow_module_level=True)
# Shorter vectors are compiled on any processor: LLVM splits what it has no registers for.
HOSTS = [Processor(vector=16, sums=24), Processor(vector=32, sums=12), Processor(vector=64, sums=24)]
SIZES = [(1, 1, 1), (7, 3, 5), (6, 4, 64), (13, 9, 1025), (12, 8, 1024), (5, 130, 700), (40, 20, 3000)]


@pytest.fixture(params=HOSTS, ids=lambda host: f"{host.vector} bytes", autouse=True)
def host(request, monkeypatch):
    monkeypatch.setattr(products, "_wide", lambda: request.param)
    monkeypatch.setattr(products, "_WORTH_IT", 0)
    monkeypatch.setattr(products, "_STRIPS_A_THREAD", 1)
    monkeypatch.setattr(products, "_WORTH_A_THREAD", 1)
    return request.param


@pytest.fixture(params=[1, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def normal(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def close(found, rows, others, tolerance):
    expected = rows.double() @ others.double().T
    sizes = rows.double().norm(dim=1).unsqueeze(1) * others.double().norm(dim=1)
    assert found.shape == expected.shape
    assert bool(((found.double() - expected).abs() <= tolerance * sizes).all())


@subtests("dtype", [torch.float32, torch.float64])
@subtests("size", SIZES)
def test_products_are_products(size, dtype, threads):
    count, columns, width = size
    rows, others = normal(count, width, dtype=dtype), normal(columns, width, dtype=dtype, seed=1)
    tolerance = {torch.float32: 1e-6, torch.float64: 1e-14}[dtype]
    if columns > 1:
        assert products.compiled_for(rows, others)
    found = products.product(rows, others.T)
    assert found.dtype == dtype
    close(found, rows, others, tolerance)
    close(products.exact_products(rows, others), rows, others, 1e-14)
    # Rows with others' numbers between and around them.
    wide = torch.full((count, 2 * width + 3), torch.nan, dtype=dtype)
    wide[:, 2 : 2 + width] = rows
    assert torch.equal(products.product(wide[:, 2 : 2 + width], others.T), found)


@subtests("count", [2, 6, 7, 129, 300])
@subtests("width", [1, 33, 2500])
def test_below_the_diagonal_are_the_products_of_rows_one_with_another(count, width, threads):
    rows = normal(count, width)
    for exact, tolerance in ((False, 1e-6), (True, 1e-14)):
        found = products.lower_products(rows, exact=exact).tril()
        expected = (rows.double() @ rows.double().T).tril()
        sizes = rows.double().norm(dim=1)
        assert bool(((found - expected).abs() <= tolerance * sizes.unsqueeze(1) * sizes).all())


@subtests(
    ("out", "entering", "start", "stop"),
    [(3, 5, 0, 15), (3, 5, 2, 14), (32, 512, 1000, 9999), (2, 2500, 7, 4999), (7, 1, 0, 7), (1, 40, 39, 40)],
)
@subtests("dtype", [torch.float32, torch.float64])
def test_outer_products_are_multiplied_as_their_rows_are(out, entering, start, stop, dtype, threads):
    signals, inputs = normal(11, out, dtype=dtype), normal(11, entering, dtype=dtype, seed=1)
    basis = normal(18, stop - start, dtype=dtype, seed=2)
    rows = (signals.double().unsqueeze(2) * inputs.double().unsqueeze(1)).flatten(1)[:, start:stop]
    tolerance = {torch.float32: 1e-6, torch.float64: 1e-14}[dtype]
    close(products.outer_products(signals, inputs, start, basis.T), rows, basis, tolerance)


def test_products_of_a_row_are_the_same_whoever_else_is_there(threads):
    rows, others = normal(70, 2100), normal(20, 2100, seed=1)
    signals, inputs, basis = normal(70, 3), normal(70, 700, seed=1), normal(20, 2100, seed=2).T
    whole, outer = products.product(rows, others.T), products.outer_products(signals, inputs, 0, basis)
    for some in (slice(0, 69), slice(1, 70), slice(0, 1), slice(13, 50), slice(69, 70)):
        assert torch.equal(products.product(rows[some], others.T), whole[some])
        assert torch.equal(products.outer_products(signals[some], inputs[some], 0, basis), outer[some])


@subtests("value", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_spoils_no_other(value):
    rows, others = normal(20, 1500), normal(9, 1500, seed=1)
    before = products.product(rows, others.T)
    rows[19, 1499] = value
    after = products.product(rows, others.T)
    assert torch.equal(after[:19], before[:19]) and not bool(after[19].isfinite().any())


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
        products._sums(normal(3, 40), normal(4, 41), 4)
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
        assert not products.compiled_for(one, other)
    assert products.product(rows.detach()[:0], others.T).shape == (0, 5)
    products.product(rows, others.T).sum().backward()
    torch.testing.assert_close(rows.grad, others.sum(dim=0).expand(4, -1))
    with torch.no_grad():
        assert products.compiled_for(rows, others)
