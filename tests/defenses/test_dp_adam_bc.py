"""What is particular to DP-AdamBC: the noise is taken out of the second moment."""

import pytest
import torch

from defenses.core import Adaptive, Context
from defenses.dp_adam import dp_adam
from defenses.dp_adam_bc import dp_adam_bc

CONTEXT = Context(step=3, steps=9, dim=4, expected_batch=10.0, noise_multiplier=2.0)
STATE = (torch.tensor([0.1, -0.2, 0.3, 0.0]), torch.tensor([0.5, 0.02, 0.1, 0.03]))
UPDATE = torch.tensor([0.4, -0.1, 0.2, 0.05])


def test_a_step_by_hand():
    defense = dp_adam_bc(clip_norm=0.5, beta1=0.9, beta2=0.99, stabiliser=1e-3, noise_multiplier=2.0)
    post = defense.plan(STATE, CONTEXT)[1].post
    mean = (0.9 * STATE[0] + 0.1 * UPDATE) / (1 - 0.9**4)
    square = (0.99 * STATE[1] + 0.01 * UPDATE**2) / (1 - 0.99**4)
    noise = (2.0 * 0.5 / 10) ** 2
    expected = mean / (square - noise).clamp(min=1e-6).sqrt()
    torch.testing.assert_close(post(UPDATE), expected)


def test_what_is_left_of_a_second_moment_is_at_least_the_stabilisers_square():
    defense = dp_adam_bc(clip_norm=500.0, stabiliser=0.25, noise_multiplier=2.0)
    post = defense.plan(STATE, CONTEXT)[1].post
    plain = dp_adam(clip_norm=500.0, noise_multiplier=2.0).plan(STATE, CONTEXT)[1].post
    assert isinstance(post, Adaptive) and isinstance(plain, Adaptive)
    assert post.noise_variance == pytest.approx((2.0 * 500.0 / 10) ** 2) and plain.noise_variance is None
    torch.testing.assert_close(post(UPDATE), (0.9 * STATE[0] + 0.1 * UPDATE) / (1 - 0.9**4) / 0.25)


def test_without_noise_there_is_nothing_to_take_out():
    quiet = Context(step=3, steps=9, dim=4, expected_batch=10.0)
    ours = dp_adam_bc(stabiliser=1e-8, noise_multiplier=0.0).plan(STATE, quiet)[1].post
    theirs = dp_adam(stabiliser=1e-8, noise_multiplier=0.0).plan(STATE, quiet)[1].post
    torch.testing.assert_close(ours(UPDATE), theirs(UPDATE))
