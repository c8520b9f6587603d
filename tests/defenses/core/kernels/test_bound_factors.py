"""Factors by one call are those of the bound at the norms, of each example by itself, or there are none."""

from typing import Any, cast

import pytest
import torch

from leakbench.defenses.core.gradients.layerwise.factors import GradientRows
from leakbench.defenses.core.gradients.layerwise.layers.linear import Outer
from leakbench.defenses.core.kernels.bound_factors import KINDS, BoundFactors, NormTable
from leakbench.defenses.core.plan.bound import Bound, adaptive_weight, clip, normalize, unbounded

from ....parameters import subtests

BOUNDS = (
    clip(0.5),
    clip(30.0),
    normalize(2.0, regulariser=0.01),
    normalize(1.0, regulariser=0),
    adaptive_weight(1.5, regulariser=0.1),
)
EXAMPLES, OUT, IN, SIZE = 9, 11, 37, 75


def made(dtype=torch.float32, scale=1.0):
    """A linear layer's weight and bias, and rows of something else."""
    coins = torch.Generator().manual_seed(0)
    inputs, signals, rows = (
        scale * torch.randn(EXAMPLES, size, generator=coins, dtype=dtype) for size in (IN, OUT, SIZE)
    )
    bias = GradientRows(signals)
    return [Outer(inputs, signals, bias), bias, GradientRows(rows)]


def masks():
    coins = torch.Generator().manual_seed(1)
    some = [torch.rand(size, generator=coins) < 0.4 for size in (OUT * IN, OUT, SIZE)]
    return [[True] * 3, some, [some[0], True, False], [False, some[1], some[2]], [True, False, some[2]]]


def table_of(terms, kept):
    like = terms[0].like
    table = NormTable(len(like), like)
    assert all(term.enter(table, mask) for term, mask in zip(terms, kept, strict=True))
    return table


def squares_of(terms, kept):
    rows = [term.rows(slice(None)).double() for term in terms]
    marks = [mask if isinstance(mask, bool) else mask.double() for mask in kept]
    return torch.stack([(r * m).square().sum(dim=1) for r, m in zip(rows, marks, strict=True)]).sum(dim=0)


def found_of(terms, kept, bound) -> Any:
    """Factors and squares, where those of all examples are certain; else None."""
    found = table_of(terms, kept).factors(bound.kind, bound.norm, bound.regulariser)
    return found[:2] if found is not None and found.certain is None else None


@subtests("bound", BOUNDS)
@subtests("dtype", [torch.float32, torch.float64])
@subtests("kept", range(5))
def test_factors_are_those_of_the_bound(bound, dtype, kept):
    terms, mask = made(dtype), masks()[kept]
    factors, squares = found_of(terms, mask, bound)
    expected = squares_of(terms, mask)
    limit = 1e-6 if dtype == torch.float32 else 1e-13
    torch.testing.assert_close(squares, expected, rtol=limit, atol=0)
    assert factors.dtype == dtype
    torch.testing.assert_close(factors, bound.scale(expected.sqrt(), dtype), rtol=limit, atol=0)


def test_every_kind_that_bounds_has_its_number():
    assert {bound.kind for bound in BOUNDS} == set(KINDS)
    assert unbounded().kind not in KINDS and Bound(kind="clip", norm=1.0).kind == KINDS[0]


def test_squares_that_somebody_has_measured_are_believed():
    rows = GradientRows(torch.ones(4, 5), torch.tensor([4.0, 1.0, 9.0, 16.0], dtype=torch.float64))
    factors, squares = found_of([rows], [True], clip(2.0))
    assert squares.tolist() == [4, 1, 9, 16] and factors.tolist() == pytest.approx([1, 1, 2 / 3, 0.5])


@subtests("value", [torch.nan, torch.inf, -torch.inf])
def test_a_part_that_does_not_count_must_be_finite(value):
    rows, spoilt, mask = GradientRows(torch.ones(3, 40)), GradientRows(torch.ones(3, 40)), torch.arange(40) < 39
    assert found_of([rows, spoilt], [True, False], clip(1.0)) is not None
    spoilt.values[2, 39] = value
    assert found_of([rows, spoilt], [True, False], clip(1.0)) is None
    assert found_of([spoilt], [mask], clip(1.0)) is None


def test_a_factor_that_is_no_normal_number_is_none():
    rows = GradientRows(torch.full((2, 4), 1e9))
    assert found_of([rows], [True], clip(1e-29)) is None
    assert found_of([rows], [True], clip(1e-27)) is not None


def test_squares_that_float32_loses_under_a_mask_are_not_believed():
    inputs, signals = torch.full((2, 5), 1.0), torch.full((2, 3), 1.0)
    mask = torch.arange(15) % 2 == 0
    other = GradientRows(torch.ones(2, 1))
    assert found_of([Outer(inputs, signals), other], [mask, True], clip(1.0)) is not None
    # Their squares vanish in float32; what they are multiplied by says whether that is anything.
    signals[1] = 1e-25
    assert found_of([Outer(inputs, signals), other], [mask, True], clip(1.0)) is not None
    inputs[1] = 1e17
    assert found_of([Outer(inputs, signals), other], [mask, True], clip(1.0)) is None
    inputs[1], signals[1] = 1.0, 0
    factors, squares = found_of([Outer(inputs, signals), other], [mask, True], clip(1.0))
    assert squares.tolist() == [9, 1] and factors.tolist() == pytest.approx([1 / 3, 1])


def test_an_outer_product_whose_scaled_side_float32_rounds_is_not_certain():
    """2^-149 times 0.51 is 2^-149 again: times numbers of 3e38 that is twice the bound."""
    inputs, signals = torch.full((2, 4), 1.0), torch.full((2, 3), 1.0)
    length = 2.0**-149 * 3e38 * 12**0.5
    assert found_of([Outer(inputs, signals)], [True], clip(0.51 * length)) is not None
    inputs[1], signals[1] = 3e38, 2.0**-149
    assert found_of([Outer(inputs, signals)], [True], clip(0.51 * length)) is None
    assert found_of([Outer(inputs[:, :1], signals[:, :1])], [True], clip(1.0)) is not None  # it is not scaled


def test_squares_that_float64_loses_are_not_believed():
    """Of a product of 1e-162 and 1e153 the one square is zero, and the product is none."""
    inputs, signals = (torch.full((2, 100), value, dtype=torch.float64) for value in (1.0, 1.0))
    other = GradientRows(torch.full((2, 1), 1e-9, dtype=torch.float64))
    mask = torch.arange(100 * 100) % 2 == 0
    for kept in (True, mask):
        assert found_of([Outer(inputs, signals), other], [kept, True], clip(1.0)) is not None
    inputs[1], signals[1] = 1.5e-162, 1e153
    for kept in (True, mask):
        assert found_of([Outer(inputs, signals), other], [kept, True], clip(1.0)) is None


@subtests("bound", BOUNDS[1:])
def test_examples_that_are_not_certain_are_named_and_change_no_other(bound):
    terms, mask = made(), masks()[1]
    expected, squares, certain = cast(
        BoundFactors, table_of(terms, mask).factors(bound.kind, bound.norm, bound.regulariser)
    )
    assert certain is None
    terms[2].values[3] = torch.nan
    terms[0].inputs[5], terms[0].signals[5], terms[2].values[5] = 1e-13, 1e-13, 1e-13
    terms[2].values[7] = 1e11
    found = cast(BoundFactors, table_of(terms, mask).factors(bound.kind, bound.norm, bound.regulariser))
    assert found.certain is not None
    named = torch.tensor([number in (3, 7) or (number == 5 and bound.kind != "clip") for number in range(EXAMPLES)])
    assert torch.equal(found.certain, ~named)
    others = torch.tensor([number not in (3, 5, 7) for number in range(EXAMPLES)])
    assert torch.equal(found.factors[others], expected[others]) and torch.equal(found.squares[others], squares[others])
    if bound.kind == "clip":
        assert found.factors[5] == 1


def test_what_lies_otherwise_is_left_to_pytorch():
    table = NormTable(3, torch.ones(1))
    assert not GradientRows(torch.ones(40, 3).T).enter(table, True)
    assert not GradientRows(torch.ones(3, 4, dtype=torch.float64)).enter(table, True)
    assert not GradientRows(torch.ones(3, 4)).enter(table, torch.ones(8, dtype=torch.bool)[::2])
    assert not Outer(torch.ones(5, 3).T, torch.ones(3, 2)).enter(table, True)
    assert table.factors() is None  # without any part there is nothing to bound


def test_a_mask_hides_no_number_that_is_not_finite_whoever_computes():
    rows, mask = torch.ones(3, 70), torch.arange(70) < 69
    rows[1, 69] = torch.nan
    for values in (rows, rows.T.contiguous().T):
        squares = GradientRows(values).masked_squares(mask).value
        assert squares[[0, 2]].tolist() == pytest.approx([69, 69]) and bool(squares[1].isnan())
