"""Bounds on picking the truth out of candidates: golden values, Monte Carlo against closed forms, the best attacker."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.special import ndtr

from leakbench.attacks.core import Reconstruction
from leakbench.audit.scoring.images import summed_up
from leakbench.audit.scoring.reconstruction import compare
from leakbench.audit.scoring.robustness import bound_metric, gaussian_bound, reconstruction_bound, refuted
from leakbench.defenses.core import Ledger, full
from leakbench.leaderboard.records.record import Metric

from ...parameters import subtests


@subtests(("steps", "sigma", "golden"), [(1, 1, 0.389144), (1, 2, 0.217239), (100, 4, 0.888473)])
def test_the_closed_form_has_its_golden_values(steps, sigma, golden):
    bound = reconstruction_bound(0.1, noise_multiplier=sigma, steps=steps)
    assert bound.value == pytest.approx(golden, abs=5e-7)
    assert (bound.upper, bound.samples) == (bound.value, 0)


@pytest.mark.long
def test_the_sampled_bound_has_its_golden_value_and_an_upper_limit():
    bound = reconstruction_bound(0.1, noise_multiplier=1.0, steps=100, sample_rate=0.01, samples=50_000)
    assert bound.value == pytest.approx(0.127, abs=0.003)
    assert bound.value < bound.upper < bound.value + 0.01


@pytest.mark.slow
def test_the_sampled_bound_at_full_count():
    bound = reconstruction_bound(0.1, noise_multiplier=1.0, steps=100, sample_rate=0.01)
    assert bound.value == pytest.approx(0.127, abs=0.001)


@pytest.mark.long
def test_the_upper_limit_is_above_the_truth_as_often_as_stated():
    """At a rate near 1 the bound is that of no sampling, which is known; so is how often a limit may be below it."""
    exact = gaussian_bound(0.1, 0.5)
    found = [
        reconstruction_bound(0.1, noise_multiplier=2.0, sample_rate=1 - 1e-12, samples=4000, seed=seed)
        for seed in range(25)
    ]
    below = np.mean([bound.upper < exact for bound in found])
    assert below <= 0.025 + 3 * math.sqrt(0.025 / 25) and np.mean([bound.value < exact for bound in found]) > 0.2
    assert np.mean([bound.value for bound in found]) == pytest.approx(exact, rel=0.02)


def test_nobody_beats_the_bound_and_orthogonal_candidates_come_near_it():
    """The most likely of n orthogonal candidates on one Gaussian, as an informed attacker takes it."""
    draw, n, sigma, runs = np.random.default_rng(0), 10, 1.0, 20_000
    seen = draw.normal(scale=sigma, size=(runs, n))
    seen[:, 0] += 1.0
    success = np.mean(seen.argmax(axis=1) == 0)
    bound = reconstruction_bound(1 / n, noise_multiplier=sigma).value
    assert 0.8 * bound < success < bound


def a_share(value, n):
    return Metric(value=value, n=n, better="lower")


def test_a_success_beyond_the_bound_refutes_the_claim_and_luck_does_not():
    bound = a_share(0.1, 10)
    assert refuted(a_share(0.9, 10), bound)
    assert not refuted(a_share(0.4, 10), bound)  # 1.3 %: one in many cells has that
    assert not refuted(a_share(1.0, 1), bound) and not refuted(
        a_share(0.9, 10), Metric(value=None, better="lower", reason="x")
    )
    # Under the bound itself it is as rare as stated.
    counts = np.arange(201)
    chance = sum(stats.binom.pmf(k, 200, 0.1) for k in counts if refuted(a_share(k / 200, 200), bound))
    assert 1e-6 < chance < 1e-4


def test_nothing_is_bounded_where_nothing_is_proved():
    nothing = bound_metric(Ledger(full()), 0)
    assert nothing.value is None and "no other images" in str(nothing.reason)
    # No release at all leaves the chance before it.
    assert bound_metric(Ledger(full()), 9).value == pytest.approx(0.1)


def test_a_batch_gives_each_guess_as_many_chances():
    """Who knows nothing of a batch of 8 identifies one of 28 images in 8 of 29 updates, and refutes no claim by it."""
    draw, updates, others = torch.Generator().manual_seed(0), 150, 20
    found = []
    for _ in range(updates):
        images = torch.rand(8 + others + 1, 12, generator=draw)
        guess = Reconstruction(inputs=images[-1:], labels=torch.zeros(1, dtype=torch.int64), objective=0.0)
        truth, labels = images[:8], torch.zeros(8, dtype=torch.int64)
        middle = torch.full((12,), 0.5)
        about = {"low": 0.0, "high": 1.0, "floor_image": middle, "other_images": images[8:-1]}
        found.append(compare(guess, truth, labels, **about))
    success = summed_up([{"iip": one["iip"]} for one in found])["iip"]
    ledger = Ledger(full())
    assert success.value is not None and success.value > 0.2
    assert refuted(success, bound_metric(ledger, others))
    bound = bound_metric(ledger, others, batch=8)
    assert bound.value == pytest.approx(8 / 21) and not refuted(success, bound)
    assert bound_metric(ledger, 3, batch=8).value == 1.0


@subtests(
    ("change", "sentence"),
    [
        ({"kappa": 1.0}, r"kappa must be in \(0, 1\), got 1.0"),
        ({"noise_multiplier": 0.0}, "noise_multiplier must be positive and finite, got 0.0"),
        ({"noise_multiplier": math.nan}, "noise_multiplier must be positive and finite, got nan"),
        ({"sample_rate": 0.0}, r"sample_rate must be in \(0, 1\], got 0.0"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"samples": 10}, "samples must be at least 100, got 10"),
        (
            {"noise_multiplier": 0.05, "sample_rate": 0.5, "samples": 1000},
            "samples must be enough for a mean likelihood",
        ),
    ],
)
def test_what_is_out_of_range_is_refused(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        reconstruction_bound(**{"kappa": 0.1, "noise_multiplier": 1.0, **change})


def test_more_noise_and_more_candidates_allow_less():
    assert gaussian_bound(0.01, 1.0) < gaussian_bound(0.1, 1.0) < gaussian_bound(0.1, 2.0)
    assert gaussian_bound(0.5, 0.0) == pytest.approx(0.5) and gaussian_bound(0.5, 1.0) == pytest.approx(ndtr(1.0))
