"""What is particular to the likelihood ratio of one step; the formulas are tested in test_likelihood.py."""

import pytest
import torch
from scipy.stats import norm

from leakbench.attacks.one_step_likelihood_ratio import one_step_likelihood_ratio

from . import toys


@pytest.mark.long
def test_its_power_is_that_of_the_average_contribution():
    """With all others removed, the AUC is the mean of Phi(||v|| / (s sqrt 2)) when all ||v|| are alike."""
    expected, found = [], []
    for seed in range(40):
        # One of two candidates took part; the noise is that of a multiplier of 1.
        target, member = toys.membership_step(seed=seed, noise=1.0, count=40)
        assert target.candidates is not None
        v = target.contributions(target.candidates.inputs, target.candidates.labels)
        expected.append(norm.cdf(v.norm(dim=1) / 2**0.5).mean())
        found.append(toys.auc(one_step_likelihood_ratio(target).scores, member))
    # All scores of one step share its noise, so the steps are the sample.
    error = torch.tensor(found).std().item() / len(found) ** 0.5
    assert abs(sum(found) / len(found) - sum(expected) / len(expected)) < 4 * error


def test_the_divisor_is_taken_out():
    """Released values are divided, the test works on undivided sums: Lambda is that of the sums."""
    target, _ = toys.membership_step(noise=0.5, count=20)
    assert target.expected_batch == 10
    candidates = target.candidates
    assert candidates is not None and target.others_removed is not None
    v = target.contributions(candidates.inputs, candidates.labels).double()
    r = target.others_removed().double()
    by_hand = (v * r).sum(1) / 0.25 - v.square().sum(1) / 0.5
    torch.testing.assert_close(one_step_likelihood_ratio(target).scores, by_hand, rtol=1e-5, atol=1e-5)


def test_it_says_that_it_is_exact_and_what_its_scores_share():
    result = one_step_likelihood_ratio(toys.membership_step(noise=0.5, count=20)[0])
    assert result.exact and not result.deterministic and result.dependence == "per_step"
    assert result.scores.dtype == torch.float64
