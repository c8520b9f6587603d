"""What is particular to gradient similarity; the duties of every attack are in test_every_attack.py."""

import dataclasses

import pytest
import torch
from torch.nn.functional import cosine_similarity

from leakbench.attacks.gradient_similarity import gradient_similarity

from . import toys


def test_scores_are_cosines_and_inner_products_with_the_undivided_update():
    target, _ = toys.sparse_step(count=30, joined=4)
    asked = target.candidates
    assert asked is not None
    own = target.contributions(asked.inputs, asked.labels).double()
    sums = 4 * target.released.double()
    cosines = cosine_similarity(own, sums[None])
    assert torch.allclose(gradient_similarity(target, batch_size=7).scores, cosines)
    assert torch.allclose(gradient_similarity(target, measure="inner").scores, own @ sums)


def test_an_example_without_a_gradient_has_a_cosine_of_nothing():
    target, _ = toys.sparse_step(count=30, joined=4)
    silent = dataclasses.replace(target, contributions=lambda x, y: torch.zeros(len(x), target.released.numel()))
    assert (gradient_similarity(silent).scores == 0).all()


def test_a_single_contribution_without_noise_has_a_cosine_of_one_and_no_other_has():
    target, member = toys.sparse_step(count=30, joined=1, noise=0.0)
    scores = gradient_similarity(target).scores
    assert float(scores[member]) == pytest.approx(1.0, abs=1e-5) and float(scores[~member].max()) < 0.95


def test_bad_settings_are_refused():
    target, _ = toys.sparse_step(count=30, joined=4)
    with pytest.raises(ValueError, match="measure must be cosine or inner, got 'dot'"):
        gradient_similarity(target, measure="dot")
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        gradient_similarity(target, batch_size=0)
