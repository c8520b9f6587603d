"""Comparison of the noise in a run's releases with the claimed noise, by an auditor who has data and sampler key."""

from __future__ import annotations

import math
from collections.abc import Iterable

from jaxtyping import Float64
from torch import Tensor

from leakbench.defenses.core import Step

from ..targets.observe import RunView
from ..targets.observed_step import Observed


def noise_found(view: RunView, steps: Iterable[Step]) -> tuple[float, float, float]:
    """Compares the noise in a run's releases with the noise that its plans claim.

    Args:
        view: of a run whose releases all carry noise.
        steps: the steps, or one-off releases, to test jointly.

    Returns:
        Measured over claimed standard deviation (NaN if nothing was released), its z-score, negative for too little
        noise, and the largest z-score for dependence in the noise: noise of the right size protects no record if it can
        be predicted.
    """
    return noise_statistics(_whitened(view, step) for step in steps)


def _whitened(view: RunView, step: Step) -> tuple[Tensor, bool]:
    observed = Observed(step, view.run.model, view.run.transcript.layout, view.public_knowledge.loss)
    correlated = step.plan is None or step.plan.plan.correlated is not None
    return view.noise(step).double() / observed.noise_std.double(), correlated


def noise_statistics(releases: Iterable[tuple[Float64[Tensor, " _"], bool]]) -> tuple[float, float, float]:
    """Computes the result of `noise_found` from standardized noise.

    Args:
        releases: noise of each release over its standard deviation, and whether it is correlated over steps by design.
    """
    energy, degrees = 0.0, 0
    patterns: dict[tuple[str, bool], list[float]] = {}
    before: Float64[Tensor, " m"] | None = None
    earlier: Float64[Tensor, " m"] | None = None
    for noise, correlated in releases:
        if not noise.numel():  # a mask may keep nothing, so that nothing is released
            continue
        energy += float(noise.square().sum())
        degrees += noise.numel()
        for name, score in dependence(noise, *((None, None) if correlated else (before, earlier))).items():
            patterns.setdefault((name, correlated), []).append(score)
        before = noise
        earlier = noise if earlier is None or earlier.shape != noise.shape else earlier + noise
    if not degrees:
        return math.nan, 0.0, 0.0
    # The standard deviation of a sum of scores grows like the square root of their number if they are independent, and
    # at most like their number if steps are correlated.
    largest = max(
        abs(sum(scores)) / (len(scores) if correlated else math.sqrt(len(scores)))
        for (_, correlated), scores in patterns.items()
    )
    return math.sqrt(energy / degrees), deviations(energy, degrees), largest


def dependence(
    noise: Float64[Tensor, " m"], before: Float64[Tensor, " n"] | None, earlier: Float64[Tensor, " n"] | None = None
) -> dict[str, float]:
    """Returns z-scores for dependence, exactly standard normal if the noise is, for any number of coordinates.

    Tests the mean, neighbouring coordinates, successive releases, and repetition after any number of releases, by their
    sum: the inner product of a standard normal vector with an independent vector, over the latter's norm, is standard
    normal. Other dependence, such as between distant coordinates, is not tested.

    Args:
        noise: over its standard deviation.
        before: standardized noise of another release; None if there is none, or if correlation is part of the plan.
        earlier: sum of the standardized noise of all earlier releases; None likewise.
    """
    z_scores = {"mean": float(noise.sum()) / math.sqrt(noise.numel())}
    pairs = {"neighbors": (noise[:-1:2], noise[1::2])}
    if before is not None and before.shape == noise.shape:
        pairs["releases"] = (before, noise)
    if earlier is not None and earlier.shape == noise.shape:
        pairs["repetition"] = (earlier, noise)
    return z_scores | {name: float(a @ b) / float(a.norm()) for name, (a, b) in pairs.items() if bool(a.any())}


def deviations(energy: float, degrees: int) -> float:
    """Returns the z-score of a sum of squares, chi-square under the claim: its cube root is approximately normal.

    Wilson & Hilferty, "The Distribution of Chi-Square", PNAS 1931; the sum itself has a longer tail, which would flag
    honest noise on a few coordinates. On very few coordinates, too little noise is undetectable.

    Args:
        energy: sum of (noise / standard deviation)^2 over all coordinates.
        degrees: number of coordinates.
    """
    variance = 2 / (9 * degrees)
    return (math.cbrt(energy / degrees) - (1 - variance)) / math.sqrt(variance)
