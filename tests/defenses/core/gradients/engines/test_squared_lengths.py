"""Squared norms under a mask, by the kernel or by PyTorch; test_kernels.py compares them with a reference."""

import pytest
import torch

from leakbench.defenses.core.gradients.layerwise.factors import GradientRows


def test_a_mask_hides_no_number_that_is_not_finite_whoever_computes():
    rows, mask = torch.ones(3, 70), torch.arange(70) < 69
    rows[1, 69] = torch.nan
    for values in (rows, rows.T.contiguous().T):
        squares = GradientRows(values).masked_squares(mask).value
        assert squares[[0, 2]].tolist() == pytest.approx([69, 69]) and bool(squares[1].isnan())
