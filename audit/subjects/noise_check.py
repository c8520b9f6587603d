"""The noise in a run's releases against the noise claimed, found by its auditor, who holds data and sampler's key."""

from __future__ import annotations

import math
from collections.abc import Iterable

from defenses.core import Step

from ..observe import RunView
from .observed import Observed


def noise_found(view: RunView, steps: Iterable[Step]) -> tuple[float, float]:
    """How the noise in a run's releases compares with the noise that its plans claim.

    Args:
        view: of a run whose releases all carry noise.
        steps: the steps, or releases beside them, to look at together.

    Returns:
        The standard deviation found over the one claimed, and a z-score, negative for too little noise.
    """
    energy, degrees = 0.0, 0
    for step in steps:
        seen = Observed(step, view.run.model, view.run.transcript.layout, view.world.loss)
        noise = view.noise(step)
        energy += float((noise.double() / seen.noise_std.double()).square().sum())
        degrees += noise.numel()
    return math.sqrt(energy / degrees), deviations(energy, degrees)


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
