"""What is particular to DP-AdamBC: the noise is taken out of the second moment."""

import math

import pytest
import torch

from leakbench.defenses.core import Adaptive, Context, release, seeded
from leakbench.defenses.dp_adam import dp_adam
from leakbench.defenses.dp_adam_bc import dp_adam_bc

CONTEXT = Context(step=3, steps=9, dim=4, expected_batch=10.0, noise_multiplier=2.0)
STATE = (torch.tensor([0.1, -0.2, 0.3, 0.0]), torch.tensor([0.5, 0.02, 0.1, 0.03]))
UPDATE = torch.tensor([0.4, -0.1, 0.2, 0.05])


def after_three_steps(variance, beta2):
    """The state, with the average of as many equal variances."""
    return *STATE, torch.tensor(variance * (1 - beta2**3), dtype=torch.float64)


def test_a_step_by_hand():
    defense = dp_adam_bc(clip_norm=0.5, beta1=0.9, beta2=0.99, stabiliser=1e-3, noise_multiplier=2.0)
    noise = (2.0 * 0.5 / 10) ** 2
    post = defense.plan(after_three_steps(noise, 0.99), CONTEXT)[1].post
    mean = (0.9 * STATE[0] + 0.1 * UPDATE) / (1 - 0.9**4)
    square = (0.99 * STATE[1] + 0.01 * UPDATE**2) / (1 - 0.99**4)
    expected = mean / (square - noise).clamp(min=1e-6).sqrt()
    torch.testing.assert_close(post(UPDATE), expected)


def test_what_is_left_of_a_second_moment_is_at_least_the_stabilisers_square():
    defense = dp_adam_bc(clip_norm=500.0, stabiliser=0.25, noise_multiplier=2.0)
    state = after_three_steps((2.0 * 500.0 / 10) ** 2, 0.999)
    post = defense.plan(state, CONTEXT)[1].post
    plain = dp_adam(clip_norm=500.0, noise_multiplier=2.0).plan(state, CONTEXT)[1].post
    assert isinstance(post, Adaptive) and isinstance(plain, Adaptive)
    assert post.noise_variance == pytest.approx((2.0 * 500.0 / 10) ** 2) and plain.noise_variance is None
    torch.testing.assert_close(post(UPDATE), (0.9 * STATE[0] + 0.1 * UPDATE) / (1 - 0.9**4) / 0.25)


def test_without_noise_there_is_nothing_to_take_out():
    quiet = Context(step=3, steps=9, dim=4, expected_batch=10.0)
    ours = dp_adam_bc(stabiliser=1e-8, noise_multiplier=0.0).plan(after_three_steps(0.0, 0.999), quiet)[1].post
    theirs = dp_adam(stabiliser=1e-8, noise_multiplier=0.0).plan(after_three_steps(0.0, 0.999), quiet)[1].post
    torch.testing.assert_close(ours(UPDATE), theirs(UPDATE))


def test_of_noise_alone_nothing_is_left_and_half_of_the_coordinates_lie_on_the_floor():
    """What the docstring says of large noise; a variance that is 5 % off, or of sums, moves the mean by 20 errors."""
    dim, steps, sigma, clip_norm, batch = 4000, 100, 2.0, 0.5, 10.0
    defense, noise = dp_adam_bc(clip_norm=clip_norm, stabiliser=1e-6, noise_multiplier=sigma), seeded(3)
    context = Context(step=0, steps=steps, dim=dim, expected_batch=batch, noise_multiplier=sigma)
    states, updates = [defense.start(context)], []
    for step in range(steps):
        context = context.at(step)
        out = release(defense, torch.zeros(1, dim), context, noise=noise, state=states[-1])
        states.append(defense.observe(states[-1], context, out.noisy, out.total))
        updates.append(out.noisy[0] / batch)
    variance = (sigma * clip_norm / batch) ** 2
    left = states[-1][1] / (1 - 0.999**steps) - variance
    error = math.sqrt(2 / steps) * variance
    assert abs(float(left.mean())) < 5 * error / math.sqrt(dim)
    assert float(left.std()) == pytest.approx(error, rel=0.1)
    post = defense.plan(states[-2], context)[1].post
    step, mean = post(updates[-1]), states[-1][0] / (1 - 0.9**steps)
    floor = step.abs() > 0.5 * mean.abs() / 1e-6
    assert float(floor.float().mean()) == pytest.approx(0.5, abs=0.06)
    assert float(step[floor].square().sum() / step.square().sum()) > 0.99
