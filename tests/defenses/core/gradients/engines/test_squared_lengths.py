"""Squared norms under a mask are those of the masked rows, whatever their length and whatever else is there."""

import torch

from leakbench.defenses.core.gradients.layerwise.factors import GradientRows

from .....parameters import subtests

SIZES = (1, 7, 31, 32, 33, 64, 100, 8192, 8195)


@subtests("dtype", [torch.float32, torch.float64])
@subtests("size", SIZES)
@subtests("scale", [1e-25, 1.0, 1e25])
def test_squares_are_those_of_masked_rows(dtype, size, scale):
    coins = torch.Generator().manual_seed(size)
    rows, mask = scale * torch.randn(5, size, generator=coins, dtype=dtype), torch.rand(size, generator=coins) < 0.5
    expected = (rows.double() * mask).square().sum(dim=1)
    found = GradientRows(rows).masked_squares(mask).value
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    # Rows with something between them, and rows whose numbers are not in one piece.
    wide = torch.full((5, 2 * size), torch.nan, dtype=dtype)
    wide[:, :size] = rows
    assert torch.equal(GradientRows(wide[:, :size]).masked_squares(mask).value, found)
    if scale == 1:  # by PyTorch, whose squares of float32 leave its range
        apart = GradientRows(rows.T.contiguous().T).masked_squares(mask).value
        torch.testing.assert_close(apart, expected, rtol=1e-5, atol=0)


def test_a_row_that_is_not_finite_spoils_no_other_and_a_mask_does_not_hide_it():
    rows, mask = torch.ones(3, 70), torch.arange(70) < 69
    rows[1, 69] = torch.nan
    found = GradientRows(rows).masked_squares(mask).value
    assert found[0] == found[2] == 69 and bool(found[1].isnan())
