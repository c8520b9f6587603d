"""The trade-off curve of a claim: a bound on any test of a record's membership, at every error rate.

Dong, Roth & Su, "Gaussian Differential Privacy", JRSS B 2022 (the least type II error at each type I error, in closed
form for a Gaussian); Kairouz, Oh & Viswanath, "The Composition Theorem for Differential Privacy", ICML 2015 (a pair of
epsilon and delta excludes the region below two lines). A claim at a single delta is such a pair; the privacy loss
distribution behind it has a pair for every epsilon, and so excludes more. The same events may have several valid
bounds, such as the Gaussian's without sampling: every query uses the best.

Guarantee:
    Relation as the claim's (add/remove, zero-out or replace-one), in both orders, so the curve is its own inverse.
    Deltas are pessimistic, chords between them bound a convex function from above, and float64's rounding error is
    added: no test has fewer errors than stated. `replaced` is for a record replaced by another.
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
"""Relative and absolute slack, larger than float64's error in an error rate."""
_LARGEST = 700.0
"""Largest epsilon used, nats: e^709 is the largest float. Pairs beyond it are discarded."""
_POINTS = 1500
"""A third of the number of error rates at which the area under a curve is integrated: the error is below 1e-6."""

_RAREST, _RATES = 1e-300, 300_000
"""Smallest rate and number of rates at which epsilon is read off a curve; it is too large by at most 0.0023 nats."""


@dataclass(frozen=True, eq=False)
class TradeOff:
    """Bound on any test of membership, from all known guarantees.

    Attributes:
        by: source of the bound, in words.
        mu: shift of a Gaussian that is at least as revealing, in standard deviations of its noise; infinite if unknown,
            0 if nothing was released.
        epsilons: rising, at least 0, nats; empty if no pairs are known.
        deltas: at these, falling; they bound a function that is convex in e^epsilon.
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
        """Returns the least delta at which an epsilon is proved.

        Args:
            epsilon: nats, at least 0; infinite for the mass that no epsilon covers.
        """
        if not epsilon >= 0:
            raise ValueError(f"epsilon must be at least 0, got {epsilon}")
        return min(1.0, _gaussian_delta(epsilon, self.mu), self._chord(epsilon))

    def epsilon_at(self, delta: float, *, replaced: bool = False) -> float:
        """Returns the least epsilon that is proved at a delta, nats; infinite if none is.

        Args:
            delta: in (0, 1).
            replaced: as for `beta_at`; far tighter than group privacy for a change of two records.
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
        return high  # the side on which delta is small enough

    def beta_at(self, alpha: float, *, replaced: bool = False) -> float:
        """Returns the trade-off function: the smallest type II error (misses) at a type I error (false alarms).

        Args:
            alpha: in [0, 1].
            replaced: whether the test is between a record and its replacement, which is a removal and an addition.
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
        # Two Gaussians in sequence are a Gaussian of twice the shift.
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
        """Returns bounds by the pairs that decide: largest hits by a steep line, and least misses by a flat line.

        Any pair is valid; the best pair at a rate is found from the crossings of successive lines, and a neighbour on
        either side makes up for their rounding.
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
        """e^epsilon of the pairs, and the rates at which steep lines (from the last on) and flat lines take over."""
        slopes, falls = np.exp(self.epsilons), -np.diff(self.deltas)
        steep = np.maximum.accumulate((falls / np.diff(slopes))[::-1])
        flat = np.maximum.accumulate(1 - self.deltas[:-1] - falls / np.expm1(np.diff(self.epsilons)))
        return slopes, steep, flat

    def _chord(self, epsilon: float) -> float:
        """Returns delta by the pairs: between two pairs it lies below their chord, being convex in e^epsilon."""
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
"""Without a guarantee a test may be free of error."""


def of_pair(epsilon: float, delta: float) -> TradeOff:
    """Returns the bound of a single pair of epsilon and delta, if the mechanism behind it is unknown.

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
        delta: of the claim, in (0, 1); the grid of losses is as fine as for its epsilon.
        time_limit: seconds for the PLD accountant when it is slow.
    """
    return _of_events(merged(events), delta, time_limit)


@lru_cache(maxsize=4)  # a curve of many losses takes tens of megabytes
def _of_events(events: tuple[Gaussian, ...], delta: float, time_limit: float) -> TradeOff:
    if not events:
        return TradeOff("nothing was released", mu=0.0)
    # Sampling only makes a test harder: without it everything is a single Gaussian.
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
        # Beyond its grid, PLD has only its infinite loss: truncated mass, and the rounding error of transforms.
        beyond = epsilons[epsilons > curve[0][-1]]
        epsilons = np.append(curve[0], beyond)
        deltas = np.minimum(
            np.pad(curve[1], (0, len(beyond)), mode="edge"), accounting.rdp_divergences(events, epsilons)
        )
    some = epsilons <= _LARGEST
    # A test cannot detect a record that never takes part. Rounding may leave a tiny rise.
    most = -math.expm1(math.fsum(math.log1p(-p) if (p := e.participation) < 1 else -math.inf for e in events))
    falling = np.minimum(np.minimum.accumulate(deltas * (1 + _LOST[0])), min(1.0, most * (1 + _LOST[0])))
    return TradeOff(by, mu, epsilons[some], falling[some])


def _by_pld(events: tuple[Gaussian, ...], delta: float, time_limit: float) -> tuple[ndarray, ndarray] | None:
    interval = accounting.interval_for(events, delta)
    if interval is None:
        return None
    if accounting.quick(events):
        return pld.curve(events, interval)
    slow = accounting.pld_in_time(events, delta, interval, time_limit)
    return None if slow is None else slow.divergences


def gaussian_shift(*, advantage: float | None = None, tpr: float = 0.0, fpr: float = 0.0) -> float:
    """Returns the shift of a Gaussian at which a test reaches exactly these rates, in standard deviations of its noise.

    Args:
        advantage: the largest TPR - FPR, in (0, 1); None to use `tpr` and `fpr`.
        tpr: reached at `fpr`, both in (0, 1).
        fpr: below `tpr`.
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
    # The difference of two tails that may be nearly equal, plus the error of their logarithms.
    off = 1e-13 * (1 + abs(upper) + abs(lower) + epsilon)
    return min(1.0, math.exp(upper) * (off - math.expm1(min(0.0, epsilon + lower - upper))))


def _rates(rate: float) -> ndarray:
    if not 0 <= rate <= 1:
        raise ValueError(f"an error rate must be in [0, 1], got {rate}")
    return np.array([rate], dtype=float)
