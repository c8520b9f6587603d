"""The noise in a run's releases against the noise claimed, found by its auditor, who holds data and sampler's key."""

from __future__ import annotations

import math
from collections.abc import Iterable

from jaxtyping import Float64
from torch import Tensor

from leakbench.defenses.core import Step

from ..targets.observe import RunView
from ..targets.observed_step import Observed


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
    return looked_over(_whitened(view, step) for step in steps)


def _whitened(view: RunView, step: Step) -> tuple[Tensor, bool]:
    seen = Observed(step, view.run.model, view.run.transcript.layout, view.world.loss)
    correlated = step.plan is None or step.plan.plan.correlated is not None
    return view.noise(step).double() / seen.noise_std.double(), correlated


def looked_over(releases: Iterable[tuple[Float64[Tensor, " _"], bool]]) -> tuple[float, float, float]:
    """What `noise_found` returns, of noise over its standard deviation, and of whether it follows from that before."""
    energy, degrees = 0.0, 0
    patterns: dict[tuple[str, bool], list[float]] = {}
    before: Float64[Tensor, " m"] | None = None
    for noise, correlated in releases:
        if not noise.numel():  # a mask may keep nothing: nothing is released then
            continue
        energy += float(noise.square().sum())
        degrees += noise.numel()
        for name, score in dependence(noise, None if correlated else before).items():
            patterns.setdefault((name, correlated), []).append(score)
        before = noise
    if not degrees:
        return math.nan, 0.0, 0.0
    # A sum of scores of steps that follow from one another may spread as wide as their number, and not as its root.
    largest = max(
        abs(sum(scores)) / (len(scores) if correlated else math.sqrt(len(scores)))
        for (_, correlated), scores in patterns.items()
    )
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
