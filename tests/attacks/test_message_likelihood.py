"""Likelihood ratios of sums of local steps: distributions, calibration as e-values, rejection of wrong variances."""

import math
from dataclasses import replace

import pytest
import torch
from scipy import stats

from leakbench.attacks.core import NotApplicable, SeenMessage
from leakbench.attacks.core.membership.message_evidence import joined_weights, log_ratio
from leakbench.attacks.likelihood_ratio import likelihood_ratio
from leakbench.attacks.message_likelihood import message_likelihood

from ..parameters import subtests
from . import toys


def message(*, tau: int, rate: float, std: float = 1.0) -> SeenMessage:
    """A message whose numbers nobody reads: weights, rate and noise alone count."""
    (first,) = toys.messages(noise=1.0, rounds=1, count=4)[0].messages
    participation = "known" if rate == 1 else "independent"
    return replace(first, weights=(1.0,) * tau, sample_rate=rate, participation=participation, noise_std=std)


def draws(*, tau: int, std: float, norm: float, joined: torch.Tensor) -> torch.Tensor:
    """<v, w> of independent messages, of a record that joined so many of their steps."""
    noise = torch.randn(len(joined), generator=toys.generator(3), dtype=torch.float64)
    return joined * norm**2 + norm * std * math.sqrt(tau) * noise


@subtests("tau, rate", [(1, 0.2), (5, 0.2), (10, 0.05), (3, 1.0)])
def test_equal_weights_are_joined_binomially(tau, rate):
    totals, logs = joined_weights((1.0,) * tau, rate)
    expected = stats.binom.pmf(totals.round().numpy(), tau, rate)
    assert torch.allclose(logs.exp(), torch.tensor(expected), rtol=1e-9)
    assert logs.exp().sum() == pytest.approx(1)
    assert len(totals) == (1 if rate == 1 else tau + 1)


def test_unequal_weights_have_the_mean_and_variance_of_independent_coins():
    weights = (1.0, 0.7, 0.49, 0.343)
    totals, logs = joined_weights(weights, 0.3)
    mean = (logs.exp() * totals).sum()
    assert mean == pytest.approx(0.3 * sum(weights))
    assert (logs.exp() * (totals - mean).square()).sum() == pytest.approx(0.21 * sum(w**2 for w in weights))
    assert len(totals) == 16


def test_too_many_sums_of_weights_are_refused():
    with pytest.raises(NotApplicable, match="weights of 13 local steps have more than 4096 sums"):
        joined_weights(tuple(1 + 2.0**-k for k in range(13)), 0.5)


@subtests("tau, rate", [(1, 0.2), (5, 0.3)])
def test_ratios_of_non_members_average_to_one_and_wrong_variances_do_not(tau, rate):
    """E_0 exp(LLR) = 1: the ratio of two densities under the second. A std of 2/3 or 3/2 is rejected."""
    norm, count = 0.8, 200_000
    products = draws(tau=tau, std=1.0, norm=norm, joined=torch.zeros(count))
    squares = torch.full((count,), norm**2, dtype=torch.float64)

    def deviations(std: float) -> float:
        ratios = log_ratio(message(tau=tau, rate=rate, std=std), products, squares).exp()
        return float((ratios.mean() - 1) / (ratios.std() / math.sqrt(count)))

    # Five standard errors; the right std lies within, the wrong ones at more than ten.
    assert abs(deviations(1.0)) < 5
    assert abs(deviations(2 / 3)) > 10 and abs(deviations(3 / 2)) > 10


def test_ratios_of_members_are_the_inverse_of_an_average_of_one():
    """E_1 exp(-LLR) = 1, with members who join each step by a coin of the rate: a wrong rate is rejected."""
    tau, rate, norm, count = 4, 0.3, 1.0, 200_000
    joined = (torch.rand(count, tau, generator=toys.generator(1), dtype=torch.float64) < rate).sum(dim=1)
    products = draws(tau=tau, std=1.0, norm=norm, joined=joined)
    squares = torch.full((count,), norm**2, dtype=torch.float64)

    def deviations(q: float) -> float:
        inverse = (-log_ratio(message(tau=tau, rate=q), products, squares)).exp()
        return float((inverse.mean() - 1) / (inverse.std() / math.sqrt(count)))

    assert abs(deviations(rate)) < 5
    assert abs(deviations(rate * 1.5)) > 10 and abs(deviations(rate / 1.5)) > 10


def test_of_single_steps_it_is_the_likelihood_ratio_of_all_steps():
    target, _ = toys.messages(seed=2, noise=0.7)
    steps, _ = toys.transcript(seed=2, noise=0.7)
    result, reference = message_likelihood(target), likelihood_ratio(steps)
    assert result.exact and not result.deterministic
    assert torch.allclose(result.scores, reference.scores, rtol=1e-5, atol=1e-5)


def test_several_local_steps_and_dependent_participation_are_approximations():
    target, _ = toys.messages(seed=2, noise=0.7)

    def exact(**changes) -> bool:
        return message_likelihood(replace(target, messages=[replace(m, **changes) for m in target.messages])).exact

    assert exact(sample_rate=0.5, participation="independent")
    assert not exact(sample_rate=0.5, participation="dependent")
    assert not exact(sample_rate=0.5, participation="independent", weights=(1.0, 1.0))


def test_without_noise_members_show_their_contribution_and_others_nothing():
    target, member = toys.messages(seed=1, noise=0.0)
    result = message_likelihood(target)
    assert result.deterministic and not result.exact
    assert result.scores[member].min() == 1 and result.scores[~member].abs().max() == 0


def test_messages_without_sums_are_refused_with_their_reason():
    target, _ = toys.messages(seed=1, noise=1.0)
    bare = [
        replace(m, sums=None, weights=(), why_no_sums="the largest entries alone are sent") for m in target.messages
    ]
    with pytest.raises(NotApplicable, match="do not show the sums of local steps: the largest entries alone are sent"):
        message_likelihood(replace(target, messages=bare))
