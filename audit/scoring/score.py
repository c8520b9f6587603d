"""Scoring: (result, truth) -> metrics, by the type of the result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from leakbench.attacks.core import (
    InclusionScores,
    LabelEstimate,
    MembershipScores,
    Reconstruction,
    checked_labels,
    checked_reconstruction,
    checked_scores,
)
from leakbench.leaderboard.records.record import Metric

from .canaries import score_canaries
from .choice import chosen, compare_choice, place_of
from .images import summed_up
from .labels import LabelledBatch, public_shares, score_labels
from .membership import score_membership
from .reconstruction import score_reconstruction
from .truth import GroundTruth


def score(
    result: MembershipScores | Reconstruction | LabelEstimate, truth: GroundTruth, *, delta: float | None = None
) -> dict[str, Metric]:
    """Returns every metric of an attack's result.

    Args:
        result: the attack's result.
        truth: ground truth of the same target.
        delta: delta of the claim that membership scores are compared with, for `implied_epsilon`.

    Returns:
        Metrics by name; an unmeasurable metric has no value but a reason.

    Raises:
        TypeError: it is not a result, or holds tensors of a subclass, which would see the truth.
        ValueError: the truth is of another kind, scores are for non-candidates, or there are more guesses than
            examples.
    """
    for kind, scorer in SCORERS.items():
        if isinstance(result, kind):
            return scorer(result, truth, delta)
    raise TypeError(f"a result must be {' or '.join(kind.__name__ for kind in SCORERS)}, got {type(result).__name__}")


def _membership(result: MembershipScores, truth: GroundTruth, delta: float | None) -> dict[str, Metric]:
    if truth.candidates is None:
        raise ValueError("this truth is about reconstruction, it has no members")
    # Copied into plain tensors before they meet the truth: `__torch_function__` would hand it to a subclass.
    scores = checked_scores(result, truth.candidates)
    return score_membership(scores, truth.membership(scores.ids), delta=delta)


def _inclusion(result: InclusionScores, truth: GroundTruth, delta: float | None) -> dict[str, Metric]:
    if truth.candidates is None:
        raise ValueError("this truth is about reconstruction, it has no canaries")
    if delta is None:
        raise ValueError("canaries must be held against a claim, got no delta")
    scores = checked_scores(result, truth.candidates, InclusionScores)
    included = truth.membership(scores.ids)
    return score_canaries(scores, included, delta=delta, gaussian=truth.gaussian, apart=truth.apart)


def _reconstruction(result: Reconstruction, truth: GroundTruth, delta: float | None) -> dict[str, Metric]:
    if truth.inputs is None or truth.labels is None:
        raise ValueError("this truth is about membership, it has no inputs")
    if truth.prior is not None:
        own = checked_reconstruction(result, len(truth.inputs), truth.inputs)
        choice = chosen(own, truth.prior, place_of(truth.inputs[0], truth.prior))
        return summed_up([compare_choice(choice, own)])
    return score_reconstruction(
        result,
        truth.inputs,
        truth.labels,
        low=truth.low,
        high=truth.high,
        floor_image=truth.floor,
        public_images=truth.public,
        other_images=truth.others,
        labels_given=truth.labels_given,
    )


def _labels(result: LabelEstimate, truth: GroundTruth, delta: float | None) -> dict[str, Metric]:
    if truth.labels is None:
        raise ValueError("this truth is about membership, it has no labels")
    estimate = checked_labels(result, len(truth.labels), like=truth.labels)
    shares = public_shares(truth.labels, truth.public_labels, len(estimate.counts))
    return score_labels([LabelledBatch(estimate.labels, truth.labels, shares)])


SCORERS: dict[type, Callable[[Any, Any, float | None], dict[str, Metric]]] = {
    # Before its base class.
    InclusionScores: _inclusion,
    MembershipScores: _membership,
    Reconstruction: _reconstruction,
    LabelEstimate: _labels,
}
"""Type of result -> (result, truth, delta of the claim) -> metrics; a new kind of result is a new entry."""
