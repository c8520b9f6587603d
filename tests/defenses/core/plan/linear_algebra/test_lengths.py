"""Lengths of long rows, by which bounds go: in float32 a plain norm loses more than a bound may."""

import torch

from leakbench.defenses.core import clip
from leakbench.defenses.core.plan.linear_algebra.lengths import lengths

COINS = torch.Generator().manual_seed(0)


def test_long_rows_are_measured_to_the_last_digits_of_float32():
    rows = torch.randn(2, 3_000_001, generator=COINS)
    exact = rows.double().norm(dim=1)
    torch.testing.assert_close(lengths(rows), exact, rtol=3e-7, atol=0)
    short = torch.linalg.vector_norm(rows[:, :5000], dim=1).double()
    torch.testing.assert_close(lengths(rows[:, :5000]), short)
    assert lengths(rows[:, :0]).tolist() == [0.0, 0.0]


def test_a_row_as_long_as_a_large_networks_stays_within_its_bound():
    """A norm in one piece falls short by 4e-4 here, and the row would be longer than its bound by that."""
    row = torch.randn(1, 11_200_000, generator=COINS)
    bounded = clip(1.0)(row)
    assert abs(float(bounded.double().norm()) - 1) < 3e-7


def test_lengths_have_the_derivative_of_a_norm():
    rows = torch.randn(2, 20_000, generator=COINS, requires_grad=True)
    (found,) = torch.autograd.grad(lengths(rows).sum(), rows)
    (expected,) = torch.autograd.grad(torch.linalg.vector_norm(rows.double(), dim=1).sum(), rows)
    torch.testing.assert_close(found, expected)
