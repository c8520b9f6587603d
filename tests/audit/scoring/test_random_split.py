"""Lower bounds on epsilon from the members and non-members of one run, which were drawn at random."""

import math

import numpy as np
import pytest

from leakbench.audit.evidence.audit import audit_random_split
from leakbench.audit.evidence.claim_bounds import gaussian_epsilon
from leakbench.audit.evidence.pairs import seed_of_split
from leakbench.audit.scoring.random_split import epsilon_lower, not_a_random_split

from ...parameters import subtests

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


def test_scores_that_tell_a_records_place_and_nothing_of_who_is_a_member_prove_nothing():
    """Of a pool sorted by class, under one matching for all splits, the same answers are right in every split."""
    n, classes = 2000, 40
    ids = np.arange(n)
    place = ids * classes // n
    # Which classes meet which under the matching of the seed 0, by ranks of members and of non-members.
    coins = np.random.default_rng(0)
    first, second = (coins.permutation(n // 2) * classes // (n // 2) for _ in range(2))
    meets = np.zeros((classes, classes))
    np.add.at(meets, (first, second), 1)
    # A tenth of the pairs is between eight classes that are scored high and eight scored low: chosen by descent.
    score = np.repeat([1.0, -1.0, 0.0], [8, 8, classes - 16])
    for _ in range(3):
        for i in range(classes):
            tried = np.repeat(score[None], classes, 0)  # i exchanged with each class
            tried[:, i], tried[np.arange(classes), np.arange(classes)] = score, score[i]
            score = tried[np.argmax([(s == 1) @ (meets - meets.T) @ (s == -1) for s in tried])]
    fixed, own = [], []
    for seed in range(100):
        members = np.random.default_rng(seed).permutation(ids < n // 2)
        scores = score[place]
        settings = {"method": "one_run", "answered": [n // 20], "delta": DELTA}
        fixed.append(audit_random_split(scores[members], scores[~members], **settings).value)
        own.append(epsilon_lower(ids, scores, members, DELTA).value)
    assert (np.array(fixed) > 0).mean() > 0.6  # of one matching for all: the descent has found something
    assert (np.array(own) > 0).mean() <= 0.12


def test_the_matching_is_of_the_split_and_not_of_the_order_of_its_rows():
    ids, _, members = drawn(5, shift=0.0)
    order = np.random.default_rng(0).permutation(len(ids))
    assert seed_of_split(ids, members) == seed_of_split(ids[order], members[order])
    # Members first, as files have them: the flags are then alike, whoever they are.
    first = np.arange(400) < 200
    assert seed_of_split(np.arange(400), first) != seed_of_split(np.arange(400)[::-1], first)
    assert seed_of_split(ids, members) != seed_of_split(ids, members, 1)


def test_scores_at_the_ends_of_float64_are_compared_without_overflow():
    ids, scores, members = drawn(2, shift=3.0)
    huge = np.where(scores > 1.5, 1.7e308, -1.7e308)
    assert epsilon_lower(ids, huge, members, DELTA).value == epsilon_lower(ids, np.sign(huge), members, DELTA).value
    scaled = scores * (1.7e308 / np.abs(scores).max())
    assert epsilon_lower(ids, scaled, members, DELTA).value == epsilon_lower(ids, scores, members, DELTA).value
    tiny = np.where(scores > 1.5, 5e-324, 0.0)  # halved, they would tie
    assert epsilon_lower(ids, tiny, members, DELTA).value == epsilon_lower(ids, np.sign(tiny), members, DELTA).value


@subtests("shift", [0.5, 1.0])
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
        seed=seed_of_split(ids, members),
    )
    assert found.value == alone.value and found.detail["pairs"] == 200
    shuffled = np.random.default_rng(4).permutation(len(ids))
    assert epsilon_lower(ids[shuffled], scores[shuffled], members[shuffled], DELTA).value == found.value


def test_few_pairs_and_tied_scores_prove_nothing():
    few = epsilon_lower(*drawn(0, shift=9.0, n=18), DELTA)
    assert few.value is None and "at least 10 pairs, got 9" in (few.reason or "")
    ids, _, members = drawn(0, shift=0.0)
    assert epsilon_lower(ids, np.zeros(400), members, DELTA).value == 0


@subtests(
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


@pytest.mark.long
@subtests(("epsilon", "least"), [(0.0, 0.0), (1.0, 0.7), (2.0, 1.7)])
def test_answers_of_yes_and_no_prove_what_a_random_response_leaks_and_no_more(epsilon, least):
    """Each record says whether it is a member, and lies with chance 1 / (1 + e^epsilon): replacing one turns two."""
    values = []
    for seed in range(100 if epsilon == 0 else 25):
        ids, _, members = drawn(seed, shift=0.0, n=2000)
        lies = np.random.default_rng([seed, 1]).random(2000) > 1 / (1 + math.exp(-epsilon))
        values.append(epsilon_lower(ids, (members ^ lies).astype(float), members, 1e-9).value or 0.0)
    values = np.array(values)
    assert (values > 2 * epsilon).mean() <= 0.1 and values.mean() >= least
