"""Agreement of numbers computed again: false alarms and power by simulation, and the rules for one seed."""

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from leakbench.leaderboard.records.fields import Metric, RecordedClaim
from leakbench.leaderboard.submissions.agreement import LEVEL, fresh_seeds_agree, same_claim, same_seed
from tests.parameters import subtests

CLAIM = RecordedClaim(epsilon=3.0, delta=1e-5, relation="add_remove", sampling="poisson", accountant="PLD")


def metric(value, half=None, n=100):
    if half is None or value is None:
        return Metric(value=value, n=n, better="lower", reason="no interval")
    return Metric(value=value, low=value - half, high=value + half, n=n, better="lower")


def differing(draw, *, reported, fresh, looks, verifications, shift=0.0, half=None):
    """Fraction of simulated verifications in which any of `looks` comparisons differs."""
    alarms = 0
    for _ in range(verifications):
        values = [(draw(reported), draw(fresh) + shift) for _ in range(looks)]
        verdicts = [
            fresh_seeds_agree([metric(v, half) for v in a], [metric(v, half) for v in b], looks=looks).verdict
            for a, b in values
        ]
        alarms += "differs" in verdicts
    return alarms / verifications


DRAWS = {
    "normal": lambda rng: lambda n: rng.normal(0.8, 0.01, n),
    "accuracy of 700 test examples": lambda rng: lambda n: rng.binomial(700, 0.9, n) / 700,
    "near its upper end": lambda rng: lambda n: rng.beta(50, 1, n),
    "skewed": lambda rng: lambda n: rng.lognormal(0, 0.5, n),
    "heavy tails": lambda rng: lambda n: rng.standard_t(3, n),
}


@pytest.mark.long
@subtests("name, reported, fresh", [*((name, 3, 2) for name in DRAWS), ("normal", 5, 2), ("normal", 3, 5)])
def test_true_submissions_differ_in_at_most_the_stated_share(name, reported, fresh):
    """A rate of 5 % gives more than the limit in one of a million simulations of 300 verifications of 5 cells."""
    rate = differing(DRAWS[name](np.random.default_rng(0)), reported=reported, fresh=fresh, looks=5, verifications=300)
    assert rate <= stats.binom(300, LEVEL).ppf(1 - 1e-6) / 300


def test_the_share_is_not_far_below_for_normal_runs_so_the_level_is_used():
    """A rule that never differs would pass the test above."""
    draw = DRAWS["normal"](np.random.default_rng(1))
    assert differing(draw, reported=3, fresh=2, looks=5, verifications=600) >= stats.binom(600, LEVEL).ppf(1e-6) / 600


def test_runs_that_are_shifted_by_twenty_spreads_differ():
    draw = DRAWS["normal"](np.random.default_rng(2))
    assert differing(draw, reported=3, fresh=2, looks=1, verifications=200, shift=0.2) > 0.95


def test_equal_runs_are_no_proof_of_precision():
    """Three runs that scored equal by chance, with an interval of their own, do not refute a fourth."""
    equal = [metric(0.5, 0.03)] * 3
    assert fresh_seeds_agree(equal, [metric(0.51, 0.03)] * 2, looks=5).verdict == "agrees"
    assert fresh_seeds_agree([metric(0.5)] * 3, [metric(0.51)] * 2, looks=5).verdict == "differs"


def test_too_few_seeds_are_not_judged():
    assert fresh_seeds_agree([metric(0.5)], [metric(0.9)] * 2, looks=1).verdict == "not judged"
    assert fresh_seeds_agree([metric(None)] * 3, [metric(0.9)] * 2, looks=1).verdict == "not judged"


@subtests(
    "reported, again, alike, verdict",
    [
        (metric(0.7, 0.02), metric(0.7, 0.02), True, "identical"),
        (metric(0.7, 0.02), metric(0.705, 0.02), False, "agrees"),
        (metric(0.7, 0.02), metric(0.75, 0.02), False, "differs"),
        (metric(0.7, 0.02), metric(0.75, 0.02), True, "differs"),
        (metric(0.7, 0.5), metric(0.75, 0.02), False, "differs"),  # a wide interval of the record alone proves nothing
        (metric(0.7), metric(0.7 + 1e-9), False, "agrees"),
        (metric(0.7), metric(0.8), False, "not judged"),
        (metric(0.7, 0.02), metric(0.7, 0.02, n=99), False, "differs"),
        (metric(None), metric(None), True, "identical"),
        (metric(None), metric(0.7), True, "differs"),
    ],
)
def test_numbers_of_one_seed(reported, again, alike, verdict):
    assert same_seed(reported, again, alike=alike).verdict == verdict


def test_a_number_that_is_not_identical_though_all_else_is_says_so():
    assert "another processor" in same_seed(metric(0.7, 0.02), metric(0.705, 0.02), alike=True).reason
    assert "another processor" not in same_seed(metric(0.7, 0.02), metric(0.705, 0.02), alike=False).reason


def test_an_optional_package_that_is_missing_is_no_difference():
    lacking = replace(metric(None), reason="torchmetrics, which is not installed")
    assert same_seed(metric(0.7), lacking, alike=False, optional=True).verdict == "not judged"
    # A submitter could give that reason for any number.
    assert same_seed(lacking, metric(0.7), alike=False).verdict == "differs"


@subtests(
    "changes, alike, verdict",
    [
        ({}, True, "identical"),
        ({"epsilon": 3.0 * (1 + 1e-4)}, False, "agrees"),
        ({"epsilon": 3.0 * (1 + 1e-4)}, True, "differs"),
        ({"epsilon": 2.9}, False, "differs"),
        ({"epsilon": None, "reason": "no noise"}, False, "differs"),
        ({"delta": 1e-6}, False, "differs"),
        ({"relation": "replace_one"}, False, "differs"),
    ],
)
def test_claims(changes, alike, verdict):
    assert same_claim(replace(CLAIM, **changes), CLAIM, alike=alike).verdict == verdict


def test_a_claim_that_only_one_of_both_has_differs():
    assert same_claim(None, CLAIM, alike=False).verdict == "differs"
    assert same_claim(None, None, alike=False).verdict == "identical"
