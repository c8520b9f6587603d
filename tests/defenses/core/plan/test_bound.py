"""Bounds hold for every row a computer can hold, and have the form that their papers give them."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from leakbench.defenses.core import Bound, NormWithin, adaptive_weight, bounded, clip, normalize, unbounded
from leakbench.defenses.core.plan.bound import finite_rows

from ....parameters import subtests
from ... import duties

BOUNDS = {
    "clip": lambda norm: clip(norm),
    "auto-v": lambda norm: normalize(norm, regulariser=0.0),
    "auto-s": lambda norm: normalize(norm, regulariser=0.01),
    "nsgd": lambda norm: normalize(norm, regulariser=1.0),
    "psac": lambda norm: adaptive_weight(norm, regulariser=0.1),
}
each = pytest.mark.parametrize("name", BOUNDS)
NORMS = [0.0, 1e-30, 1.0, 1e30, math.inf, math.nan]


@each
@subtests("norm", NORMS)
def test_every_norm_ends_up_within_the_bound_and_finite(name, norm):
    bound = BOUNDS[name](0.7)
    row = torch.zeros(1, 5)
    row[0, 2] = norm
    out = bound(row)
    assert out.isfinite().all()
    assert float(out.norm()) <= 0.7 * (1 + 1e-6)
    assert bound.sensitivity == 0.7


@each
@given(row=duties.ADVERSARIAL, norm=st.sampled_from([1e-6, 0.5, 1.0, 1e4]), double=st.booleans())
def test_no_row_whatever_gets_past_a_bound(name, row, norm, double):
    rows = row[None].double() if double else row[None]
    out = BOUNDS[name](norm)(rows)
    assert out.dtype == rows.dtype
    assert float(out.double().norm()) <= norm * (1 + 1e-6)


@each
@subtests("scale", [5e-324, 1.5e-162, 1e-160, 1e-154, 1e-150, 1e150, 1e300])
def test_float64_rows_at_the_ends_of_the_scale_stay_within(name, scale):
    rows = torch.full((1, 50), scale, dtype=torch.float64)
    rows[0, 0] *= 1.1
    out = BOUNDS[name](1.0)(rows)
    assert out.isfinite().all()
    assert float(out.norm()) <= 1 + 1e-6


@each
def test_a_row_that_is_not_finite_becomes_zero_and_its_neighbours_do_not_notice(name):
    rows = torch.tensor([[3.0, 4.0], [math.nan, 1.0], [math.inf, -math.inf], [1.0, 0.0]])
    out = BOUNDS[name](2.0)(rows)
    assert torch.equal(out[1:3], torch.zeros(2, 2))
    assert torch.equal(out[[0, 3]], BOUNDS[name](2.0)(rows[[0, 3]]))


@each
def test_direction_survives_and_bounds_are_differentiable(name):
    rows = torch.tensor([[3.0, 4.0], [0.3, 0.4]], dtype=torch.float64, requires_grad=True)
    out = BOUNDS[name](0.9)(rows).detach()
    torch.testing.assert_close(out[:, 1] * 3, out[:, 0] * 4)
    assert (out > 0).all()
    assert torch.autograd.gradcheck(BOUNDS[name](0.9), (rows,))


@each
def test_long_rows_come_close_to_the_bound(name):
    assert float(BOUNDS[name](0.7)(torch.tensor([[1e6, 0.0]])).norm()) == pytest.approx(0.7, rel=1e-5)


@subtests(
    ("bound", "norm", "expected"),
    [
        (clip(2.0), 1.5, 1.5),
        (clip(2.0), 8.0, 2.0),
        (normalize(2.0, regulariser=0.0), 1e-20, 2.0),
        (normalize(2.0, regulariser=0.5), 1.5, 2.0 * 1.5 / 2.0),
        (adaptive_weight(2.0, regulariser=0.1), 0.9, 2.0 * 0.9 / (0.9 + 0.1 / 1.0)),
    ],
)
def test_the_forms_are_those_of_the_papers(bound, norm, expected):
    assert float(bound(torch.tensor([[0.0, norm]])).norm()) == pytest.approx(expected, rel=1e-6)


def test_the_adaptive_weight_is_c_at_zero_and_largest_where_it_should_be():
    bound, r = adaptive_weight(1.0, regulariser=0.04), 0.04
    assert float(bound.factors(torch.tensor([0.0]))) == pytest.approx(1.0)  # C, not C / r
    norms = torch.linspace(0, 2, 20_001, dtype=torch.float64)
    weights = bound.factors(norms)
    assert float(weights.max()) == pytest.approx(1 / (2 * math.sqrt(r) - r), rel=1e-6)
    assert float(norms[weights.argmax()]) == pytest.approx(math.sqrt(r) - r, abs=1e-4)


def test_unbounded_rows_are_untouched_but_for_broken_ones():
    rows = torch.tensor([[1e30, 1.0], [math.nan, 1.0]])
    assert torch.equal(unbounded()(rows), torch.tensor([[1e30, 1.0], [0.0, 0.0]]))
    assert unbounded(unit=3.0).sensitivity == math.inf
    assert unbounded(unit=3.0).norm == 3.0


def test_finite_rows_pass_unchanged_even_where_their_sum_overflows():
    largest = torch.full((1, 4), torch.finfo(torch.float64).max, dtype=torch.float64)
    assert torch.equal(finite_rows(largest), largest)
    mixed = torch.tensor([[math.inf, -math.inf], [3e38, 3e38], [1.0, math.nan]])
    assert torch.equal(finite_rows(mixed), torch.tensor([[0.0, 0.0], [3e38, 3e38], [0.0, 0.0]]))


def test_the_count_of_small_norms_fits_its_bound_of_one_half():
    rows = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0], [1e30, 0.0]])
    answers = NormWithin(0.6)(lambda point: rows)
    assert answers.tolist() == [[-0.5], [0.5], [0.5], [-0.5]]
    assert torch.equal(clip(0.5)(answers), answers)


@subtests("norm", [0.0, -1.0, math.nan, math.inf])
def test_a_norm_that_bounds_nothing_is_refused(norm):
    for bound in (clip, unbounded_at, *BOUNDS.values()):
        with pytest.raises(ValueError, match="the bound's norm must be a positive finite number, got"):
            bound(norm)


def unbounded_at(unit):
    return unbounded(unit=unit)


@subtests("regulariser", [-1.0, math.nan, math.inf])
def test_a_regulariser_that_is_no_length_is_refused(regulariser):
    for bound in (normalize, adaptive_weight):
        with pytest.raises(ValueError, match="regulariser must be"):
            bound(1.0, regulariser=regulariser)


def test_an_adaptive_weight_without_a_regulariser_is_refused_however_it_is_made():
    with pytest.raises(ValueError, match="regulariser must be positive, got 0"):
        adaptive_weight(1.0, regulariser=0.0)
    with pytest.raises(ValueError, match="regulariser must be positive, got 0"):
        Bound(kind="adaptive_weight", norm=1.0)


def test_a_bound_by_name_is_the_papers_unless_it_is_told_otherwise():
    assert bounded(0.7) == bounded(0.7, "clip") == clip(0.7)
    assert bounded(0.7, "normalize") == normalize(0.7, regulariser=0.01)
    assert bounded(0.7, "adaptive_weight") == adaptive_weight(0.7, regulariser=0.1)
    assert bounded(0.7, "normalize", 0.0) == normalize(0.7, regulariser=0.0)
    with pytest.raises(ValueError, match=r"regulariser must be None for the bound 'clip', which has none, got 0\.1"):
        bounded(0.7, "clip", 0.1)
    with pytest.raises(ValueError, match="regulariser must be positive, got 0; without one the bound is normalize"):
        bounded(0.7, "adaptive_weight", 0.0)


def test_the_bound_in_the_readme_does_what_is_said_of_one():
    readme = (Path(__file__).parents[4] / "defenses" / "README.md").read_text(encoding="utf-8")
    (code,) = (found for found in re.findall(r"```python\n(.*?)```", readme, re.S) if "(Bound)" in found)
    names: dict[str, object] = {"__name__": __name__}
    exec(code, names)  # noqa: S102 - our own text
    defense: Any = names["defense"]
    sizes = torch.tensor([0.0, 1e-30, 1e-3, 1.0, 10.0, 1e30]).unsqueeze(1)
    rows = sizes * torch.randn(6, 9, generator=torch.Generator().manual_seed(0))
    bound, norms = defense.method.bound, rows.double().norm(dim=1)
    assert torch.allclose(bound(rows).double().norm(dim=1), norms / (1 + norms), rtol=1e-5)
    taken = bound(rows, torch.full((6,), 3.0, dtype=torch.float64)).double().norm(dim=1)
    assert torch.allclose(taken, norms / (1 + norms.clamp(min=3)), rtol=1e-5)
    assert any("bound Smooth" in one for one in duties.trained(defense).claim(1e-5).unverified)
