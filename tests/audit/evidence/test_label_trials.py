"""Label trials: bounds under randomised response of known epsilon, and what a wrong proxy may not prove."""

import math

import numpy as np
import pytest

from leakbench.audit.evidence.audit import audit_labels
from leakbench.audit.evidence.label_trials import label_scores, revealed_coins, shown_labels

from ...parameters import subtests

CLASSES, RECORDS = 50, 2000


def of_randomised_response(epsilon: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores and coins; labels are uniform, so that a uniform proxy is exact."""
    draws = np.random.default_rng(seed)
    labels = draws.integers(CLASSES, size=RECORDS)
    keep = math.exp(epsilon) / (math.exp(epsilon) + CLASSES - 1)
    turned = (labels + draws.integers(1, CLASSES, size=RECORDS)) % CLASSES
    released = np.where(draws.random(RECORDS) < keep, labels, turned)
    target = np.full((RECORDS, CLASSES), (1 - keep) / (CLASSES - 1))
    target[np.arange(RECORDS), released] = keep
    proxy = np.full((RECORDS, CLASSES), 1 / CLASSES)
    shown, coins = shown_labels(labels, proxy, seed=seed + 10_000)
    # Scores tie; which of equal ones are guessed is by lot.
    return label_scores(target, proxy, shown) + 1e-9 * draws.random(RECORDS), coins


@pytest.mark.long
@subtests("proxy_error", [0.0, 0.001])
def test_bound_exceeds_the_epsilon_of_randomised_response_as_rarely_as_it_says_and_proves_much_of_it(proxy_error):
    bounds = []
    for seed in range(100):
        scores, coins = of_randomised_response(2.0, seed)
        bounds.append(
            audit_labels(scores, coins, method="one_run", guesses=[(120, 0)], proxy_error=proxy_error, delta=0.0).value
        )
    assert np.mean(np.array(bounds) > 2.0) <= 0.1  # nominal: 5 of 100
    assert np.mean(bounds) > (1.2 if proxy_error == 0 else 0.6)


def test_wrong_proxy_proves_a_loss_of_a_constant_model_if_believed_and_none_if_its_error_is_told():
    draws = np.random.default_rng(0)
    truth, proxy = np.tile([0.8, 0.2], (RECORDS, 1)), np.full((RECORDS, 2), 0.5)
    labels = (draws.random(RECORDS) < 0.2).astype(int)
    shown, coins = shown_labels(labels, proxy, seed=1)
    scores = label_scores(truth, proxy, shown) + 1e-9 * draws.random(RECORDS)
    believed, told = (
        audit_labels(scores, coins, method="one_run", guesses=[(800, 0)], proxy_error=error, delta=0.0)
        for error in (0.0, 0.3)
    )
    assert believed.value > 0.1
    assert (told.value, told.ceiling) == (0.0, 0.0)
    assert told.detail["proxy_error"] == 0.3
    assert told.relation == "replace_one"


def test_what_a_proxy_gives_away_is_the_quantile_of_a_binomial():
    assert revealed_coins(1000, 0.0, 0.975) == 0
    # 1 - 0.99^2 = 0.0199; mean 19.9, standard deviation 4.416: the 97.5 % quantile is 29.
    assert revealed_coins(1000, 0.01, 0.975) == 29
    assert revealed_coins(10, 1.0, 0.975) == 10


def test_ceiling_is_what_as_many_guesses_could_prove_after_what_is_given_away():
    scores = np.arange(100.0)
    found = audit_labels(scores, scores >= 50, method="one_run", guesses=[(40, 40)], proxy_error=0.01, delta=0.0)
    assert found.value == found.ceiling
    exact = audit_labels(scores, scores >= 50, method="one_run", guesses=[(40, 40)], proxy_error=0.0, delta=0.0)
    assert exact.ceiling > found.ceiling
    assert exact.value == exact.ceiling


def test_shown_label_is_the_training_label_where_the_coin_says_so_and_the_proxys_elsewhere():
    proxy = np.tile([0.0, 0.25, 0.75, 0.0], (4000, 1))
    shown, coins = shown_labels(np.zeros(4000, dtype=int), proxy, seed=3)
    assert (shown[coins] == 0).all()
    assert set(shown[~coins].tolist()) == {1, 2}
    assert abs((shown[~coins] == 2).mean() - 0.75) < 0.04
    assert abs(coins.mean() - 0.5) < 0.04


@subtests(
    ("change", "words"),
    [
        ({"proxy_error": 1.5}, "proxy_error must be a distance in total variation"),
        ({"proxy_error": math.nan}, "proxy_error must be a distance in total variation"),
        ({"method": "one_run_f_dp"}, "method must be one_run"),
        ({"guesses": []}, "must be declared"),
    ],
)
def test_audit_refuses(change, words):
    asked = {"method": "one_run", "guesses": [(1, 1)], "proxy_error": 0.0, "delta": 0.0} | change
    with pytest.raises(ValueError, match=words):
        audit_labels(np.arange(4.0), np.array([True, False, True, False]), **asked)


@subtests(
    ("labels", "proxy", "words"),
    [
        ([0, 2], [[0.5, 0.5]] * 2, r"integers in \[0, 1\]"),
        ([0, 1], [[0.5, 0.6]] * 2, "add up to 1"),
        ([0, 1], [[math.nan, 1.0]] * 2, "add up to 1"),
        ([0], [[0.5, 0.5]] * 2, "one row a label"),
    ],
)
def test_labels_and_probabilities_that_are_none_are_refused(labels, proxy, words):
    with pytest.raises(ValueError, match=words):
        shown_labels(np.array(labels), np.array(proxy), seed=0)
