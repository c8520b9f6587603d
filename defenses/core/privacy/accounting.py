"""Epsilon of a list of Gaussian events: dp-accounting's PLD accountant, its RDP accountant beside it.

Gaussian events without subsampling compose exactly (1 / s^2 = sum 1 / s_i^2) and are merged first; alone, they have a
closed form, which needs no accountant (Balle & Wang, "Improving the Gaussian Mechanism for Differential Privacy", ICML
2018, by dp-accounting). The PLD accountant is pessimistic, so its epsilon is an upper bound, at a discretisation of
1e-4 that grows with epsilon from 50 on: its cost is then the same for any epsilon, and its error still below 1e-4 of
it. Its walks over the losses are arrays' (`pld.py`). Its cost grows with the number of distinct events too: what may
be slow runs in a process of its own under a time limit, and when that is exceeded the RDP value, an upper bound too,
stands in by name. A sampled record in the place of another has a bound by RDP alone (Wang, Balle & Kasiviswanathan,
"Subsampled Renyi Differential Privacy and Analytical Moments Accountant", AISTATS 2019, Theorem 27, by dp-accounting).
"""

from __future__ import annotations

import json
import logging
import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.metadata import version

import dp_accounting
import numpy as np
from dp_accounting import NeighboringRelation, rdp
from dp_accounting.rdp.rdp_privacy_accountant import DEFAULT_RDP_ORDERS, compute_epsilon

from . import pld
from .events import Gaussian, merged

DISCRETISATION = 1e-4
TIME_LIMIT = 60.0  # seconds
_FINE_UP_TO = 50.0  # nats: from here on the discretisation grows with epsilon
_QUICK_EVENTS = 24
_WIDEST = 1.0  # nats between grid points: from an epsilon of 5e5 on, a grid says no more than RDP does
_CLOSED_FORM_ERROR = 1e-6, 1e-9
"""Relative and absolute: what float64 may lose of an epsilon in the closed form, added to it."""
SOME_EPSILONS = np.concatenate([np.linspace(0, 2, 81), np.geomspace(2.05, 700, 160)])
"""At which curves are known where a fine grid costs too much."""
_SOME_ORDERS = [1.25, 1.5, 1.75, *range(2, 13), 14, 16, 20, 24, 28, 32, 40, 48, 64, 96, 128, 192, 256, 384, 512, 1024]
_WHOLE_ORDERS = [order for order in DEFAULT_RDP_ORDERS if order == int(order)]
_RDP_ERROR = 1e-12
"""What float64 and a truncated series may lose of the divergence of one subsampled step: all of it at tiny rates."""


@dataclass(frozen=True)
class Epsilon:
    """One epsilon by two accountants.

    Attributes:
        value: the claim: PLD's where it finished in time, else RDP's.
        rdp: RDP's.
        accountant: which one, its version and its precision, or why it was another.
    """

    value: float
    rdp: float
    accountant: str


def quick(events: Sequence[Gaussian]) -> bool:
    """Whether the PLD accountant takes a second or two for so many merged events, or knows no other way."""
    if any(e.replaced for e in events):
        return False
    return len(events) <= _QUICK_EVENTS or not all(e.plain for e in events)


def epsilon(events: Sequence[Gaussian], delta: float, *, time_limit: float = TIME_LIMIT) -> Epsilon:
    """Epsilon at `delta` of the composition of `events`.

    Args:
        events: in any order.
        delta: in (0, 1).
        time_limit: seconds that the PLD accountant may take when it is expected to be slow.

    Returns:
        Epsilon with the accountant's name; 0 for no event at all.
    """
    if not 0 < delta < 1:
        raise ValueError(f"delta must be in (0, 1), got {delta}")
    return _epsilon(merged(events), delta, time_limit)


@lru_cache(maxsize=4096)
def _epsilon(events: tuple[Gaussian, ...], delta: float, time_limit: float) -> Epsilon:
    library = f"dp-accounting {version('dp-accounting')}"
    if not events:
        return Epsilon(0.0, 0.0, "nothing was released")
    by_rdp = rdp_epsilon(events, delta)
    if events[0].sample_rate == 1 and len(events) == 1:  # `merged` puts all unsampled events into the first
        exact = gaussian_epsilon(events[0].noise_multiplier, delta)
        return Epsilon(exact, max(exact, by_rdp), f"closed form of the Gaussian ({library})")
    interval = interval_for(events, delta, by_rdp)
    if interval is None:
        by_pld = None
    elif quick(events):
        by_pld = pld_epsilon(events, delta, interval)
    else:
        slow = pld_in_time(events, delta, interval, time_limit)
        by_pld = None if slow is None else slow.epsilon
    # Sampling only lowers epsilon, so the composition without it is an upper bound too, and the smallest bound holds:
    # on rare tiny events PLD's truncation makes PLD's larger.
    plain = gaussian_epsilon(math.fsum(e.count / e.noise_multiplier**2 for e in events) ** -0.5, delta)
    if plain < min(by_rdp, math.inf if by_pld is None else by_pld):
        return Epsilon(plain, by_rdp, f"closed form of the Gaussian ({library}; sampling not counted)")
    if interval is None:
        why = "sampled without replacement" if any(e.replaced for e in events) else "too large for a grid of losses"
        return Epsilon(by_rdp, by_rdp, f"RDP ({library}; {why})")
    if by_pld is None:
        why = f"took longer than {time_limit:g} s" if _lost(events) < delta else "loses all of delta to rounding"
        return Epsilon(by_rdp, by_rdp, f"RDP ({library}; PLD {why})")
    if by_pld > by_rdp:
        return Epsilon(by_rdp, by_rdp, f"RDP ({library}; below PLD's pessimistic estimate)")
    # Slow lists go to dp-accounting's own accountant, in a process of its own.
    composed = f"{library}, composed by leakbench" if quick(events) else library
    composed += ", random allocation by leakbench" if any(e.allocated for e in events) else ""
    composed += "" if all(e.plain for e in events) else "; RDP beside it without amplification"
    return Epsilon(by_pld, by_rdp, f"PLD ({composed}, pessimistic, discretisation {interval:.2g})")


def interval_for(events: Sequence[Gaussian], delta: float, by_rdp: float | None = None) -> float | None:
    """Nats between the losses of PLD's grid; None where so large an epsilon is looked for that a grid says no more.

    None as well for a sampled record in the place of another: no pair of distributions is known that dominates all such
    pairs (Lebeda et al., "Avoiding Pitfalls for Privacy Accounting of Subsampled Mechanisms under Composition", 2024).

    Args:
        events: merged.
        delta: in (0, 1).
        by_rdp: epsilon by RDP, if it is known already.
    """
    if any(e.replaced for e in events):
        return None
    # Of about the right size, where RDP knows no amplification.
    if not all(e.plain for e in events):
        by_rdp = rdp_epsilon(merged([e.as_poisson for e in events]), delta)
    elif by_rdp is None:
        by_rdp = rdp_epsilon(events, delta)
    interval = DISCRETISATION * max(1.0, by_rdp / _FINE_UP_TO)
    return None if interval > _WIDEST else interval


def gaussian_epsilon(noise_multiplier: float, delta: float) -> float:
    """Epsilon of one Gaussian mechanism without subsampling, rounded up.

    Args:
        noise_multiplier: positive.
        delta: in (0, 1).
    """
    relative, absolute = _CLOSED_FORM_ERROR
    # Of epsilon 0, delta is the total variation of two Gaussians, which the library has from a difference.
    if math.erf(1 / (math.sqrt(8) * noise_multiplier)) * (1 + 1e-12) <= delta:
        return 0.0
    with np.errstate(divide="ignore"):  # the logarithm of a delta that vanishes
        found = float(dp_accounting.get_epsilon_gaussian(noise_multiplier, delta))
    return found * (1 + relative) + absolute


def gaussian_multiplier(epsilon: float, delta: float) -> float:
    """The noise multiplier at which one Gaussian mechanism proves `epsilon`, rounded up.

    Args:
        epsilon: nats, positive.
        delta: in (0, 1).
    """
    relative, absolute = _CLOSED_FORM_ERROR
    # Of what is left for epsilon where rounding up has its share: nothing, where delta must do by itself.
    wanted = max((epsilon - absolute) / (1 + relative), 0.0)
    with np.errstate(divide="ignore"):
        sigma = float(dp_accounting.get_sigma_gaussian(wanted, delta))
    # dp-accounting solves for sigma up to a tolerance of its own; the loop ends on the private side of it. In growing
    # steps: of a small delta a millionth more noise is less than that tolerance.
    step = 1e-6
    while gaussian_epsilon(sigma, delta) > epsilon:
        sigma, step = sigma * (1 + step), 2 * step
    return sigma


def rdp_epsilon(events: Sequence[Gaussian], delta: float) -> float:
    """Epsilon by Renyi DP over dp-accounting's default orders, with its improved conversion, rounded up.

    Over the orders, epsilon falls up to the best one and rises from there: it is [(a - 1) rdp(a) + (a - 1) log(1 - 1/a)
    - log a - log delta] / (a - 1), and the numerator is convex. dp-accounting takes a loop for each order, so the best
    whole one is found by bisection, and only what lies around it is looked at besides. Between whole orders its series
    may lose digits, and leave an order out. Whatever is looked at, the least of it is an upper bound.
    """
    lost = _RDP_ERROR * sum(e.count for e in events if e.sample_rate < 1)

    @cache
    def at(order: float) -> float:
        accountant = _by_rdp(events, [order])
        # Before the conversion: a divergence that rounding has made 0, or negative, the library takes for epsilon 0.
        divergence = np.maximum(accountant.rdp, 0.0) + lost
        return float(compute_epsilon([order], divergence.tolist(), delta)[0])

    low, high = 0, len(_WHOLE_ORDERS) - 1
    with _quiet():
        # Of the lowest, where epsilon may be 0 by another bound, which does not rise and fall as the usual one does.
        lowest = at(DEFAULT_RDP_ORDERS[0])
        while low < high:
            middle = (low + high) // 2
            if at(_WHOLE_ORDERS[middle]) <= at(_WHOLE_ORDERS[middle + 1]):
                high = middle
            else:
                low = middle + 1
        start = _WHOLE_ORDERS[low - 1] if low else 0
        end = _WHOLE_ORDERS[min(low + 1, len(_WHOLE_ORDERS) - 1)]
        return min(lowest, *(at(order) for order in DEFAULT_RDP_ORDERS if start <= order <= end))


def pld_epsilon(events: Sequence[Gaussian], delta: float, interval: float = DISCRETISATION) -> float:
    """Epsilon by privacy loss distributions, pessimistic, in steps of `interval` nats."""
    return pld.epsilon(events, delta, interval)


def _by_rdp(events: Sequence[Gaussian], orders: Sequence[float]) -> rdp.RdpAccountant:
    """dp-accounting's accountant with these events composed; it refuses Poisson samples where a record is replaced."""
    replaced = any(e.replaced for e in events)
    accountant = rdp.RdpAccountant(
        orders, NeighboringRelation.REPLACE_ONE if replaced else NeighboringRelation.ADD_OR_REMOVE_ONE
    )
    for e in events:
        accountant.compose(_dp_event(e), e.count)
    return accountant


def _dp_event(e: Gaussian) -> dp_accounting.DpEvent:
    gaussian = dp_accounting.GaussianDpEvent(e.noise_multiplier)
    if e.replaced and e.sample_rate < 1:
        # The bound depends on the share of the records alone. It speaks of any record that takes part with that chance,
        # so of one with a coin of its own, too: all that it uses of a step is that its distributions are (1 - q) r + q
        # p and (1 - q) r + q p', in which r, p and p' are Gaussians within the sensitivity of each other.
        drawn, records = e.sample_rate.as_integer_ratio()
        return dp_accounting.SampledWithoutReplacementDpEvent(records, drawn, gaussian)
    # Without amplification where the library's RDP accountant knows none: an upper bound.
    amplified = e.sample_rate < 1 and e.plain
    return dp_accounting.PoissonSampledDpEvent(e.sample_rate, gaussian) if amplified else gaussian


@dataclass(frozen=True, eq=False)
class SlowAnswer:
    """What dp-accounting's own accountant found.

    Attributes:
        epsilon: at the delta asked for.
        divergences: epsilons and deltas at these, of some epsilons from 0 up.
    """

    epsilon: float
    divergences: tuple[np.ndarray, np.ndarray]


# A program of its own, because a thread cannot be ended at a limit; it imports nothing of ours, and so no torch.
_WORKER = """
import json, sys, logging
logging.getLogger("absl").setLevel(logging.ERROR)
import dp_accounting as dp
from dp_accounting import pld
job = json.load(sys.stdin)
accountant = pld.PLDAccountant(value_discretization_interval=job["interval"])
for q, s, n in job["events"]:
    event = dp.GaussianDpEvent(s)
    accountant.compose(dp.PoissonSampledDpEvent(q, event) if q < 1 else event, n)
deltas = [float(delta) for delta in accountant.get_delta(job["epsilons"])]
print(json.dumps([float(accountant.get_epsilon(job["delta"])), deltas]))
"""


def _lost(events: Sequence[Gaussian]) -> float:
    """What the transforms of dp-accounting's own accountant may lose of a delta, which it does not count."""
    return 64 * 2.0**-53 * sum(e.count for e in events)  # a few more digits with every power


@lru_cache(maxsize=256)
def pld_in_time(events: tuple[Gaussian, ...], delta: float, interval: float, time_limit: float) -> SlowAnswer | None:
    """PLD's answers from a process that is ended at the limit; None when it was, ran out of memory, or lost all."""
    lost = _lost(events)
    if lost >= delta:
        return None
    job = {
        "interval": interval,
        "delta": delta - lost,
        "epsilons": SOME_EPSILONS.tolist(),
        "events": [[e.sample_rate, e.noise_multiplier, e.count] for e in events],
    }
    command = [sys.executable, "-c", _WORKER]
    try:
        done = subprocess.run(  # noqa: S603 - our own interpreter and our own text
            command, input=json.dumps(job), capture_output=True, text=True, timeout=time_limit, check=True
        )
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError):
        return None
    found, deltas = json.loads(done.stdout)
    return SlowAnswer(float(found), (SOME_EPSILONS, np.minimum(np.array(deltas) + lost, 1.0)))


def rdp_divergences(events: Sequence[Gaussian], epsilons: np.ndarray = SOME_EPSILONS) -> np.ndarray:
    """Deltas at epsilons by Renyi DP, rounded up.

    Args:
        events: in any order.
        epsilons: rising from 0; some of them where none are given.
    """
    with _quiet():
        accountant = _by_rdp(events, _SOME_ORDERS)
    # The library takes a divergence that rounding made negative for a delta of 0.
    lost = _RDP_ERROR * sum(e.count for e in events if e.sample_rate < 1)
    found = np.maximum(accountant.rdp, 0.0) + lost
    # Canonne, Kamath & Steinke, "The Discrete Gaussian for Differential Privacy", 2020, Proposition 12; beside it the
    # total variation by Bretagnolle & Huber, which a divergence of any order above 1 bounds.
    with np.errstate(divide="ignore"):
        logs = np.full(len(epsilons), 0.5 * np.log(-np.expm1(-found)).min())
    # One after another: of a fine grid, a table of all orders would be large.
    for order, divergence in zip(_SOME_ORDERS, found.tolist(), strict=True):
        logs = np.minimum(logs, (order - 1) * (divergence - epsilons + math.log1p(-1 / order)) - math.log(order))
    # What is too small for a float is not 0 for that.
    return np.exp(np.minimum(logs, 0.0)) * (1 + _CLOSED_FORM_ERROR[0]) + np.finfo(np.float64).tiny


@contextmanager
def _quiet() -> Iterator[None]:
    # dp-accounting warns about every fractional order it leaves out; leaving one out only raises epsilon.
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
