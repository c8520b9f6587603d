"""What is particular to DOPPLER: its filter is scipy's, corrected for its start, and it loses noise."""

import math

import numpy as np
import pytest
import torch
from scipy import signal

from leakbench.defenses.core import Context, release, seeded
from leakbench.defenses.doppler import doppler
from leakbench.defenses.dp_sgd import dp_sgd

from ..parameters import subtests
from . import duties

FEEDBACK, FORWARD = [-0.9, 0.1], [0.1, 0.06, 0.04]


def filtered(defense, inputs):
    """The updates that the optimizer gets where these are released."""
    context = Context(step=0, steps=len(inputs), dim=inputs.shape[1])
    state, found = defense.start(context), []
    for step, row in enumerate(inputs):
        state, plan = defense.plan(state, context.at(step))
        out = release(defense, row.unsqueeze(0), context.at(step), state=state)
        found.append(plan.post(out.total))
        state = defense.observe(state, context.at(step), out.noisy, found[-1])
    return torch.stack(found)


def test_it_is_the_recursive_filter_divided_by_what_it_makes_of_ones():
    inputs = torch.randn(12, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ours = filtered(doppler(clip_norm=1e6, feedback=FEEDBACK, forward=FORWARD, noise_multiplier=0.0), inputs)
    coefficients = (FORWARD, [1.0, *FEEDBACK])
    plain = torch.from_numpy(signal.lfilter(*coefficients, inputs.numpy(), axis=0))
    # c_t = -sum a c + sum b: the paper has all b in it from the first step on.
    ones, answers = [], []
    for _ in range(12):
        answers.append(sum(FORWARD) - sum(a * c for a, c in zip(FEEDBACK, reversed(ones), strict=False)))
        ones = answers[-2:]
    torch.testing.assert_close(ours, plain / torch.tensor(answers).unsqueeze(1).double())


def test_a_constant_goes_through_and_noise_hardly():
    constant = torch.ones(200, 3)
    torch.testing.assert_close(filtered(doppler(clip_norm=1e6, noise_multiplier=0.0), constant)[-1], constant[-1])
    defense, noise = doppler(clip_norm=1.0, noise_multiplier=1.0), seeded(2)
    context = Context(step=0, steps=80, dim=3000)
    state, update = defense.start(context), torch.zeros(0)
    for step in range(80):
        state, plan = defense.plan(state, context.at(step))
        out = release(defense, torch.zeros(1, 3000), context.at(step), noise=noise, state=state)
        update = plan.post(out.total)
        state = defense.observe(state, context.at(step), out.noisy, update)
    impulse = torch.eye(400, dtype=torch.float64)[0].numpy()
    left = float(np.linalg.norm(np.asarray(signal.lfilter([0.05, 0.05], [1.0, -0.9], impulse))))
    assert float(update.std()) == pytest.approx(left, rel=0.05) and left < 0.4


def test_without_memory_it_is_dp_sgd_to_the_same_noise_draw():
    one = duties.trained(doppler(clip_norm=0.5, feedback=[], forward=[1.0], noise_multiplier=1.3))
    other = duties.trained(dp_sgd(clip_norm=0.5, noise_multiplier=1.3))
    torch.testing.assert_close(duties.parameters(one), duties.parameters(other), rtol=1e-6, atol=1e-7)


@subtests(
    "settings",
    [
        {"forward": []},
        {"forward": [-1.0]},
        {"feedback": [-1.0]},
        {"feedback": [-2.0]},
        {"feedback": [1.0], "forward": [1.0]},
        {"feedback": [1.5]},
        {"forward": [math.nan]},
    ],
)
def test_a_filter_that_stops_or_grows_is_refused(settings):
    with pytest.raises(ValueError, match="must"):
        doppler(**settings)
