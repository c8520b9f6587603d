"""Least squares: NumPy's solutions, and the same digits at every call."""

import numpy as np
import torch

from leakbench.attacks.core.closed_form.least_squares import least_squares

from ..parameters import subtests

SHAPES = [(33, 16), (16, 33), (64, 17), (5, 5)]


def system(shape, *, rank=None):
    coins = torch.Generator().manual_seed(shape[0])
    matrix = torch.randn(shape, generator=coins, dtype=torch.float64)
    if rank is not None:
        matrix = matrix[:, :rank] @ torch.randn(rank, shape[1], generator=coins, dtype=torch.float64)
    return matrix, torch.randn(shape[0], 2, generator=coins, dtype=torch.float64)


@subtests("shape", SHAPES)
@subtests("rank", [None, 3])
def test_solutions_are_the_shortest_of_the_best(shape, rank):
    matrix, values = system(shape, rank=rank)
    expected = np.linalg.lstsq(matrix.numpy(), values.numpy(), rcond=1e-12)[0]
    torch.testing.assert_close(least_squares(matrix, values), torch.from_numpy(expected), rtol=1e-8, atol=1e-9)
    several = least_squares(matrix.expand(3, *shape), values.expand(3, *values.shape))
    torch.testing.assert_close(several[1], torch.from_numpy(expected), rtol=1e-8, atol=1e-9)


@subtests("shape", SHAPES)
def test_equal_calls_have_equal_digits_wherever_memory_lies(shape):
    matrix, values = (each.float() for each in system(shape))
    first, held = least_squares(matrix, values), []
    for number in range(30):
        held.append(torch.full((37 * number % 101 + 1,), torch.nan))  # what a driver finds in fresh memory
        if number % 3 == 0:
            held.pop(len(held) // 2)
        assert torch.equal(least_squares(matrix, values), first)
