"""Leading directions against singular value decompositions in float64, and what parties must agree on."""

import math
from typing import Literal

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given
from hypothesis import strategies as st

from leakbench.defenses.core import Subspace
from leakbench.defenses.core.plan.linear_algebra.basis import leading_directions, orthonormality_error

from .....parameters import subtests

METHODS = ("gram", "randomized")
each_method = pytest.mark.parametrize("method", METHODS)


def coins(seed=0):
    return torch.Generator().manual_seed(seed)


def orthonormal(length, count, seed=0):
    return torch.linalg.qr(torch.randn(length, count, generator=coins(seed), dtype=torch.float64)).Q


def rows_of(spectrum, dim, *, seed=0, dtype=torch.float32):
    """Rows [n, dim] with these n singular values, and their right singular vectors [dim, n]."""
    values = torch.as_tensor(spectrum, dtype=torch.float64)
    right = orthonormal(dim, len(values), seed)
    return ((orthonormal(len(values), len(values), seed + 1) * values) @ right.T).to(dtype), right


def directions(rows, rank, method: Literal["gram", "randomized"] = "gram", seed=0, **settings):
    return leading_directions(rows, rank, method=method, generator=coins(seed), **settings)


def defect(basis):
    """Largest entry of |V^T V - 1|, the plain way."""
    exact = basis.double()
    return (exact.T @ exact - torch.eye(exact.shape[1], dtype=torch.float64)).abs().max().item()


def smallest_cosine(one, other):
    return math.cos(scipy.linalg.subspace_angles(one.double().numpy(), other.double().numpy()).max())


def test_two_rows_along_axes_give_the_axes_the_longer_first_and_positive():
    rows = torch.zeros(2, 5)
    rows[0, 3], rows[1, 1] = 2.0, -7.0
    basis = torch.zeros(5, 2)
    basis[1, 0], basis[3, 1] = 1.0, 1.0
    torch.testing.assert_close(directions(rows, 2), basis)
    assert directions(rows, 1).shape == (5, 1)


def test_the_directions_are_not_centred():
    rows = torch.tensor([[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 0.9]])
    mean = rows.mean(dim=0) / rows.mean(dim=0).norm()
    assert abs(float(directions(rows, 1)[:, 0] @ mean)) > 0.9999


@each_method
@subtests("dtype", [torch.float32, torch.float64])
@subtests("dim", [40, 1023, 1024, 1025, 12_345])
def test_they_span_what_the_right_singular_vectors_span(method, dtype, dim):
    rows, _ = rows_of(10.0 ** -torch.arange(0, 3, 0.1), dim, dtype=dtype)  # 30 rows
    _, _, right = scipy.linalg.svd(rows.double().numpy(), full_matrices=False)
    basis = directions(rows, 12, method)
    assert (basis.dtype, basis.shape) == (dtype, (dim, 12))
    assert smallest_cosine(basis, torch.from_numpy(right[:12].T.copy())) > 1 - 1e-6


@each_method
def test_each_direction_is_a_singular_vector_in_descending_order(method):
    rows, right = rows_of(2.0 ** -torch.arange(40), 3000)
    basis = directions(rows, 12, method).double()
    torch.testing.assert_close((basis * right[:, :12]).sum(dim=0).abs(), torch.ones(12).double(), rtol=0, atol=1e-5)


@subtests("decades", [0, 1, 2, 3, 4, 4.9])
def test_as_many_directions_as_rows_stay_orthonormal_however_the_spectrum_decays(decades):
    rows, right = rows_of(torch.logspace(0, -decades, 64, dtype=torch.float64), 4000)
    basis = directions(rows, 64)
    assert basis.shape == (4000, 64)
    assert defect(basis) <= 1e-5
    # Rounding the rows to float32 alone moves the weakest direction by some 6e-8 * 10^decades.
    assert smallest_cosine(basis, right) >= 1 - max(1e-6, (1e-6 * 10**decades) ** 2)


@given(
    count=st.integers(1, 30),
    dim=st.integers(1, 2500),
    rank=st.integers(1, 40),
    decades=st.floats(0, 12),
    method=st.sampled_from(METHODS),
    seed=st.integers(0, 2**30),
)
def test_whatever_the_rows_are_the_basis_is_orthonormal_and_signed(count, dim, rank, decades, method, seed):
    draws = torch.randn(count, dim, generator=coins(seed))
    rows = draws * torch.logspace(0, -decades, dim) if seed % 2 else draws * torch.logspace(0, -decades, count)[:, None]
    basis = directions(rows, rank, method, seed)
    assert 1 <= basis.shape[1] <= min(count, dim, rank)
    assert defect(basis) <= 1e-5
    assert basis.T.is_contiguous()
    largest = basis.gather(0, basis.abs().argmax(dim=0, keepdim=True))
    assert (largest > 0).all()


@each_method
def test_rows_that_span_less_than_the_rank_give_what_they_span(method):
    rows = torch.randn(30, 7, generator=coins()) @ torch.randn(7, 4000, generator=coins(1))
    basis = directions(rows, 20, method, oversampling=5)
    assert basis.shape == (4000, 7)
    torch.testing.assert_close((rows @ basis) @ basis.T, rows, rtol=0, atol=1e-4)
    assert defect(basis) <= 1e-5


@each_method
def test_rows_of_zeros_span_nothing(method):
    assert directions(torch.zeros(9, 2000), 3, method, oversampling=0).shape == (2000, 0)
    assert Subspace.of(directions(torch.zeros(9, 4), 3, method)).size == 0


def test_repeated_rows_and_more_rows_than_coordinates_do_no_harm():
    rows = torch.randn(5, 8, generator=coins()).repeat(40, 1)
    basis = directions(rows, 100)
    assert basis.shape == (8, 5)
    assert basis.T.is_contiguous()
    assert defect(basis) <= 1e-5
    torch.testing.assert_close((rows @ basis) @ basis.T, rows)


@each_method
@subtests("factor", [2.0**-70, 2.0**-9, 2.0**50, 2.0**100])
def test_a_power_of_two_as_unit_of_the_rows_changes_nothing_at_all(method, factor):
    rows, _ = rows_of(torch.logspace(0, -2, 40), 3000)
    assert torch.equal(directions(rows * factor, 10, method), directions(rows, 10, method))


@subtests(
    ("dtype", "factor"),
    [
        (torch.float32, 1e-20),
        (torch.float32, 1e15),
        (torch.float32, 3e38),
        (torch.float64, 1e-290),
        (torch.float64, 1e300),
    ],
)
def test_units_near_the_ends_of_the_floats_do_no_harm(dtype, factor):
    rows, right = rows_of(torch.logspace(0, -2, 40), 3000, dtype=dtype)
    basis = directions(rows * factor, 40)
    assert defect(basis) <= 1e-5
    assert smallest_cosine(basis, right) > 1 - 1e-6


def test_one_huge_row_hides_the_others_which_are_then_not_made_up():
    rows = torch.randn(6, 2000, generator=coins())
    rows[2] *= 1e15
    basis = directions(rows, 6)
    torch.testing.assert_close(basis[:, 0].abs(), (rows[2] / rows[2].norm()).abs())
    assert basis.shape == (2000, 1)


def test_of_two_equally_large_entries_the_first_one_is_positive():
    row = torch.tensor([[0.5, -2.0, 1.0, 2.0, 0.0]])
    assert directions(row, 1)[1, 0] > 0
    assert torch.equal(directions(-row, 1), directions(row, 1))


@each_method
def test_parties_agree_whatever_the_signs_of_their_rows_and_draws_repeat(method):
    rows, _ = rows_of(2.0 ** -torch.arange(30), 3000)
    basis = directions(rows, 5, method)
    assert torch.equal(directions(rows, 5, method), basis)
    torch.testing.assert_close(directions(-rows, 5, method), basis, rtol=0, atol=1e-6)
    if method == "gram":
        torch.testing.assert_close(directions(rows.flip(0), 5), basis, rtol=0, atol=1e-6)


def test_memory_order_and_gradients_of_the_rows_do_not_matter():
    rows, _ = rows_of(torch.logspace(0, -2, 20), 3000)
    wide = torch.zeros(20, 6000)
    wide[:, ::2] = rows
    basis = directions(rows, 5)
    for same in (rows.T.contiguous().T, wide[:, ::2], rows.clone().requires_grad_()):
        torch.testing.assert_close(directions(same, 5), basis, rtol=0, atol=1e-6)
        assert not directions(same, 5).requires_grad


@pytest.mark.parametrize("spectrum", ["geometric", "noise floor"])
def test_the_randomized_way_finds_the_same_subspace_when_the_spectrum_decays(spectrum):
    values = torch.logspace(0, -6, 100, dtype=torch.float64)
    if spectrum == "noise floor":
        values = torch.cat([torch.logspace(0, -1, 20), torch.full((180,), 0.003)])
    rows, _ = rows_of(values, 6000)
    before = rows.clone()
    exact, found = directions(rows, 20), directions(rows, 20, "randomized")
    assert torch.equal(rows, before)
    assert smallest_cosine(exact, found) >= 0.9999
    assert defect(found) <= 1e-5
    torch.testing.assert_close((exact * found).sum(dim=0)[:10], torch.ones(10), rtol=0, atol=1e-3)


def test_another_pass_brings_the_randomized_way_closer():
    rows, _ = rows_of(torch.arange(120, 0, -1) / 120, 4000)
    exact = directions(rows, 30)
    cosines = [smallest_cosine(exact, directions(rows, 30, "randomized", passes=n)) for n in (0, 2, 6, 20)]
    assert cosines == sorted(cosines)
    assert cosines[0] < 0.5 < 0.9 < cosines[-1]


def test_a_small_slip_from_orthonormality_is_measured_to_the_digit():
    exact = orthonormal(5000, 40)
    for slip in (1e-6, 0.9e-4, 1.1e-4, 1e-2):
        bent = exact.clone()
        bent[:, 3] += slip * exact[:, 9]
        assert orthonormality_error(bent) == pytest.approx(slip, rel=1e-6)
        assert orthonormality_error(bent.float()) == pytest.approx(slip, rel=1e-2, abs=1e-6)
        assert orthonormality_error(bent.float().T.contiguous().T) == pytest.approx(slip, rel=1e-2, abs=1e-6)
    assert math.isnan(orthonormality_error(torch.full((4, 2), math.nan)))
    assert orthonormality_error(torch.zeros(7, 0)) == 0


@pytest.mark.parametrize("layout", ["rows of V", "columns of V"])
def test_a_codec_draws_its_line_at_1e_4_in_float32_too(layout):
    exact = orthonormal(30_000, 60)
    for slip, refused in ((0.97e-4, False), (1.03e-4, True)):
        bent = exact.clone()
        bent[:, 59] += slip * exact[:, 0]
        basis = bent.float() if layout == "rows of V" else bent.float().T.contiguous().T
        if refused:
            with pytest.raises(ValueError, match=r"basis must have orthonormal columns, got an error of 1\.0e-04"):
                Subspace.of(basis)
        else:
            assert Subspace.of(basis).size == 60


@pytest.mark.parametrize("dim", [131_071, 131_072, 140_001])
def test_a_codec_of_very_long_rows_encodes_projects_and_differentiates_as_products_do(dim):
    rows = torch.randn(6, dim, generator=coins(), dtype=torch.float64).requires_grad_()
    basis = directions(torch.randn(17, dim, generator=coins(1), dtype=torch.float64), 17)
    codec = Subspace.of(basis)
    torch.testing.assert_close(codec.encode(rows), rows @ basis)
    torch.testing.assert_close(codec.project(rows), rows @ basis @ basis.T)
    assert codec.encode(rows[:0]).shape == (0, 17)
    (slope,) = torch.autograd.grad(codec.encode(rows).square().sum(), rows)
    torch.testing.assert_close(slope, 2 * rows @ basis @ basis.T)


def test_one_basis_a_layer_makes_a_codec():
    rows = torch.randn(40, 1500, generator=coins())
    spans = ((0, 1000), (1000, 1010), (1010, 1500))
    codec = Subspace(tuple(directions(rows[:, a:b], 25) for a, b in spans), spans, 1500)
    assert codec.size == 25 + 10 + 25  # a layer of 10 numbers has 10 directions
    inside = codec.project(rows)
    torch.testing.assert_close(codec.project(inside), inside, rtol=0, atol=1e-5)
    torch.testing.assert_close(inside[:, 1000:1010], rows[:, 1000:1010], rtol=0, atol=1e-5)


@subtests(
    ("rows", "rank", "settings", "message"),
    [
        (torch.ones(3, 4), 0, {}, "rank must be at least 1, got 0"),
        (torch.ones(3, 4), 2, {"method": "randomized"}, "needs a generator of public coins"),
        (torch.ones(3, 4), 2, {"oversampling": -1}, "oversampling and passes must not be negative, got -1 and 2"),
        (torch.ones(3, 4), 2, {"passes": -1}, "oversampling and passes must not be negative, got 10 and -1"),
        (torch.ones(0, 4), 2, {}, "rows must hold at least one number, got 0 rows of length 4"),
        (torch.ones(3, 0), 2, {}, "rows must hold at least one number, got 3 rows of length 0"),
        (torch.ones(3, 4, dtype=torch.bfloat16), 2, {}, "rows must be float32 or float64, got torch.bfloat16"),
        (torch.tensor([[1.0, math.nan]]), 1, {}, "rows must be finite, got a NaN or an infinity"),
        (torch.tensor([[1.0, -math.inf]]), 1, {}, "rows must be finite, got a NaN or an infinity"),
    ],
)
def test_what_has_no_leading_directions_is_refused(rows, rank, settings, message):
    with pytest.raises(ValueError, match=message):
        leading_directions(rows, rank, **settings)


@pytest.mark.gpu
@each_method
def test_a_gpu_finds_the_same_directions_even_with_products_in_tf32(method):
    rows, _ = rows_of(torch.logspace(0, -3, 120, dtype=torch.float64), 50_000)
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        basis = directions(rows.cuda(), 40, method)
        assert (basis.device.type, basis.dtype) == ("cuda", torch.float32)
        assert Subspace.of(basis).size == 40
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    assert defect(basis.cpu()) <= 1e-5
    assert smallest_cosine(basis.cpu(), directions(rows, 40, method)) > 0.9999


def test_the_numbers_are_those_of_numpy():
    """A golden value: the leading direction of [[3, 4, 0], [0, 5, 12]], to twelve digits."""
    rows = np.array([[3.0, 4.0, 0.0], [0.0, 5.0, 12.0]])
    _, vectors = np.linalg.eigh(rows.T @ rows)
    leading = vectors[:, -1] * np.sign(vectors[2, -1])
    basis = directions(torch.from_numpy(rows), 2)
    np.testing.assert_allclose(basis[:, 0].numpy(), leading, rtol=1e-12)
    # The eigenvalues of [[25, 20], [20, 169]] are 97 +- sqrt(72^2 + 20^2).
    np.testing.assert_allclose(
        np.square(rows @ basis.numpy()).sum(axis=0), [97 + math.sqrt(5584), 97 - math.sqrt(5584)], rtol=1e-12
    )


@subtests("dtype", [torch.float32, torch.float64])
@subtests(("count", "dim"), [(1, 30), (2, 2), (20, 3000), (60, 60), (100, 8192)])
def test_where_order_does_not_matter_all_rows_are_spanned_and_directions_signed(count, dim, dtype):
    rows = torch.randn(count, dim, generator=coins(3), dtype=dtype)
    basis = leading_directions(rows, count + 5, ordered=False)
    assert basis.shape == (dim, count) and orthonormality_error(basis) < 1e-5
    inside = (rows.double() @ basis.double()) @ basis.double().T
    torch.testing.assert_close(inside, rows.double(), rtol=1e-4, atol=1e-4)
    assert bool((basis.gather(0, basis.abs().argmax(dim=0, keepdim=True)) > 0).all())


@subtests("method", ["gram", "randomized"])
@subtests("kind", ["repeated", "zeros among them", "all zeros", "nearly repeated", "huge among small"])
def test_without_an_order_dependent_rows_still_give_what_they_span(kind, method):
    rows = torch.randn(12, 400, generator=coins(4))
    spanned = 12
    if kind == "repeated":
        rows[6:], spanned = rows[:6].clone(), 6
    elif kind == "zeros among them":
        rows[3:5], spanned = 0.0, 10
    elif kind == "all zeros":
        rows[:], spanned = 0.0, 0
    elif kind == "nearly repeated":
        rows[6:] = rows[:6] + 1e-3 * rows[6:]
    else:
        rows[0] *= 1e3
    ways = [leading_directions(rows, 12, method=method, generator=coins(), ordered=some) for some in (True, False)]
    for basis in ways:
        assert basis.shape == (400, spanned) and orthonormality_error(basis) < 1e-5
    if spanned:
        assert smallest_cosine(*ways) > 1 - 1e-4


@subtests("ordered", [True, False])
@subtests("count", [40, 100, 500])
def test_few_rows_are_iterated_by_their_inner_products_and_many_by_themselves(count, ordered):
    decay = (0.9 ** torch.arange(count)).unsqueeze(1)
    rows = decay * torch.linalg.qr(torch.randn(3000, count, generator=coins(5))).Q.T
    found = leading_directions(
        rows, 10, method="randomized", generator=coins(6), oversampling=10, passes=2, ordered=ordered
    )
    exact = leading_directions(rows, 10)
    assert found.shape == (3000, 10) and orthonormality_error(found) < 1e-5
    # By the share of the rows' squares that is caught: no subspace of ten catches more than the exact one.
    caught, most = ((rows @ basis).double().square().sum() for basis in (found, exact))
    assert 0.97 * most <= caught <= (1 + 1e-5) * most
