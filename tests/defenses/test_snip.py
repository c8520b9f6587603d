"""What is particular to SNIP without noise: its mask is the data's, and so nothing is proved."""

import math

import torch

from leakbench.defenses.core import cross_entropy, per_example_gradients
from leakbench.defenses.snip import snip

from . import duties


def test_the_mask_is_that_of_the_summed_gradient_times_the_weight():
    run = duties.trained(snip(prune_rate=0.5, noise_multiplier=1.0))
    model = duties.network()
    rows = per_example_gradients(model, cross_entropy, duties.LAYOUT, *duties.DATA)
    scores = (rows.sum(dim=0) * duties.LAYOUT.read(model)).abs()
    weights = torch.cat([torch.arange(a, b) for a, b in duties.LAYOUT.weights])
    lowest = weights[scores[weights].argsort()[: len(weights) // 2]]
    kept = torch.ones(duties.DIM, dtype=torch.bool).index_fill(0, lowest, False)
    assert torch.equal(run.state, kept.nonzero().flatten())


def test_its_steps_are_private_and_the_run_is_not():
    claim = duties.trained(snip(noise_multiplier=1.0)).claim(1e-5)
    assert claim.epsilon == math.inf and "one example's contribution is not bounded" in claim.reason
