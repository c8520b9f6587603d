"""Metrics of recovered labels: by hand, and again from the arrays of a record."""

import pandas as pd
import pytest
import torch

from leakbench import audit
from leakbench.attacks.core import LabelEstimate
from leakbench.audit.scoring.labels import LabelledBatch, label_columns, labels_again, public_shares, score_labels
from leakbench.audit.scoring.truth import GroundTruth

from ...parameters import subtests


def batch(found: list[int], labels: list[int], public: list[int] | None = None) -> LabelledBatch:
    truth = torch.tensor(labels)
    known = None if public is None else torch.tensor(public)
    return LabelledBatch(torch.tensor(found, dtype=torch.int64), truth, public_shares(truth, known, 5))


def test_labels_are_compared_as_multisets():
    scored = score_labels([batch([3, 1, 1, 4], [1, 3, 3, 1])])
    assert scored["label_overlap"].value == 0.75 and scored["label_overlap"].n == 1
    assert scored["label_exact"].value == 0.0
    assert score_labels([batch([1, 1, 3, 3], [1, 3, 3, 1])])["label_exact"].value == 1.0
    assert score_labels([batch([], [1, 3])])["label_overlap"].value == 0.0


def test_means_are_over_batches_with_an_interval_that_says_how_few_there_were():
    scored = score_labels([batch([1, 2], [1, 2]), batch([1, 2], [1, 1]), batch([1, 2], [1, 2])])
    assert scored["label_overlap"].value == pytest.approx(5 / 6) and scored["label_overlap"].n == 3
    assert scored["label_exact"].value == pytest.approx(2 / 3)
    one, many = (score_labels([batch([1], [1])] * count)["label_overlap"] for count in (1, 100))
    assert one.low is not None and many.low is not None and one.low == pytest.approx(0.025) and many.low > 0.96


def test_the_floor_is_what_shares_of_public_classes_overlap():
    # Public shares of 1/4 and 3/4: of [0, 0, 1, 1] counts of 1 and 3 share 1 + 2.
    assert score_labels([batch([0], [0, 0, 1, 1], [0, 1, 1, 1])])["label_overlap_floor"].value == 0.75
    assert score_labels([batch([0], [2], [0, 1])])["label_overlap_floor"].value == 0.0
    without = score_labels([batch([0], [2])])["label_overlap_floor"]
    assert without.value is None and without.reason == "there are no public examples to guess from"


@subtests("public", [[0, 1, 1, 2], None])
def test_the_columns_of_a_record_give_its_metrics_again(public):
    batches = [batch([2, 0], [0, 1, 2], public), batch([], [1, 1, 1], public), batch([1, 1, 0], [1, 0, 1], public)]
    assert labels_again(pd.DataFrame(label_columns(batches))) == score_labels(batches)


def test_what_is_no_batch_is_refused():
    for batches in ([], [batch([], [])]):
        with pytest.raises(ValueError, match="one or more"):
            score_labels(batches)
    with pytest.raises(ValueError, match="at most as many"):
        score_labels([batch([1, 2], [1])])


def estimate(counts: list[int]) -> LabelEstimate:
    whole = torch.tensor(counts)
    return LabelEstimate(counts=whole, lower=whole, upper=whole, observed=whole >= 0, posterior=(whole > 0).double())


def test_an_estimate_is_scored_against_the_truth_by_hand():
    truth = GroundTruth(labels=torch.tensor([0, 2, 2]), public_labels=torch.tensor([2, 2, 0]))
    scored = audit.score(estimate([1, 0, 2]), truth)
    assert scored["label_overlap"].value == scored["label_exact"].value == 1.0
    assert scored["label_overlap_floor"].value == pytest.approx(1.0)
    with pytest.raises(ValueError, match="at most the batch's 3 examples, got 4"):
        audit.score(estimate([2, 2]), truth)
    with pytest.raises(ValueError, match="it has no labels"):
        audit.score(estimate([1]), GroundTruth())


@subtests(
    ("change", "sentence"),
    [
        ({"counts": torch.tensor([1.0, 2.0])}, "counts must be torch.int64"),
        ({"lower": torch.tensor([2, 0])}, "between lower and upper"),
        ({"posterior": torch.tensor([2.0, 0.0]).double()}, "posterior must be probabilities"),
        ({"observed": torch.tensor([True])}, "observed must be torch.bool of shape"),
        ({"status": "failed"}, "status must be 'ok' or 'degraded'"),
    ],
)
def test_an_estimate_that_contradicts_itself_is_refused(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        LabelEstimate(**{**vars(estimate([1, 2])), **change})
