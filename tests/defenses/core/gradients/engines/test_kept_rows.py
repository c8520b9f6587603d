"""Rows in an order of their own, and directions that are brought into it once."""

import gc

import pytest
import torch

from leakbench.defenses.core.gradients.layerwise.layers import kept_rows
from leakbench.defenses.core.gradients.layerwise.layers.convolution_settings import Geometry
from leakbench.defenses.core.gradients.layerwise.layers.kept_rows import ProductOrder


def order_of(channels, kernel):
    return ProductOrder(
        Geometry(channels=channels, kernel=kernel, stride=(1, 1), dilation=(1, 1), padding=(0, 0, 0, 0), groups=1)
    )


@pytest.mark.parametrize(
    ("channels", "kernel"), [((3, 8), (2, 3)), ((1, 8), (1, 1)), ((4, 1), (1, 1)), ((1, 1), (3, 3))]
)
def test_directions_that_are_kept_are_forgotten_with_their_basis_and_noticed_when_they_change(channels, kernel):
    order, size = order_of(channels, kernel), channels[0] * channels[1] * kernel[0] * kernel[1]
    gc.collect()  # of bases that earlier tests left in cycles
    held = len(kept_rows._REORDERED)
    made, basis = torch.randn(5, size), torch.randn(4, size).T
    wanted = order.in_order(made)

    def right(start, piece):
        expected = wanted[:, start : start + len(piece)] @ piece
        return torch.allclose(order.products(made, start, piece), expected, atol=1e-5)

    for _ in range(2):  # of which the second is asked of what is held
        assert right(0, basis)
        assert right(0, basis[: size // 2 or 1])
        assert right(size // 2, basis[size // 2 :])
        assert right(0, basis[size - size // 2 - 1 :][: size // 2 or 1])
    assert order.products(made, 0, basis[:, :0]).shape == (5, 0)
    basis.mul_(2.0)
    assert right(0, basis)
    basis[0, 0] = 7.0
    assert right(0, basis) and right(0, basis[: size // 2 or 1])
    del basis
    gc.collect()
    assert len(kept_rows._REORDERED) == held
