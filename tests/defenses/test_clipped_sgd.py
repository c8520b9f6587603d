"""What is particular to clipped SGD: each example is clipped by itself."""

import inspect

import pytest
import torch

from leakbench.defenses.clipped_sgd import clipped_sgd
from leakbench.defenses.core import Context, calibrate, poisson, release
from leakbench.defenses.dp_sgd import dp_sgd


def released(defense, rows):
    return release(defense, rows, Context(step=0, steps=1, dim=rows.shape[1])).total


def test_examples_are_clipped_one_by_one_not_their_mean():
    rows = torch.tensor([[3.0, 4.0], [0.0, 0.5], [-30.0, -40.0]])
    torch.testing.assert_close(released(clipped_sgd(clip_norm=1.0), rows), torch.tensor([0.0, 0.5]))


def test_it_is_dp_sgd_without_the_noise():
    rows = torch.randn(9, 20, generator=torch.Generator().manual_seed(0))
    quiet = dp_sgd(clip_norm=2.0, noise_multiplier=0.0)
    assert torch.equal(released(clipped_sgd(clip_norm=2.0), rows), released(quiet, rows))


def test_there_is_no_noise_to_set_and_none_to_calibrate():
    assert "noise_multiplier" not in inspect.signature(clipped_sgd).parameters


def test_calibration_does_not_turn_it_into_something_else_quietly():
    # With noise it would be DP-SGD under another name; that has a name of its own.
    defense = clipped_sgd(clip_norm=1.0)
    assert defense.noise_multiplier == 0.0
    with pytest.raises(ValueError, match="clipped_sgd"):
        calibrate(defense, epsilon=3.0, delta=1e-5, sampling=poisson(0.1), steps=10)
