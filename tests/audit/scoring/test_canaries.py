"""The bound that coins of canaries prove, and its verdict: simulated Gaussian mechanisms of known epsilon."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from leakbench.attacks.core import InclusionScores
from leakbench.audit.evidence.claim_bounds import gaussian_epsilon
from leakbench.audit.scoring.canaries import NAME, compared_with_claim, score_canaries

DELTA = 1e-5


def audited(shift: float, seed: int, *, canaries: int = 1000, **how) -> Any:
    """The bound of a run in which an included canary's score is higher by `shift` deviations."""
    coins = np.random.default_rng(seed)
    included = coins.random(canaries) < 0.5
    scores = torch.from_numpy(coins.normal(size=canaries) + shift * included)
    found = InclusionScores(ids=torch.arange(canaries), scores=scores, exact=False)
    return score_canaries(found, torch.from_numpy(included), delta=DELTA, **{"gaussian": True, **how})[NAME]


def claim_of(shift: float, relation: str = "add_remove"):
    return SimpleNamespace(
        epsilon=gaussian_epsilon(shift, DELTA),
        delta=DELTA,
        relation=relation,
        epsilon_at=lambda delta: gaussian_epsilon(shift, delta),
    )


@pytest.mark.parametrize(
    "how",
    [{"gaussian": True}, {"gaussian": False}, pytest.param({"gaussian": True, "apart": True}, marks=pytest.mark.long)],
)
def test_the_right_noise_is_not_accused_and_proves_something(how):
    bounds, accused = [], 0
    for seed in range(12):
        metric, violated = compared_with_claim(audited(1.0, seed, **how), claim_of(1.0))
        bounds.append(metric.value)
        accused += violated
    # At 0.95 one in twenty may be above the truth; these methods are far from it.
    assert sum(one > claim_of(1.0).epsilon for one in bounds) <= 2 and accused == 0
    assert 0.8 < sum(bounds) / len(bounds) < claim_of(1.0).epsilon


def test_noise_of_half_the_scale_refutes_the_claim():
    for seed in range(4):
        metric, violated = compared_with_claim(audited(2.0, seed, apart=True), claim_of(1.0))
        assert violated and metric.detail["verdict"] == "violation"
        assert metric.value > claim_of(1.0).epsilon


def test_scores_that_know_no_coin_prove_nothing():
    values = [audited(0.0, seed).value for seed in range(40)]
    assert sum(value > 0 for value in values) <= 7  # 2 expected at 0.95; beyond 7 once in a thousand


def test_a_verdict_without_any_assumption_is_possible_at_a_small_delta():
    """At the claim's delta 2 n delta would be lost, which is more than a verdict may err."""
    metric, violated = compared_with_claim(audited(20.0, 0, gaussian=False), claim_of(0.1))
    delta = metric.detail["delta_at_verdict"]
    assert violated and isinstance(delta, float) and delta < 1e-9 < DELTA
    assert metric.detail["claimed"] == pytest.approx(gaussian_epsilon(0.1, delta))


def test_what_is_shown_beside_a_bound_is_there():
    metric = audited(3.0, 0)
    assert metric.n == metric.detail["canaries"] == 1000 and metric.detail["guessed"] == 400
    assert metric.value <= metric.detail["ceiling"] and metric.detail["relation"] == "add_remove"


def test_a_claim_of_another_relation_or_of_nothing_is_not_refuted():
    metric, violated = compared_with_claim(audited(20.0, 0, apart=True), claim_of(0.1, relation="zero_out"))
    assert not violated and metric.detail["verdict"] == "the claim is of zero_out"
    nothing = SimpleNamespace(epsilon=math.inf, delta=DELTA, relation="add_remove", epsilon_at=lambda delta: math.inf)
    metric, violated = compared_with_claim(audited(20.0, 0, apart=True), nothing)
    assert not violated and metric.detail["claimed"] is None
