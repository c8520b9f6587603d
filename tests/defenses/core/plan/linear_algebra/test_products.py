"""Inner products of long rows, which are subtracted from them: in float32 a plain product loses more than is left."""

import pytest
import torch

from leakbench.defenses.core import Subspace
from leakbench.defenses.core.plan.linear_algebra.products import inner_products

from .....parameters import subtests

COINS = torch.Generator().manual_seed(0)


@subtests("width", [3, 8192, 4 * 8192 - 1, 4 * 8192, 100_003])
@subtests("directions", [1, 5])
def test_strips_and_what_is_left_over_are_all_of_a_product(width, directions):
    rows = torch.randn(4, width, generator=COINS, dtype=torch.float64)
    basis = torch.randn(width, directions, generator=COINS, dtype=torch.float64)
    torch.testing.assert_close(inner_products(rows, basis), rows @ basis)
    # As they lie in a flat row, of which a layer has a part.
    wide = torch.randn(4, width + 7, generator=COINS, dtype=torch.float64)
    torch.testing.assert_close(inner_products(wide[:, 3:-4], basis), wide[:, 3:-4] @ basis)


@pytest.mark.parametrize("rows", [1, 2, 17])
def test_a_long_row_along_a_direction_has_its_length_as_coefficient(rows):
    """A plain product is off by 1e-3 here, and by 1e-2 for the eleven million numbers of a ResNet."""
    direction = torch.randn(2_000_000, 1, generator=COINS, dtype=torch.float64)
    subspace = Subspace.of((direction / direction.norm()).float())
    (basis,) = subspace.bases
    exact = float(basis.double().square().sum())
    along = subspace.encode(basis.T.repeat(rows, 1))
    torch.testing.assert_close(along.double(), torch.full((rows, 1), exact).double(), rtol=1e-6, atol=0)
    torch.testing.assert_close(float(subspace.moments()[0]), exact, rtol=1e-6, atol=0)
