"""The trade-off function of a claim: a lower bound on the type II error of any membership test at each type I error.

Dong, Roth & Su, "Gaussian Differential Privacy", JRSS B 2022 (f-DP, with mu-GDP as the closed form for a Gaussian);
Kairouz, Oh & Viswanath, "The Composition Theorem for Differential Privacy", ICML 2015 (a pair of epsilon and delta
excludes the region below two lines). A claim at a single delta is such a pair; the privacy loss distribution behind it
has a pair for every epsilon, and so excludes more. The same events may have several valid bounds, such as the
Gaussian's without sampling: every query uses the best.

Guarantee:
    Relation as the claim's (add/remove, zero-out or replace-one). The bound is for both orders of the two data sets, so
    the curve is its own inverse. Deltas are pessimistic, chords between them bound a convex function from above, and
    float64's rounding error is added: no test has smaller errors than stated. With `replaced`, the bound is for the
    test between a record and its replacement, by composition of a removal and an addition.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np
from jaxtyping import Float
from numpy import ndarray
from scipy.special import log_ndtr, ndtr, ndtri

from . import accounting, pld
from .accounting import TIME_LIMIT
from .events import Gaussian, merged

_LOST = 1e-9, 1e-15
"""Relative and absolute slack of an error rate, larger than the rounding error of float64."""
_LARGEST = 700.0
"""Largest epsilon used, nats: e^709 is the largest float. Pairs beyond it are discarded."""
_POINTS = 1500
"""A third of the number of points at which the area under a curve is integrated, with an error below 1e-6."""

_RAREST, _RATES = 1e-300, 300_000
"""Smallest rate, and number of rates, at which epsilon is read off a curve, too large by at most 0.0023 nats."""


@dataclass(frozen=True, eq=False)
class TradeOff:
    """Bound on all membership tests, from all known guarantees.

    Attributes:
        by: source of the bound, in words.
        mu: parameter of a mu-GDP guarantee; infinite if unknown, 0 if nothing was released.
        epsilons: epsilons of known (epsilon, delta) pairs, rising from at least 0, in nats; may be empty.
        deltas: deltas of the pairs, falling; they bound a function that is convex in e^epsilon.
    """

    by: str
    mu: float = math.inf
    epsilons: Float[ndarray, " pairs"] = field(default_factory=lambda: np.empty(0))
    deltas: Float[ndarray, " pairs"] = field(default_factory=lambda: np.empty(0))

    def __post_init__(self) -> None:
        e, d = self.epsilons, self.deltas
        if not (self.mu >= 0 and len(e) == len(d)):
            raise ValueError(
                f"mu must be at least 0, and deltas as many as epsilons, got {self.mu}, {len(d)}, {len(e)}"
            )
        if len(e) and not (e[0] >= 0 and (np.diff(e) > 0).all() and (d >= 0).all() and (np.diff(d) <= 0).all()):
            raise ValueError("epsilons must rise from at least 0, and deltas fall to at least 0")

    def delta_at(self, epsilon: float) -> float:
        """Returns the smallest delta that is proved at an epsilon.

        Args:
            epsilon: nats, at least 0; infinite for the limit of delta, the mass of infinite privacy loss.
        """
        if not epsilon >= 0:
            raise ValueError(f"epsilon must be at least 0, got {epsilon}")
        return min(1.0, _gaussian_delta(epsilon, self.mu), self._chord(epsilon))

    def epsilon_at(self, delta: float, *, replaced: bool = False) -> float:
        """Returns the smallest epsilon that is proved at a delta, in nats; infinite if none is.

        Args:
            delta: in (0, 1).
            replaced: as for `beta_at`; far tighter than group privacy for two records.
        """
        if not 0 < delta < 1:
            raise ValueError(f"delta must be in (0, 1), got {delta}")
        if replaced:
            return self._replaced_epsilon(delta)
        if self.delta_at(0.0) <= delta:
            return 0.0
        if self.delta_at(math.inf) > delta:
            return math.inf
        low, high = 0.0, 1.0
        while self.delta_at(high) > delta:
            low, high = high, 2 * high
        while high - low > 1e-12 * max(1.0, high):
            middle = (low + high) / 2
            low, high = (middle, high) if self.delta_at(middle) > delta else (low, middle)
        return high  # the upper end, at which delta is small enough

    def beta_at(self, alpha: float, *, replaced: bool = False) -> float:
        """Returns the trade-off function: the smallest type II error (misses) at a type I error (false alarms).

        Args:
            alpha: in [0, 1].
            replaced: whether the test is between a record and its replacement, instead of its absence.
        """
        if replaced:
            alpha = self.tpr_at(alpha)
        return float(self._misses(_rates(alpha))[0])

    def tpr_at(self, fpr: float, *, replaced: bool = False) -> float:
        """Returns the largest true positive rate at a false positive rate: 1 - beta without loss of digits near 0.

        Args:
            fpr: in [0, 1].
            replaced: as for `beta_at`.
        """
        rate = float(self._hits(_rates(fpr))[0])
        return self.tpr_at(rate) if replaced else rate

    @property
    def advantage(self) -> float:
        """The largest TPR - FPR of any test: the total variation distance, which is delta at epsilon 0."""
        return self.delta_at(0.0)

    @cached_property
    def auc(self) -> float:
        """The largest area under an ROC curve."""
        near = np.geomspace(1e-12, 0.5, _POINTS)
        edges = np.unique(np.concatenate([[0.0, 1.0], near, 1 - near, np.linspace(0, 1, _POINTS)]))
        # The least type II error is convex, so its mean over an interval is at least its value in the middle.
        below = float(np.diff(edges) @ self._misses((edges[1:] + edges[:-1]) / 2))
        by_gaussian = 1.0 if math.isinf(self.mu) else float(ndtr(self.mu / math.sqrt(2))) * (1 + _LOST[0])
        return min(1.0, 1 - below * (1 - _LOST[0]), max(0.5, by_gaussian))

    def _replaced_epsilon(self, delta: float) -> float:
        # hits(a) <= e^epsilon a + delta at every rate a: between two rates, hits are at most those at the upper rate.
        rates, hits = self._replaced_hits
        if self.mu == 0:
            return 0.0
        # A removal and an addition, each mu-GDP, are 2 mu-GDP.
        known = math.inf if math.isinf(self.mu) else TradeOff(self.by, 2 * self.mu).epsilon_at(delta)
        if hits[0] > delta:
            return known
        beyond = hits[1:] - delta
        needed = beyond[beyond > 0] / rates[:-1][beyond > 0]
        return min(known, max(0.0, math.log(needed.max())) if len(needed) else 0.0)

    @cached_property
    def _replaced_hits(self) -> tuple[ndarray, ndarray]:
        rates = np.geomspace(_RAREST, 1.0, _RATES)
        return rates, self._hits(self._hits(rates))

    def _hits(self, fpr: ndarray) -> ndarray:
        relative, absolute = _LOST
        # A finite shift allows no test without errors; an infinite shift (nothing is known) might.
        best = np.ones_like(fpr) if math.isinf(self.mu) else ndtr(ndtri(fpr) + self.mu) * (1 + relative)
        for steep, flat in self._lines(fpr):
            best = np.minimum(best, np.minimum(steep, 1 - flat) * (1 + relative) + absolute)
        # Random guessing reaches the false positive rate itself; for a subnormal rate, products lose all digits.
        return np.minimum(np.maximum(best, fpr), 1.0)

    def _misses(self, alpha: ndarray) -> ndarray:
        relative, absolute = _LOST
        best = np.zeros_like(alpha) if math.isinf(self.mu) else ndtr(-ndtri(alpha) - self.mu) * (1 - relative)
        for steep, flat in self._lines(alpha):
            best = np.maximum(best, np.maximum(1 - steep, flat) * (1 - relative) - absolute)
        return np.maximum(best, 0.0)

    def _lines(self, rates: ndarray) -> list[tuple[ndarray, ndarray]]:
        """Returns bounds from the pairs: upper bounds on hits by steep lines, lower bounds on misses by flat lines.

        Every pair gives a valid bound. The tightest pair at a rate is found from the crossings of successive lines; its
        two neighbours are tried too, because crossings have rounding error.
        """
        if not len(self.epsilons):
            return []
        slopes, steep_from, flat_from = self._crossings
        last = len(slopes) - 1
        steep, flat = last - np.searchsorted(steep_from, rates), np.searchsorted(flat_from, rates)
        bounds = []
        for beside in (-1, 0, 1):
            s, f = np.clip(steep + beside, 0, last), np.clip(flat + beside, 0, last)
            hits = self.deltas[s] + slopes[s] * rates
            bounds.append((hits, (1 - self.deltas[f] - rates - 4 * 2.0**-53) / slopes[f]))
        return bounds

    @cached_property
    def _crossings(self) -> tuple[ndarray, ndarray, ndarray]:
        """e^epsilon of the pairs, and rates at which the tightest steep line (last pair first) or flat line changes."""
        slopes, falls = np.exp(self.epsilons), -np.diff(self.deltas)
        steep = np.maximum.accumulate((falls / np.diff(slopes))[::-1])
        flat = np.maximum.accumulate(1 - self.deltas[:-1] - falls / np.expm1(np.diff(self.epsilons)))
        return slopes, steep, flat

    def _chord(self, epsilon: float) -> float:
        """Returns delta by interpolation of the pairs in e^epsilon, an upper bound because delta is convex in it."""
        if not len(self.epsilons):
            return 1.0
        at = int(np.searchsorted(self.epsilons, epsilon, side="right"))
        if at == len(self.epsilons):
            return float(self.deltas[-1])
        high, delta = float(self.epsilons[at]), float(self.deltas[at])
        if at:
            low, larger = float(self.epsilons[at - 1]), float(self.deltas[at - 1])
        else:
            # The other order of the same pair: delta(-epsilon) = 1 - e^-epsilon (1 - delta(epsilon)).
            low, larger = -high, 1 - math.exp(-high) * (1 - delta)
        share = math.expm1(epsilon - high) / math.expm1(low - high)
        return (delta + (larger - delta) * share) * (1 + _LOST[0])


NOTHING_PROVED = TradeOff("nothing is proved")
"""Bound without a guarantee: a test may make no errors."""


def of_pair(epsilon: float, delta: float) -> TradeOff:
    """Returns the bound of a single pair of epsilon and delta, for an unknown mechanism.

    Args:
        epsilon: nats, at least 0; infinite if nothing is claimed.
        delta: in [0, 1].
    """
    if not (epsilon >= 0 and 0 <= delta <= 1):
        raise ValueError(f"epsilon must be at least 0 and delta in [0, 1], got {epsilon} and {delta}")
    if epsilon > _LARGEST:
        return NOTHING_PROVED
    return TradeOff("its epsilon and delta alone", epsilons=np.array([epsilon]), deltas=np.array([delta]))


def of_events(events: Sequence[Gaussian], delta: float, *, time_limit: float = TIME_LIMIT) -> TradeOff:
    """Returns the bound of a composition of events, by privacy loss distributions if available, else by RDP.

    Args:
        events: in any order.
        delta: delta of the claim, in (0, 1), which determines the grid of losses.
        time_limit: seconds for the PLD accountant when it is slow.
    """
    return _of_events(merged(events), delta, time_limit)


@lru_cache(maxsize=4)  # a curve of many losses takes tens of megabytes
def _of_events(events: tuple[Gaussian, ...], delta: float, time_limit: float) -> TradeOff:
    if not events:
        return TradeOff("nothing was released", mu=0.0)
    # Sampling only makes a test harder. Without it the composition is a single Gaussian, mu-GDP.
    mu = math.sqrt(math.fsum(e.count / e.noise_multiplier**2 for e in events)) * (1 + 1e-12)
    if len(events) == 1 and events[0].sample_rate == 1:
        return TradeOff("closed form of the Gaussian", mu=mu)
    curve, by = _by_pld(events, delta, time_limit), "PLD, pessimistic"
    epsilons = accounting.SOME_EPSILONS
    if curve is None:
        why = "no other bound is known" if any(e.replaced for e in events) else "PLD took too long or too many losses"
        by = f"RDP, which is looser: {why}"
        deltas = accounting.rdp_divergences(events)
    else:
        # Beyond its grid, PLD's delta is the mass of infinite loss: truncated mass and rounding error of transforms.
        beyond = epsilons[epsilons > curve[0][-1]]
        epsilons = np.append(curve[0], beyond)
        deltas = np.minimum(
            np.pad(curve[1], (0, len(beyond)), mode="edge"), accounting.rdp_divergences(events, epsilons)
        )
    finite = epsilons <= _LARGEST
    # A test cannot detect a record that never takes part. Rounding may leave a tiny rise.
    most = -math.expm1(math.fsum(math.log1p(-p) if (p := e.participation) < 1 else -math.inf for e in events))
    falling = np.minimum(np.minimum.accumulate(deltas * (1 + _LOST[0])), min(1.0, most * (1 + _LOST[0])))
    return TradeOff(by, mu, epsilons[finite], falling[finite])


def _by_pld(events: tuple[Gaussian, ...], delta: float, time_limit: float) -> tuple[ndarray, ndarray] | None:
    interval = accounting.interval_for(events, delta)
    if interval is None:
        return None
    if accounting.quick(events):
        return pld.curve(events, interval)
    slow = accounting.pld_in_time(events, delta, interval, time_limit)
    return None if slow is None else slow.divergences


def gaussian_shift(*, advantage: float | None = None, tpr: float = 0.0, fpr: float = 0.0) -> float:
    """Returns the mu of mu-GDP at which the best test reaches exactly these rates.

    Args:
        advantage: the largest TPR - FPR, in (0, 1); None to use `tpr` and `fpr`.
        tpr: true positive rate at `fpr`, both in (0, 1).
        fpr: false positive rate, below `tpr`.
    """
    if advantage is not None:
        return 2 * float(ndtri((1 + advantage) / 2))
    return float(ndtri(tpr) - ndtri(fpr))


def _gaussian_delta(epsilon: float, mu: float) -> float:
    """Delta of a Gaussian, rounded up: Phi(-epsilon/mu + mu/2) - e^epsilon Phi(-epsilon/mu - mu/2)."""
    if mu == 0:
        return 0.0
    if math.isinf(epsilon) or math.isinf(mu):
        return 1.0 if math.isinf(mu) else 0.0
    upper, lower = float(log_ndtr(-epsilon / mu + mu / 2)), float(log_ndtr(-epsilon / mu - mu / 2))
    # A difference of two tail probabilities that may be nearly equal, plus the error of their logarithms.
    off = 1e-13 * (1 + abs(upper) + abs(lower) + epsilon)
    return min(1.0, math.exp(upper) * (off - math.expm1(min(0.0, epsilon + lower - upper))))


def _rates(rate: float) -> ndarray:
    if not 0 <= rate <= 1:
        raise ValueError(f"an error rate must be in [0, 1], got {rate}")
    return np.array([rate], dtype=float)
