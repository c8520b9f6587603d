"""What is particular to DP-SGD: it is Algorithm 1, written out with a loop of autograd."""

import pytest
import torch
from torch import nn

from leakbench.defenses.core import poisson, seeded, train
from leakbench.defenses.dp_sgd import dp_sgd

from ..parameters import subtests
from . import duties


def by_hand(*, clip_norm, sigma, rate, steps, lr):
    """Algorithm 1 with the fixed denominator, one example at a time."""
    inputs, labels = duties.DATA
    model, noise = duties.network(), seeded(7)
    for step in range(steps):
        total = torch.zeros(duties.DIM)
        for i in poisson(rate).indices(step, len(inputs), 3).tolist():
            model.zero_grad()
            nn.functional.cross_entropy(model(inputs[i : i + 1]), labels[i : i + 1]).backward()
            gradient = nn.utils.parameters_to_vector([p.grad for p in model.parameters() if p.grad is not None])
            total += gradient * min(1.0, clip_norm / float(gradient.norm()))
        if sigma:
            total = noise.add(total.double(), sigma * clip_norm).float()
        flat = nn.utils.parameters_to_vector(model.parameters()).detach()
        nn.utils.vector_to_parameters(flat - lr * total / (rate * len(inputs)), model.parameters())
    return duties.LAYOUT.read(model)


@pytest.mark.parametrize(("clip_norm", "sigma"), [(0.3, 1.1), (100.0, 0.5), (0.3, 0.0)])
def test_it_is_algorithm_1(clip_norm, sigma):
    run = train(
        duties.network(),
        duties.DATA,
        dp_sgd(clip_norm=clip_norm, noise_multiplier=sigma),
        sampling=poisson(0.25),
        steps=5,
        lr=0.2,
        noise=seeded(7),
        sampler_key=3,
    )
    expected = by_hand(clip_norm=clip_norm, sigma=sigma, rate=0.25, steps=5, lr=0.2)
    torch.testing.assert_close(duties.parameters(run), expected, rtol=1e-5, atol=1e-6)


@subtests("sigma", [-1.0, 1e-200, float("nan"), float("inf")])
def test_a_noise_multiplier_that_is_no_scale_is_refused(sigma):
    with pytest.raises(ValueError, match=r"noise_multiplier must be 0 for no noise, or in \[1e-06, 1e\+09\], got"):
        dp_sgd(noise_multiplier=sigma)
