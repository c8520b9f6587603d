"""What is particular to DP-Adam: it is PyTorch's Adam on the updates of DP-SGD."""

import math

import pytest
import torch

from leakbench.defenses.core import Context, release, seeded
from leakbench.defenses.dp_adam import dp_adam
from leakbench.defenses.dp_sgd import dp_sgd

from ..parameters import subtests
from . import duties


def test_it_is_dp_sgd_trained_with_pytorchs_adam():
    """Adam in the optimizer's place, on the same draws, moves the model the same way."""
    ours = duties.trained(dp_adam(clip_norm=0.5, noise_multiplier=1.0), momentum=0.0, lr=0.01)
    theirs = duties.trained(dp_sgd(clip_norm=0.5, noise_multiplier=1.0), momentum=0.0, lr=0.01, optimizer="adam")
    torch.testing.assert_close(duties.parameters(ours), duties.parameters(theirs), rtol=1e-5, atol=1e-6)


def moments(steps, *, dim=2000, batch=10.0, sigma=2.0, clip_norm=0.5):
    """Both moments after steps without a signal."""
    defense, noise = dp_adam(clip_norm=clip_norm, beta2=0.99, noise_multiplier=sigma), seeded(1)
    context = Context(step=0, steps=steps, dim=dim, expected_batch=batch, noise_multiplier=sigma)
    state = defense.start(context)
    for step in range(steps):
        context = context.at(step)
        out = release(defense, torch.zeros(1, dim), context, noise=noise, state=state)
        state = defense.observe(state, context, out.noisy, out.total)
    return state, sigma * clip_norm / batch


def test_noise_settles_at_its_share_of_both_moments():
    (first, second, _), std = moments(600)
    assert float(first.std()) == pytest.approx(std * math.sqrt((1 - 0.9) / (1 + 0.9)), rel=0.1)
    assert float(second.mean()) == pytest.approx(std**2, rel=0.05)


@subtests("settings", [{"beta1": 1.0}, {"beta2": -0.1}, {"stabiliser": 0.0}, {"stabiliser": math.inf}])
def test_what_makes_no_sense_is_refused(settings):
    with pytest.raises(ValueError, match="must be"):
        dp_adam(**settings)
