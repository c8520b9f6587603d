"""(result, truth) -> metrics: what an attack found, against what it was about."""

from __future__ import annotations

from attacks.core import MembershipScores, Reconstruction, checked_scores
from leaderboard.records.record import Metric

from ..observe import GroundTruth
from .membership import score_membership
from .reconstruction import score_reconstruction


def score(
    result: MembershipScores | Reconstruction, truth: GroundTruth, *, delta: float | None = None
) -> dict[str, Metric]:
    """Every metric of one result.

    Args:
        result: what an attack returned.
        truth: about the same target.
        delta: of the claim that membership scores are held against, for `implied_epsilon`.

    Returns:
        Metrics by name; what cannot be measured has no value and says why.

    Raises:
        TypeError: when the result is none, or holds tensors of a class of its own.
        ValueError: when the truth is about something else, scores are of others than the candidates, or there are more
            guesses than examples.
    """
    if isinstance(result, MembershipScores):
        if truth.candidates is None:
            raise ValueError("this truth is about reconstruction, it has no members")
        scores = checked_scores(result, truth.candidates)
        return score_membership(scores, truth.membership(scores.ids), delta=delta)
    if truth.inputs is None or truth.labels is None:
        raise ValueError("this truth is about membership, it has no inputs")
    return score_reconstruction(
        result,
        truth.inputs,
        truth.labels,
        low=truth.low,
        high=truth.high,
        floor_image=truth.floor,
        labels_given=truth.labels_given,
    )
