"""Verdict on the owner's claim from a transcript of the training, as part of the report of a model's audit."""

from dataclasses import dataclass
from typing import Any

from .validation import CheckedFields


@dataclass(frozen=True, kw_only=True)
class NoiseFound(CheckedFields):
    """Noise measured on a set of coordinates, over all steps.

    Attributes:
        where: the coordinates, in words.
        centred: whether the mean of earlier releases was subtracted.
        coordinates: count of values examined, over all steps.
        ratio: root mean square of the values over the stated standard deviation of the noise, signal included.
        low: lower confidence bound on the ratio of the noise alone; None if there may be signal.
        high: upper confidence bound, valid whatever the signal.
        p_value: probability of this little energy, or less, at the stated noise.
        z: of the energy, negative for too little.
    """

    where: str
    centred: bool
    coordinates: int
    ratio: float
    low: float | None
    high: float
    p_value: float
    z: float


@dataclass(frozen=True, kw_only=True)
class CanaryBound(CheckedFields):
    """Lower bound on epsilon by canaries in a transcript.

    Attributes:
        value: nats; the word "inf" for infinite, as of `ceiling`.
        delta: of the bound.
        level: its confidence.
        method: of the test.
        assumption: of the method.
        relation: neighboring relation.
        positives: trials with the record.
        negatives: trials without it.
        looks: number of looks (attempts) among which it was selected, for which its level is corrected.
        ceiling: largest value that as many trials can prove.
        kind: `credible` for a quantile of a posterior.
        detail: counts, thresholds and parameters.
    """

    value: float | str
    delta: float
    level: float
    method: str
    assumption: str
    relation: str
    positives: int
    negatives: int
    looks: int
    ceiling: float | str
    kind: str
    detail: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class TranscriptReport(CheckedFields):
    """Verdict on the claim by a transcript of the training.

    Attributes:
        word: `violation`, `no verdict` or `no violation found`.
        refuted: evidence that refutes the claim, a sentence each.
        problems: contradictions of the transcript with itself or the model, a sentence each.
        remarks: further limitations, a sentence each.
        skipped: tests not run, a sentence each.
        steps: updates released.
        epsilon: proved by the stated noise, nats; None if infinite or unknown.
        between_steps: z-score of the correlation of noise between steps; None if unknown.
        level: joint confidence of all tests.
        noise: results of all noise tests.
        canaries: the lower bound on epsilon by canaries; None without canaries.
        sentence: the verdict.
        sentences: the verdict for page and text, worded so that it does not contradict a refutation by other evidence.
    """

    word: str
    refuted: tuple[str, ...]
    problems: tuple[str, ...]
    remarks: tuple[str, ...]
    skipped: tuple[str, ...]
    steps: int
    epsilon: float | None
    between_steps: float | None
    level: float
    noise: tuple[NoiseFound, ...]
    canaries: CanaryBound | None
    sentence: str
    sentences: tuple[str, ...]
