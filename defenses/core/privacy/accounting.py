"""Epsilon of a composition of Gaussian events, by dp-accounting's PLD and RDP accountants.

Gaussian events without subsampling compose exactly (1 / s^2 = sum 1 / s_i^2) and are merged first; alone, they have a
closed form (Balle & Wang, "Improving the Gaussian Mechanism for Differential Privacy", ICML 2018, by dp-accounting).
The PLD accountant is pessimistic, so its epsilon is an upper bound. Its discretisation is 1e-4 nats and grows with
epsilon from 50 on: the cost is then the same for any epsilon, and the error still below 1e-4 of epsilon. `pld.py`
vectorises its loops over the losses. The cost also grows with the number of distinct events: a composition that may be
slow is computed by dp-accounting in a separate process under a time limit. The RDP value is an upper bound too, and is
reported under its name if the limit is passed or if it is smaller. Subsampling under replace-one has a bound by RDP
alone (Wang, Balle & Kasiviswanathan, "Subsampled Renyi Differential Privacy and Analytical Moments Accountant", AISTATS
2019, Theorem 27, by dp-accounting).
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
_QUICK_EVENTS = 24  # distinct events that `pld.py` composes within a second or two
_WIDEST = 1.0  # nats between grid points, reached at an epsilon of 5e5, from which PLD is no tighter than RDP
_CLOSED_FORM_ERROR = 1e-6, 1e-9
"""Relative and absolute error of float64 in the closed form of epsilon, by which it is rounded up."""
SOME_EPSILONS = np.concatenate([np.linspace(0, 2, 81), np.geomspace(2.05, 700, 160)])
"""Coarse grid of epsilons for trade-off curves, if a fine grid costs too much."""
_SOME_ORDERS = [1.25, 1.5, 1.75, *range(2, 13), 14, 16, 20, 24, 28, 32, 40, 48, 64, 96, 128, 192, 256, 384, 512, 1024]
_WHOLE_ORDERS = [order for order in DEFAULT_RDP_ORDERS if order == int(order)]
_RDP_ERROR = 1e-12
"""Error of float64 and of a truncated series in a subsampled step's divergence; at tiny rates as large as it."""


@dataclass(frozen=True)
class Epsilon:
    """Upper bounds on epsilon.

    Attributes:
        value: the reported epsilon, the smallest of the bounds by PLD (if it finished in time), by RDP and by the
            closed form of the composition without subsampling.
        rdp: epsilon by RDP; without subsampling, at least the closed form.
        accountant: the accountant of `value`, with its version and precision, or the reason why it is not PLD.
    """

    value: float
    rdp: float
    accountant: str


def quick(events: Sequence[Gaussian]) -> bool:
    """Returns whether `pld.py` composes these merged events: if they are few, or only it supports their sampling."""
    if any(e.replaced for e in events):
        return False
    return len(events) <= _QUICK_EVENTS or not all(e.plain for e in events)


def epsilon(events: Sequence[Gaussian], delta: float, *, time_limit: float = TIME_LIMIT) -> Epsilon:
    """Computes epsilon at `delta` of the composition of `events`.

    Args:
        events: in any order.
        delta: in (0, 1).
        time_limit: seconds for the PLD accountant when it is expected to be slow.

    Returns:
        Epsilon with the name of its accountant; 0 without events.
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
    # Sampling only lowers epsilon, so the composition without it is an upper bound too; the smallest is reported.
    # PLD's truncation makes its bound larger on rare tiny events.
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
    # Compositions of many events are computed by dp-accounting's own accountant, in a separate process.
    composed = f"{library}, composed by leakbench" if quick(events) else library
    composed += ", random allocation by leakbench" if any(e.allocated for e in events) else ""
    composed += "" if all(e.plain for e in events) else "; RDP beside it without amplification"
    return Epsilon(by_pld, by_rdp, f"PLD ({composed}, pessimistic, discretisation {interval:.2g})")


def interval_for(events: Sequence[Gaussian], delta: float, by_rdp: float | None = None) -> float | None:
    """Returns the spacing of PLD's grid in nats; None if epsilon is so large that PLD is no tighter than RDP.

    None also for subsampling under replace-one, for which no dominating pair of distributions is known (Lebeda et al.,
    "Avoiding Pitfalls for Privacy Accounting of Subsampled Mechanisms under Composition", 2024).

    Args:
        events: merged events.
        delta: in (0, 1).
        by_rdp: epsilon by RDP, if already computed.
    """
    if any(e.replaced for e in events):
        return None
    # For events whose amplification RDP does not support, Poisson sampling gives the order of magnitude.
    if not all(e.plain for e in events):
        by_rdp = rdp_epsilon(merged([e.as_poisson for e in events]), delta)
    elif by_rdp is None:
        by_rdp = rdp_epsilon(events, delta)
    interval = DISCRETISATION * max(1.0, by_rdp / _FINE_UP_TO)
    return None if interval > _WIDEST else interval


def gaussian_epsilon(noise_multiplier: float, delta: float) -> float:
    """Computes epsilon of a Gaussian mechanism without subsampling, rounded up.

    Args:
        noise_multiplier: positive.
        delta: in (0, 1).
    """
    relative, absolute = _CLOSED_FORM_ERROR
    # At epsilon 0, delta is the total variation of two Gaussians, which the library computes by a difference.
    if math.erf(1 / (math.sqrt(8) * noise_multiplier)) * (1 + 1e-12) <= delta:
        return 0.0
    with np.errstate(divide="ignore"):  # the logarithm of a delta that vanishes
        epsilon = float(dp_accounting.get_epsilon_gaussian(noise_multiplier, delta))
    return epsilon * (1 + relative) + absolute


def gaussian_multiplier(epsilon: float, delta: float) -> float:
    """Computes the noise multiplier at which a Gaussian mechanism has `epsilon`, rounded up.

    Args:
        epsilon: nats, positive.
        delta: in (0, 1).
    """
    relative, absolute = _CLOSED_FORM_ERROR
    # `gaussian_epsilon` rounds up, so the target is lower by as much; 0 if nothing remains of it.
    reduced = max((epsilon - absolute) / (1 + relative), 0.0)
    with np.errstate(divide="ignore"):
        sigma = float(dp_accounting.get_sigma_gaussian(reduced, delta))
    # dp-accounting solves for sigma up to a tolerance; the loop adds noise until epsilon is met. Its steps grow,
    # because at a small delta the tolerance is larger than a millionth of sigma.
    step = 1e-6
    while gaussian_epsilon(sigma, delta) > epsilon:
        sigma, step = sigma * (1 + step), 2 * step
    return sigma


def rdp_epsilon(events: Sequence[Gaussian], delta: float) -> float:
    """Computes epsilon by Renyi DP over dp-accounting's default orders, with its improved conversion, rounded up.

    Epsilon is unimodal in the order a: it is [(a - 1) rdp(a) + (a - 1) log(1 - 1/a) - log a - log delta] / (a - 1) with
    a convex numerator. Each order is expensive, because dp-accounting loops over its terms, so bisection finds the best
    integer order, and of the others only those next to it are evaluated. At fractional orders the series may lose
    digits, and dp-accounting then leaves the order out. The minimum over any set of orders is an upper bound.
    """
    lost = _RDP_ERROR * sum(e.count for e in events if e.sample_rate < 1)

    @cache
    def at(order: float) -> float:
        accountant = _by_rdp(events, [order])
        # Added before the conversion: the library gives epsilon 0 for a divergence that rounding made 0 or negative.
        divergence = np.maximum(accountant.rdp, 0.0) + lost
        return float(compute_epsilon([order], divergence.tolist(), delta)[0])

    low, high = 0, len(_WHOLE_ORDERS) - 1
    with _quiet():
        # Evaluated separately: at the lowest order the library may return 0 by another bound, which is not unimodal.
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
    """Computes epsilon by privacy loss distributions on a grid of `interval` nats, pessimistically."""
    return pld.epsilon(events, delta, interval)


def _by_rdp(events: Sequence[Gaussian], orders: Sequence[float]) -> rdp.RdpAccountant:
    """Returns an RDP accountant with these events composed."""
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
        # The bound depends on the fraction of the records alone. It also holds for a record with its own coin: it uses
        # only that the distributions of a step are (1 - q) r + q p and (1 - q) r + q p', where r, p and p' are
        # Gaussians within the sensitivity of each other.
        drawn, records = e.sample_rate.as_integer_ratio()
        return dp_accounting.SampledWithoutReplacementDpEvent(records, drawn, gaussian)
    # Without amplification, an upper bound, if the library's RDP accountant does not support it.
    amplified = e.sample_rate < 1 and e.plain
    return dp_accounting.PoissonSampledDpEvent(e.sample_rate, gaussian) if amplified else gaussian


@dataclass(frozen=True, eq=False)
class SlowAnswer:
    """Result of dp-accounting's own accountant.

    Attributes:
        epsilon: at the requested delta.
        divergences: epsilons from 0 up, and the deltas at these.
    """

    epsilon: float
    divergences: tuple[np.ndarray, np.ndarray]


# A separate program, because a thread cannot be ended at a limit; it imports nothing of leakbench, and so no torch.
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
    """Mass that rounding in the Fourier transforms of dp-accounting may lose, which it does not add to delta."""
    return 64 * 2.0**-53 * sum(e.count for e in events)  # rounding error grows with the exponent of a power


@lru_cache(maxsize=256)
def pld_in_time(events: tuple[Gaussian, ...], delta: float, interval: float, time_limit: float) -> SlowAnswer | None:
    """Returns PLD's result from a process; None if it ran out of time or memory, or may lose delta to rounding."""
    lost = _lost(events)
    if lost >= delta:
        return None
    job = {
        "interval": interval,
        "delta": delta - lost,
        "epsilons": SOME_EPSILONS.tolist(),
        "events": [[e.sample_rate, e.noise_multiplier, e.count] for e in events],
    }
    # -P: a file in the current folder, where a stranger's method may lie, must not be imported as the accountant.
    command = [sys.executable, "-P", "-c", _WORKER]
    try:
        done = subprocess.run(  # noqa: S603 - our own interpreter and our own text
            command, input=json.dumps(job), capture_output=True, text=True, timeout=time_limit, check=True
        )
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError):
        return None
    epsilon, deltas = json.loads(done.stdout)
    return SlowAnswer(float(epsilon), (SOME_EPSILONS, np.minimum(np.array(deltas) + lost, 1.0)))


def rdp_divergences(events: Sequence[Gaussian], epsilons: np.ndarray = SOME_EPSILONS) -> np.ndarray:
    """Returns deltas at epsilons by Renyi DP, rounded up.

    Args:
        events: in any order.
        epsilons: rising from 0; a coarse grid by default.
    """
    with _quiet():
        accountant = _by_rdp(events, _SOME_ORDERS)
    # The library gives a delta of 0 for a divergence that rounding made negative.
    lost = _RDP_ERROR * sum(e.count for e in events if e.sample_rate < 1)
    divergences = np.maximum(accountant.rdp, 0.0) + lost
    # Canonne, Kamath & Steinke, "The Discrete Gaussian for Differential Privacy", 2020, Proposition 12; also the bound
    # on total variation by Bretagnolle & Huber, which holds for a divergence of any order above 1.
    with np.errstate(divide="ignore"):
        logs = np.full(len(epsilons), 0.5 * np.log(-np.expm1(-divergences)).min())
    # Order by order, because a table of all orders on a fine grid would take much memory.
    for order, divergence in zip(_SOME_ORDERS, divergences.tolist(), strict=True):
        logs = np.minimum(logs, (order - 1) * (divergence - epsilons + math.log1p(-1 / order)) - math.log(order))
    # A delta too small for a float must not become 0.
    return np.exp(np.minimum(logs, 0.0)) * (1 + _CLOSED_FORM_ERROR[0]) + np.finfo(np.float64).tiny


@contextmanager
def _quiet() -> Iterator[None]:
    # dp-accounting warns about every fractional order that it leaves out, which only raises epsilon.
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
