"""Audits by name, guesses at coins, and the verdict on a claim."""

import math
from typing import Any

import numpy as np
import pytest

from leakbench.audit.evidence.audit import METHODS, audit_canaries, audit_labels, audit_random_split, audit_runs
from leakbench.audit.evidence.claim_bounds import gaussian_delta, gaussian_epsilon
from leakbench.audit.evidence.estimate import judge, of_replacement
from leakbench.audit.evidence.one_run import Guesses, one_run
from leakbench.audit.evidence.pairs import canary_guesses, pair_guesses
from leakbench.audit.evidence.thresholds import DeclaredThresholds, FixedThreshold

from ...parameters import subtests

COINS = np.random.default_rng(0)
IN, OUT = COINS.normal(2, 1, 1000), COINS.normal(0, 1, 1000)


def test_guesses_are_the_highest_and_the_lowest_scores():
    scores = np.array([5.0, 4.0, 3.0, 2.0, 1.0, 0.0])
    included = np.array([True, True, False, True, False, False])
    assert canary_guesses(scores, included, highest=3, lowest=1) == Guesses(6, 4, 3)
    assert canary_guesses(scores, included, highest=6, lowest=0) == Guesses(6, 6, 3)
    assert canary_guesses(scores, included, highest=0, lowest=3) == Guesses(6, 3, 2)


def test_of_scores_that_tie_some_are_guessed_by_lot_and_never_by_their_place():
    scores = np.array([1.0] * 5 + [0.0] * 5)
    included = np.arange(10) < 5
    assert canary_guesses(scores, included, highest=3, lowest=0) == Guesses(10, 3, 3)
    assert canary_guesses(scores, included, highest=5, lowest=5) == Guesses(10, 10, 10)
    # Of equal scores guesses are coins, wherever in the file those stand that were in: 200 lots of 20 of 100.
    first = np.arange(100) < 50
    right = [canary_guesses(np.zeros(100), first, highest=10, lowest=10, seed=seed).correct for seed in range(200)]
    assert abs(np.mean(right) - 10) < 0.7 and np.std(right) > 1.5  # a standard error of 0.15
    # Both ends have nobody in common.
    assert canary_guesses(np.zeros(10), included, highest=5, lowest=5).correct in range(0, 11, 2)


def test_scores_of_zeros_and_ones_prove_what_scores_with_other_digits_prove():
    member = np.random.default_rng(0).random(1000) < 0.5
    plain = audit_canaries(member.astype(float), member, method="one_run", guesses=[(50, 50)], delta=1e-5)
    jitter = member + 1e-9 * np.random.default_rng(1).random(1000)
    assert plain.value == audit_canaries(jitter, member, method="one_run", guesses=[(50, 50)], delta=1e-5).value > 3.4
    assert plain.detail["guessed"] == 100 and plain.detail["correct"] == 100


@subtests("share", [0.9, 0.75, 0.25])
def test_coins_that_are_plainly_not_fair_are_refused(share):
    member, scores = np.arange(1000) < 1000 * share, np.random.default_rng(0).normal(size=1000)
    more: dict[str, Any]
    for audit, more in ((audit_canaries, {}), (audit_labels, {"proxy_error": 0.0})):
        with pytest.raises(ValueError, match=f"coins must be fair, and {1000 * share:.0f} of 1000 are 1"):
            audit(scores, member, method="one_run", guesses=[(100, 0)], delta=1e-5, **more)
    fair = np.random.default_rng(1).random(1000) < 0.5
    assert audit_canaries(scores, fair, method="one_run", guesses=[(100, 0)], delta=1e-5).detail["p_of_fair_coins"] > 0


def test_pairs_answer_the_largest_gaps_and_none_of_equal_scores():
    found = pair_guesses(np.full(4, 1.0), np.zeros(6), answered=4, seed=0)
    assert found == Guesses(4, 4, 4)
    assert pair_guesses(np.zeros(4), np.zeros(4), answered=4, seed=0) == Guesses(4, 0, 0)
    # Strata: pairs across them would tell a class and not a member.
    members, others = np.array([10.0, 0.0]), np.array([0.0, 10.0])
    strata = np.array([0, 1])
    apart = pair_guesses(members, others, answered=2, seed=0, member_strata=strata, non_member_strata=strata[::-1])
    assert apart == Guesses(2, 0, 0)


def test_pairs_of_a_random_split_without_leakage_are_coins():
    right = [
        pair_guesses(COINS.normal(size=100), COINS.normal(size=120), answered=20, seed=s).correct for s in range(200)
    ]
    # 4,000 fair coins: mean 10, standard error 0.16.
    assert abs(np.mean(right) - 10) < 0.8


def test_a_random_split_proves_what_it_is_said_to_and_never_more_than_the_truth():
    """Ideal Gaussian scores of shift 1: replacement has shift sqrt 2, an epsilon of 6.57 at 1e-5."""
    truth = gaussian_epsilon(math.sqrt(2), 1e-5)
    assert truth == pytest.approx(6.57, abs=5e-3)
    coins = np.random.default_rng(4)
    values = {"one_run": [], "one_run_f_dp": []}
    for seed in range(12):
        x, y = coins.normal(1, 1, 1000), coins.normal(0, 1, 1000)
        for method, found in values.items():
            one = audit_random_split(x, y, method=method, answered=[100], delta=1e-5, seed=seed)
            assert one.relation == "replace_one" and one.value <= truth
            found.append(one.value)
    assert np.mean(values["one_run"]) == pytest.approx(2.51, abs=0.35)
    assert np.mean(values["one_run_f_dp"]) == pytest.approx(3.90, abs=0.55)


@pytest.mark.long
@subtests("method", [name for name, row in METHODS.items() if row.of == "errors"])
def test_runs_give_a_bound_with_all_that_is_said_beside_it(method):
    found = audit_runs(IN, OUT, method=method, choice=DeclaredThresholds((0.5, 1.0, 1.5)), delta=1e-5)
    assert 0 < found.value <= found.ceiling and found.looks == 3
    assert (found.positives, found.negatives, found.level) == (1000, 1000, 0.95)
    assert "independent" in found.assumption and found.detail["choice"] == "declared"
    assert (found.kind == "credible") == (method == "bayesian")
    assert found.to_dict()["value"] == found.value


@pytest.mark.long
@subtests("method", [name for name, row in METHODS.items() if row.of == "guesses"])
def test_canaries_give_a_bound_and_several_numbers_of_guesses_share_the_level(method):
    scores = np.concatenate([IN, OUT])
    included = np.arange(2000) < 1000
    one = audit_canaries(scores, included, method=method, guesses=[(100, 100)], delta=1e-5)
    two = audit_canaries(scores, included, method=method, guesses=[(100, 100), (1, 0)], delta=1e-5)
    assert 0 < two.value < one.value <= one.ceiling and two.looks == 2
    assert one.detail["asked"] == 200 and one.detail["guessed"] == 200


def test_a_claim_below_the_bound_is_refuted_and_no_other_is_called_right():
    found = audit_runs(IN, OUT, method="clopper_pearson", choice=FixedThreshold(1.0), delta=1e-5)
    assert judge(found, epsilon=found.value - 1e-9, delta=1e-5, relation="add_remove") == "violation"
    assert judge(found, epsilon=found.value, delta=1e-5, relation="add_remove") == "no violation found"


@subtests(
    ("changes", "sentence"),
    [
        ({"delta": 1e-6}, "must be at the delta of the claim, 1e-06, got 1e-05"),
        ({"relation": "replace_one"}, "must be of the claim's relation, replace_one, got add_remove"),
        ({"epsilon": -1.0}, "epsilon of the claim must be at least 0"),
        ({"epsilon": math.nan}, "epsilon of the claim must be at least 0"),
    ],
)
def test_a_bound_about_something_else_judges_no_claim(changes, sentence):
    found = audit_runs(IN, OUT, method="clopper_pearson", choice=FixedThreshold(1.0), delta=1e-5)
    with pytest.raises(ValueError, match=sentence):
        judge(found, **({"epsilon": 1.0, "delta": 1e-5, "relation": "add_remove"} | changes))


def test_a_credible_bound_judges_no_claim():
    found = audit_runs(IN, OUT, method="bayesian", choice=FixedThreshold(1.0), delta=1e-5)
    with pytest.raises(ValueError, match="must be judged by a confidence bound, got a credible one"):
        judge(found, epsilon=0.1, delta=1e-5, relation="add_remove")


def test_what_a_claim_implies_of_replacement_holds_for_a_gaussian():
    for shift in (0.3, 1.0, 2.0):
        epsilon, delta = of_replacement(gaussian_epsilon(shift, 1e-5), 1e-5)
        assert gaussian_delta(epsilon, 2 * shift) <= delta
    assert of_replacement(1.0, 0.0) == (2.0, 0.0)


@subtests(
    ("call", "sentence"),
    [
        (
            lambda: audit_runs(IN, OUT, method="one_run", choice=FixedThreshold(1), delta=0.0),
            "method must be one of clopper",
        ),
        (
            lambda: audit_runs(IN, OUT, method="pld", choice=FixedThreshold(1), delta=0.1),
            "must be told sample_rate and steps",
        ),
        (
            lambda: audit_runs(IN, OUT, method="gaussian", choice=FixedThreshold(1), delta=0.1, steps=3),
            "sample_rate and steps are of method 'pld'",
        ),
        (
            lambda: audit_canaries(IN, IN > 0, method="one_run", guesses=[], delta=0.0),
            "numbers of guesses must be declared",
        ),
        (
            lambda: audit_canaries(IN, IN, method="one_run", guesses=[(1, 1)], delta=0.0),
            "included must be one coin a score",
        ),
        (
            lambda: audit_canaries(IN, IN > 0, method="one_run", guesses=[(-1, 3)], delta=0.0),
            "numbers of guesses must be at least 0",
        ),
        (
            lambda: audit_canaries(IN, IN > 0, method="one_run", guesses=[(900, 900)], delta=0.0),
            r"highest and lowest must be at least 0 and together in \[1, 1000\]",
        ),
        (
            lambda: audit_random_split(IN, OUT[:5], method="one_run", answered=[6], delta=0.0),
            r"answered must be in \[1, 5\], the number of pairs, got 6",
        ),
        (lambda: one_run(Guesses(10, 5, 5), 1.5), "delta must be in"),
    ],
)
def test_bad_arguments_are_refused(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()
