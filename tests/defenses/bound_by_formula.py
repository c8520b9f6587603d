"""What every clip function owes: its formula, that it is a bound of any method, and its weight at norm zero."""

import pytest
import torch
from torch import Tensor

from leakbench.defenses.core import BoundKind, Context, Defense, release
from leakbench.defenses.dp_sgd import dp_sgd
from leakbench.defenses.random_sparsification import random_sparsification

C = 0.7
ROWS = torch.randn(6, 20, generator=torch.Generator().manual_seed(0)) * torch.logspace(-4, 3, 6).unsqueeze(1)
NORMS = ROWS.norm(dim=1, keepdim=True)
CONTEXT = Context(step=0, steps=1, dim=20)


def check_formula(defense: Defense, weights: Tensor) -> None:
    """An example of the rows adds its gradient times C and its weight [6, 1]."""
    for row, own in zip(ROWS.split(1), C * ROWS * weights, strict=True):
        torch.testing.assert_close(release(defense, row, CONTEXT).total, own, rtol=1e-5, atol=1e-7)


def check_bound_of_any_method(defense: Defense, bound: BoundKind, regulariser: float | None) -> None:
    """What takes a clip norm takes this clip function, by its name among the bounds."""
    (mine,) = defense.plan(None, CONTEXT)[1].blocks
    for method in (dp_sgd, random_sparsification):
        (theirs,) = method(clip_norm=C, bound=bound, regulariser=regulariser).plan(None, CONTEXT)[1].blocks
        assert theirs.bound == mine.bound


def check_short_gradients(defense: Defense, weight: float) -> None:
    """A gradient of zero stays zero, and one of norm 1e-6 is multiplied by C and this weight."""
    zero, tiny = torch.zeros(1, 20), torch.eye(1, 20) * 1e-6
    assert torch.equal(release(defense, zero, CONTEXT).total, zero[0])
    assert float(release(defense, tiny, CONTEXT).total[0]) / 1e-6 == pytest.approx(C * weight, rel=1e-3)
