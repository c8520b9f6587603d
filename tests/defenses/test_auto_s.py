"""What is particular to AUTO-S: its formula, and that it is a bound of any method."""

import pytest
import torch

from defenses.auto_s import auto_s
from defenses.core import Context, release
from defenses.dp_sgd import dp_sgd
from defenses.random_sparsification import random_sparsification

ROWS = torch.randn(6, 20, generator=torch.Generator().manual_seed(0)) * torch.logspace(-4, 3, 6).unsqueeze(1)
NORMS = ROWS.norm(dim=1, keepdim=True)
CONTEXT = Context(step=0, steps=1, dim=20)
DEFENSE = auto_s(clip_norm=0.7, gamma=0.02, noise_multiplier=0.0)


def test_an_example_adds_what_the_formula_says():
    expected = 0.7 * ROWS / (NORMS + 0.02)  # C g / (|g| + gamma)
    for row, own in zip(ROWS.split(1), expected, strict=True):
        torch.testing.assert_close(release(DEFENSE, row, CONTEXT).total, own, rtol=1e-5, atol=1e-7)


def test_it_is_a_bound_of_any_codec():
    (mine,) = auto_s(clip_norm=0.7).plan(None, CONTEXT)[1].blocks
    for method in (dp_sgd, random_sparsification):
        (theirs,) = method(clip_norm=0.7, bound="normalize", regulariser=None).plan(None, CONTEXT)[1].blocks
        assert theirs.bound == mine.bound


def test_a_zero_gradient_stays_zero_and_a_tiny_one_has_the_weight_of_norm_zero():
    zero, tiny = torch.zeros(1, 20), torch.eye(1, 20) * 1e-6
    assert torch.equal(release(DEFENSE, zero, CONTEXT).total, zero[0])
    weight = float(release(DEFENSE, tiny, CONTEXT).total[0]) / 1e-6
    assert weight == pytest.approx(0.7 / 0.02, rel=1e-3)


def test_without_its_regulariser_it_is_another_form():
    with pytest.raises(ValueError, match="must be positive, got"):
        auto_s(gamma=0.0)
