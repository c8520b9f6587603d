"""A model at which every record has a large gradient, and the ratio of the messages there."""

import math

import pytest
import torch
from scipy import stats

from leakbench.attacks.active_membership import active_membership
from leakbench.attacks.core import NotApplicable

from . import toys


@pytest.mark.long
def test_every_candidate_contributes_the_clip_norm_so_the_auc_is_that_of_a_gaussian():
    noise, aucs, calls = 2.0, [], 2
    for seed in range(6):
        target, member = toys.active_membership_target(seed=seed, noise=noise)
        result = active_membership(target, toys.generator(0))
        assert result.exact and not result.deterministic
        aucs.append(toys.auc(result.scores, member))
    # The toy clips to 1: signal-to-noise ratio sqrt(calls) / noise; std of a mean of six AUCs is 0.012.
    expected = float(stats.norm.cdf(math.sqrt(calls) / noise / math.sqrt(2)))
    assert abs(sum(aucs) / len(aucs) - expected) < 5 * 0.012


def test_the_model_sent_does_not_depend_on_the_candidates_and_gives_large_gradients():
    target, _ = toys.active_membership_target(noise=1.0)
    sent, release, candidates = [], target.release, target.candidates
    assert release is not None and candidates is not None

    def noted(parameters, block):
        sent.append(parameters)
        return release(parameters, block)

    active_membership(toys.replace(target, release=noted), toys.generator(0))
    norms = target.gradient_norms(sent[0], candidates.inputs, candidates.labels)
    assert float(norms.min()) > 0.8  # (1 - 1 / 4)^(1/2) by the bias alone
    others, _ = toys.active_membership_target(noise=1.0, seed=1)
    assert others.candidates is not None and not torch.equal(others.candidates.inputs, candidates.inputs)
    active_membership(toys.replace(target, release=noted, candidates=others.candidates), toys.generator(0))
    calls = len(sent) // 2
    for first, second in zip(sent[:calls], sent[calls:], strict=True):
        assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_without_noise_participants_are_told_and_the_scores_are_decisions():
    target, member = toys.active_membership_target(noise=0.0)
    result = active_membership(target, toys.generator(0))
    assert result.deterministic and toys.auc(result.scores, member) > 0.99


def test_settings_and_networks_that_do_not_fit_are_refused():
    target, _ = toys.active_membership_target(noise=1.0)
    with pytest.raises(ValueError, match="norm must be positive, got 0"):
        active_membership(target, norm=0.0)
    images, _ = toys.active_target(calls=1)
    with pytest.raises(NotApplicable, match="its message shows no candidates"):
        active_membership(toys.replace(images, informed=True))
