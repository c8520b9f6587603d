"""Paired comparisons over seeds, and the verdict on a claim that rests on several of them.

Each comparison has a two-sided t test of a mean difference of 0 (Student, over seeds; normal differences are assumed).
All comparisons of a claim in a setting are tested together by Holm's step-down procedure (Holm, "A Simple Sequentially
Rejective Multiple Test Procedure", Scandinavian Journal of Statistics 1979). Intervals are each comparison's own 95 %.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from scipy import stats

PaperVerdict = Literal["holds", "does not hold", "cannot be told", "n/a"]

LEVEL = 0.05
"""Chance of a wrong verdict about a claim in a setting, if none of its differences is real."""
SPECIFIED_SEEDS = 5
"""Seeds that the specification asks for; verdicts on fewer are marked."""
FEWEST_SEEDS = 3
"""Seeds below which nothing is told: with two, a t interval has one degree of freedom."""


@dataclass(frozen=True, kw_only=True)
class PairedDifference:
    """Differences of two quantities, seed by seed, signed so that a positive difference agrees with the claim.

    Attributes:
        name: the two quantities, and where.
        differences: a value per seed.
        candidates: number of comparisons of which this was chosen for its large mean; 1 without a choice.
        least_against: p-value below which none against the claim falls: the largest of the candidates, each of which
            could be the best; 0 without a choice.
    """

    name: str
    differences: Mapping[int, float]
    candidates: int = 1
    least_against: float = 0.0

    @property
    def n(self) -> int:
        """Number of seeds."""
        return len(self.differences)

    @property
    def mean(self) -> float:
        """Mean difference; NaN without a seed."""
        return float(np.mean(list(self.differences.values()))) if self.differences else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """95 % t interval of the mean difference; infinite for fewer than two seeds."""
        if self.n < 2:
            return -math.inf, math.inf
        half = float(stats.t.ppf(1 - LEVEL / 2, self.n - 1)) * self._error
        return self.mean - half, self.mean + half

    @property
    def p(self) -> float:
        """Two-sided p-value of a mean difference of 0, adjusted for a choice.

        In favour of the claim it is times `candidates` (Bonferroni), against it at least `least_against`.
        """
        if self.n < 2:
            return 1.0
        if self._error == 0:
            p = float(self.mean == 0)
        else:
            p = 2 * float(stats.t.sf(abs(self.mean) / self._error, self.n - 1))
        return min(1.0, p * self.candidates) if self.mean > 0 else max(p, self.least_against)

    @property
    def _error(self) -> float:
        return float(np.std(list(self.differences.values()), ddof=1)) / math.sqrt(self.n)


def paired(
    name: str, higher: Mapping[int, float], lower: Mapping[int, float], *, candidates: int = 1
) -> PairedDifference:
    """Returns the comparison of two quantities on the seeds that both have.

    Args:
        name: the two quantities, and where.
        higher: seed -> value that the claim says is the larger.
        lower: seed -> the other value.
        candidates: as in `PairedDifference`.
    """
    shared = sorted({*higher} & {*lower})
    return PairedDifference(
        name=name, differences={seed: higher[seed] - lower[seed] for seed in shared}, candidates=candidates
    )


def best_of(comparisons: Sequence[PairedDifference]) -> PairedDifference | None:
    """Returns the comparison with the largest mean of those with the most seeds; None if none has any.

    In favour of "the best is better" its p-value pays for the choice. Against it all must be worse, so its p-value is
    the largest: the best of a sample need not be the best.

    Args:
        comparisons: of all candidates with the same rival.
    """
    most = max((comparison.n for comparison in comparisons), default=0)
    if not most:
        return None
    chosen = max((c for c in comparisons if c.n == most), key=lambda comparison: comparison.mean)
    against = max(c.p if c.mean < 0 else 1.0 for c in comparisons if c.n)
    return replace(chosen, candidates=len(comparisons), least_against=against if chosen.mean < 0 else 0.0)


def holm(p_values: Sequence[float]) -> list[float]:
    """Returns p-values adjusted for their number by Holm's step-down procedure, in the order given."""
    adjusted, largest = [1.0] * len(p_values), 0.0
    for rank, position in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[position]))
        adjusted[position] = largest
    return adjusted


def verdict_on(comparisons: Sequence[PairedDifference]) -> PaperVerdict:
    """Returns the verdict on a claim that says that all of these differences are positive.

    `holds` if all of them exclude 0 from above, `does not hold` if any excludes it from below, else `cannot be told`.
    """
    if not comparisons:
        return "n/a"
    adjusted = holm([comparison.p for comparison in comparisons])
    decided = [comparison.n >= FEWEST_SEEDS and p <= LEVEL for comparison, p in zip(comparisons, adjusted, strict=True)]
    if any(sure and comparison.mean < 0 for comparison, sure in zip(comparisons, decided, strict=True)):
        return "does not hold"
    if all(sure and comparison.mean > 0 for comparison, sure in zip(comparisons, decided, strict=True)):
        return "holds"
    return "cannot be told"
