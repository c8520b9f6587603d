"""What is particular to noisy SGD: the noise of DP-SGD on a sum that is not clipped."""

import math

import pytest
import torch

from leakbench.defenses.core import Context, calibrate, poisson, release
from leakbench.defenses.noisy_sgd import noisy_sgd

from . import duties


def released(defense, rows, seed=0):
    context = Context(step=0, steps=1, dim=rows.shape[1])
    return release(defense, rows, context, noise=torch.Generator().manual_seed(seed)).total


def test_nothing_is_clipped():
    rows = torch.tensor([[3e4, 4e4], [0.0, 1.0]])
    assert torch.equal(released(noisy_sgd(noise_multiplier=0.0), rows), torch.tensor([3e4, 40001.0]))


def test_noise_is_in_units_of_the_nominal_norm():
    rows = torch.zeros(1, 5000)
    noise = released(noisy_sgd(nominal_norm=0.1, noise_multiplier=3.0), rows)
    assert duties.has_scale(noise, 0.3)
    assert not duties.has_scale(noise, 0.3 * 1.5)


def test_no_noise_multiplier_proves_anything():
    run = duties.trained(noisy_sgd(noise_multiplier=1e6))
    assert run.claim(1e-5).epsilon == math.inf
    assert run.claim(1e-5).reason == "one example's contribution is not bounded"
    with pytest.raises(ValueError, match="'noisy_sgd' proves no epsilon at any noise multiplier: one example's"):
        calibrate(noisy_sgd(), epsilon=3.0, delta=1e-5, sampling=poisson(0.1), steps=10)
