"""Accuracy and loss on hand-worked logits, with their intervals against scipy."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from leakbench.audit.scoring.utility import mean_metric, score_utility

HALF_RIGHT = torch.tensor([[2.0, 0.0], [0.0, 2.0], [2.0, 0.0], [2.0, 0.0]])
LABELS = torch.tensor([0, 0, 1, 0])


def test_accuracy_has_the_exact_interval_of_a_proportion():
    found = score_utility(HALF_RIGHT, LABELS)["accuracy"]
    theirs = stats.binomtest(2, 4).proportion_ci(0.95, method="exact")
    assert found.value == 0.5
    assert (found.low, found.high) == (pytest.approx(theirs.low), pytest.approx(theirs.high))


def test_loss_is_the_mean_cross_entropy_with_a_t_interval():
    found = score_utility(HALF_RIGHT, LABELS)["loss"]
    right, wrong = math.log1p(math.exp(-2)), math.log1p(math.exp(2))
    theirs = stats.t.interval(0.95, 3, (right + wrong) / 2, stats.sem([right, wrong, wrong, right]))
    assert found.value == pytest.approx((right + wrong) / 2)
    assert found.low == max(0.0, theirs[0])
    assert found.high == pytest.approx(theirs[1])


def test_the_loss_is_computed_in_float64():
    found = score_utility(torch.tensor([[60.0, 0.0], [60.0, 0.0]]), torch.tensor([0, 0]))
    assert found["loss"].value == pytest.approx(math.exp(-60))  # float32 says 0


def test_a_diverged_model_is_wrong_and_has_no_loss():
    found = score_utility(torch.tensor([[math.nan, 1.0], [1.0, 0.0]]), torch.tensor([0, 0]))
    assert found["accuracy"].value == 0.5
    assert found["loss"].value is None
    assert "1 of 2 examples is not finite" in str(found["loss"].reason)


def test_one_example_has_no_interval():
    found = score_utility(HALF_RIGHT[:1], LABELS[:1])["loss"]
    assert (found.low, found.reason) == (None, "one example")


def test_a_mean_stays_in_its_range():
    found = mean_metric(np.array([0.0, 1.0]), better="higher", single="one", least=0.0, most=1.0)
    assert (found.value, found.low, found.high) == (0.5, 0.0, 1.0)


def test_nothing_to_score_is_refused():
    with pytest.raises(ValueError, match="at least one, got 0 for 0"):
        score_utility(torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64))
