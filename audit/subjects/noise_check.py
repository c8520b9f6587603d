"""The noise in a run's releases against the noise claimed, found by its auditor, who holds data and sampler's key."""

from __future__ import annotations

import math
from collections.abc import Iterable

from jaxtyping import Float64
from torch import Tensor

from defenses.core import Step

from ..observe import RunView
from .observed import Observed


def noise_found(view: RunView, steps: Iterable[Step]) -> tuple[float, float, float]:
    """How the noise in a run's releases compares with the noise that its plans claim.

    Args:
        view: of a run whose releases all carry noise.
        steps: the steps, or releases beside them, to look at together.

    Returns:
        The standard deviation found over the one claimed (NaN where nothing was released), a z-score, negative for too
        little noise, and the largest z-score of what independent noise lacks: of its size, but known, it would protect
        nobody.
    """
    energy, degrees = 0.0, 0
    patterns: dict[str, list[float]] = {}
    before: Float64[Tensor, " m"] | None = None
    for step in steps:
        seen = Observed(step, view.run.model, view.run.transcript.layout, view.world.loss)
        noise = view.noise(step).double() / seen.noise_std.double()
        if not noise.numel():  # a mask may keep nothing: nothing is released then
            continue
        energy += float(noise.square().sum())
        degrees += noise.numel()
        correlated = step.plan is None or step.plan.plan.correlated is not None
        for name, score in dependence(noise, None if correlated else before).items():
            patterns.setdefault(name, []).append(score)
        before = noise
    if not degrees:
        return math.nan, 0.0, 0.0
    largest = max(abs(sum(scores)) / math.sqrt(len(scores)) for scores in patterns.values())
    return math.sqrt(energy / degrees), deviations(energy, degrees), largest


def dependence(noise: Float64[Tensor, " m"], before: Float64[Tensor, " n"] | None) -> dict[str, float]:
    """Scores that are standard normal where the noise is, exactly and however few its coordinates.

    The product of two vectors of independent normal numbers, over the length of one, is a normal number. Other
    dependence, as of coordinates far apart, is not looked for.

    Args:
        noise: over its standard deviation.
        before: the same of another release; None where there is none, or noise is claimed to follow from it.
    """
    found = {"mean": float(noise.sum()) / math.sqrt(noise.numel())}
    pairs = {"neighbors": (noise[:-1:2], noise[1::2])}
    if before is not None and before.shape == noise.shape:
        pairs["releases"] = (before, noise)
    return found | {name: float(a @ b) / float(a.norm()) for name, (a, b) in pairs.items() if bool(a.any())}


def deviations(energy: float, degrees: int) -> float:
    """The z-score of a sum of squares, chi-square under the claim: its cube root is normal to a good approximation.

    Wilson & Hilferty, "The Distribution of Chi-Square", PNAS 1931; the sum itself has a longer tail, by which honest
    noise on a few coordinates would be accused. Of very few coordinates too little noise cannot be told.

    Args:
        energy: sum of (noise / standard deviation)^2 over all coordinates.
        degrees: number of coordinates.
    """
    variance = 2 / (9 * degrees)
    return (math.cbrt(energy / degrees) - (1 - variance)) / math.sqrt(variance)
