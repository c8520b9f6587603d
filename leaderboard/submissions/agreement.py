"""Agreement of numbers with the same numbers computed again: by one seed, and by fresh seeds.

One seed: the computation is the same, so numbers are equal, up to sums in another order. They agree if each lies in the
other's 95 % interval. Equal device, source and versions do not make them equal to the last digit, because records do
not name the processor: another instruction set moves a reconstruction's PSNR by a tenth of a decibel. Such numbers are
marked, and those without an interval are not judged.

Fresh seeds: splits, weights and noise are others, and an interval of one run does not cover how runs differ. The n
reported runs and the m fresh runs are two samples: their means agree if the two-sided t interval of the difference,
with pooled variance, holds 0. Its level is 5 % over all comparisons of a verification (Bonferroni), so a true
submission differs in at most 1 of 20 verifications, as far as runs are normal with one variance; simulations with other
distributions gave 3 to 7 % (`docs/submissions.md`). The pooled variance is
at least the runs' own sampling variance, from their intervals: runs that happen to be equal are no proof of precision.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isclose, sqrt
from statistics import fmean

from scipy import special

from ..records.fields import Metric, RecordedClaim
from ..records.record import Record
from .stamp import CellVerdict

LEVEL = 0.05
"""Probability that any comparison by fresh seeds of a true submission differs."""
LEAST_FREEDOM = 2
"""Degrees of freedom below which a t interval says next to nothing: with one, it is 60 spreads wide at 1 %."""
OTHER_VERSIONS = 1e-3
"""Relative difference of epsilons that other versions of an accountant may have."""


@dataclass(frozen=True)
class Agreement:
    """CellVerdict on a number.

    Attributes:
        verdict: on the two values.
        reason: rule that decided, in words.
        low: lower end of the interval of the difference again - reported; None without an interval.
        high: upper end.
    """

    verdict: CellVerdict
    reason: str
    low: float | None = None
    high: float | None = None


def same_seed(reported: Metric, again: Metric, *, alike: bool, optional: bool = False) -> Agreement:
    """Compares a number with that of the same cell computed again.

    Args:
        reported: of the record.
        again: computed again.
        alike: whether device, source and versions are equal.
        optional: whether the metric needs an optional package, so that one side may lack it.
    """
    if reported.value is None or again.value is None:
        if reported.value is again.value:
            return Agreement("identical", "neither has a value")
        if optional and "not installed" in (reported.reason or "") + (again.reason or ""):
            return Agreement("not judged", "an optional package is missing on one side")
        return Agreement("differs", "only one of both has a value")
    if (reported.value, reported.low, reported.high, reported.n) == (again.value, again.low, again.high, again.n):
        return Agreement("identical", "value and interval are equal to the last digit")
    if reported.n != again.n:
        return Agreement("differs", f"the same cell has n = {reported.n} and {again.n}")
    aside = ", though device, source and versions are equal: another processor, or an edited record" if alike else ""
    ends = (reported.low, reported.high, again.low, again.high)
    if None in ends:
        if isclose(reported.value, again.value, rel_tol=1e-6, abs_tol=1e-9):
            return Agreement("agrees", f"equal to six digits{aside}")
        return Agreement("not judged", f"not equal, and there is no interval{aside}")
    low, high, low_again, high_again = (end for end in ends if end is not None)
    inside = low <= again.value <= high and low_again <= reported.value <= high_again
    rule = f"each must lie in the other's 95 % interval{aside}"
    return Agreement("agrees" if inside else "differs", rule, low_again - reported.value, high_again - reported.value)


def same_claim(reported: RecordedClaim | None, again: RecordedClaim | None, *, alike: bool) -> Agreement:
    """Compares a claim with that of the same cell computed again.

    Args:
        reported: of the record.
        again: computed again.
        alike: whether device, source and versions are equal.
    """
    if reported is None or again is None:
        return Agreement("identical" if reported is again else "differs", "both or neither must have a claim")
    for name in ("delta", "relation", "unit", "sampling"):
        if getattr(reported, name) != getattr(again, name):
            return Agreement("differs", f"its {name} is {getattr(reported, name)!r}, again {getattr(again, name)!r}")
    ours, theirs = again.epsilon, reported.epsilon
    if ours is None or theirs is None:
        return Agreement("identical" if ours is theirs else "differs", "both or neither must be infinite")
    if ours == theirs:
        return Agreement("identical", "equal to the last digit")
    slack = 1e-9 if alike else OTHER_VERSIONS
    return Agreement("agrees" if isclose(ours, theirs, rel_tol=slack) else "differs", f"equal within {slack:g}")


def fresh_seeds_agree(reported: Sequence[Metric], again: Sequence[Metric], *, looks: int) -> Agreement:
    """Compares a number over the reported seeds with the same number over fresh seeds.

    Args:
        reported: a metric for each reported seed.
        again: a metric for each fresh seed.
        looks: number of comparisons over which the level is simultaneous.
    """
    samples = [[metric.value for metric in metrics if metric.value is not None] for metrics in (reported, again)]
    n, m = map(len, samples)
    freedom = n + m - 2
    if not n or not m or freedom < LEAST_FREEDOM:
        return Agreement("not judged", f"{n} reported and {m} fresh seeds have a value; four in all are needed")
    means = [fmean(sample) for sample in samples]
    squares = sum((value - mean) ** 2 for sample, mean in zip(samples, means, strict=True) for value in sample)
    variance = max(squares / freedom, _own_variance([*reported, *again]))
    # Two-sided: t(1 - alpha / (2 k); n + m - 2) s sqrt(1/n + 1/m).
    half = float(special.stdtrit(freedom, 1 - LEVEL / (2 * looks))) * sqrt(variance * (1 / n + 1 / m))
    difference = means[1] - means[0]
    agrees = abs(difference) <= half * (1 + 1e-9) + 1e-12
    rule = f"t interval of the difference, {n} and {m} seeds, level {LEVEL:g} over {looks} comparisons"
    return Agreement("agrees" if agrees else "differs", rule, difference - half, difference + half)


def alike(reported: Record, again: Record) -> bool:
    """Returns whether two records name the same device, source, versions and third-party code."""
    return reported.device == again.device and not reported.provenance.differences(again.provenance)


def _own_variance(metrics: Sequence[Metric]) -> float:
    """Mean sampling variance of single runs, from the half-widths of their 95 % intervals."""
    halves = [(m.high - m.low) / 2 for m in metrics if m.low is not None and m.high is not None]
    return fmean((half / special.ndtri(0.975)) ** 2 for half in halves) if halves else 0.0
