"""Lower bounds on epsilon from the members and non-members of one run, which were drawn at random."""

import math

import numpy as np
import pytest

from audit.evidence.audit import audit_random_split
from audit.scoring.allowed import gaussian_epsilon
from audit.scoring.random_split import epsilon_lower, not_a_random_split

DELTA = 1e-5


def drawn(seed: int, *, shift: float, n: int = 400) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids, scores and truth of candidates whose members score higher by a shift, in a random order."""
    coins = np.random.default_rng(seed)
    members = coins.permutation(np.arange(n) < n // 2)
    return coins.permutation(n), coins.normal(size=n) + shift * members, members


def test_of_scores_that_say_nothing_it_is_zero_as_often_as_it_says():
    values = np.array([epsilon_lower(*drawn(seed, shift=0.0), DELTA).value for seed in range(400)], dtype=float)
    # 5 % at most; a fresh seed gives more than 9 % of 400 less often than once in ten thousand.
    assert (values > 0).mean() <= 0.09


@pytest.mark.parametrize("shift", [0.5, 1.0])
def test_of_a_gaussian_mechanism_it_is_below_the_truth_and_above_zero(shift):
    # Two scores of a pair differ by twice the shift between the two worlds, over sqrt 2 deviations.
    truth = gaussian_epsilon(2 * shift / math.sqrt(2), DELTA)
    found = [epsilon_lower(*drawn(seed, shift=shift, n=2000), DELTA) for seed in range(60)]
    values = np.array([one.value for one in found], dtype=float)
    assert (values > truth).mean() <= 0.05 and values.mean() > 0.2 * shift
    for one in found:
        assert one.value is not None and one.value <= float(one.detail["ceiling"] or 0)
        assert float(one.detail["value_at_verdict"] or 0) <= one.value


def test_it_is_the_audits_own_number_and_the_order_of_rows_is_nothing():
    ids, scores, members = drawn(3, shift=2.0)
    found = epsilon_lower(ids, scores, members, DELTA)
    order = np.argsort(ids)
    alone = audit_random_split(
        scores[order][members[order]],
        scores[order][~members[order]],
        method="one_run",
        answered=[20],
        delta=DELTA,
    )
    assert found.value == alone.value and found.detail["pairs"] == 200
    shuffled = np.random.default_rng(4).permutation(len(ids))
    assert epsilon_lower(ids[shuffled], scores[shuffled], members[shuffled], DELTA).value == found.value


def test_few_pairs_and_tied_scores_prove_nothing():
    few = epsilon_lower(*drawn(0, shift=9.0, n=18), DELTA)
    assert few.value is None and "at least 10 pairs, got 9" in (few.reason or "")
    ids, _, members = drawn(0, shift=0.0)
    assert epsilon_lower(ids, np.zeros(400), members, DELTA).value == 0


@pytest.mark.parametrize(
    ("knows", "flags", "words"),
    [
        (["OTHERS"], [], "who else took part"),
        ([], ["participation_known"], "one step"),
        ([], ["non_members_are_test"], "official test set"),
        ([], ["distribution_shift"], "told apart without the model"),
        (["POPULATION", "SHADOWS"], ["diverged"], ""),
    ],
)
def test_what_is_no_random_split_is_named(knows, flags, words):
    why = not_a_random_split(knows, flags)
    assert (words in why) if words else why == ""
