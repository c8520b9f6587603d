"""Interleaved timing of several implementations ("ways") of the same work, in one process.

The speed of a machine drifts from minute to minute by more than the differences of interest. So each way runs in every
round, in a rotating order, and two ways are compared by the median over rounds of the ratio of their times, in which
drift cancels. A way that fails has a reason instead of times.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from torch.utils.benchmark import timer

from .memory import Memory, Probe, measured

TimedCall = Callable[[], object]

# Least number of rounds, whatever the budget, so that medians remain meaningful.
FEWEST_ROUNDS = 3


@dataclass(frozen=True)
class Ratio:
    """Ratio of two times: the median over the rounds, and the range of 8 rounds in 10.

    Attributes:
        median: of the ratios within a round.
        low: their first decile; None for a single round, which has no range.
        high: their last decile; None as well.
        n: number of rounds.
    """

    median: float
    low: float | None
    high: float | None
    n: int

    @classmethod
    def of(cls, numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
        """Ratio of times taken in pairs, one pair per round."""
        # Within a round, the machine's drift is the same for both.
        ratios = [a / b for a, b in zip(numerators, denominators, strict=True)]
        low, high = np.quantile(ratios, (0.1, 0.9)).tolist() if len(ratios) > 1 else (None, None)
        return cls(statistics.median(ratios), low, high, len(ratios))


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """Times, notes and failures of several ways, by name.

    Attributes:
        seconds: way -> its time in each round.
        notes: way -> its attribute `note`, if it has one.
        failed: way -> reason why it has no times.
    """

    seconds: dict[str, tuple[float, ...]] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def interleaved(
    ways: Mapping[str, Callable[[], TimedCall]],
    *,
    rounds: int,
    budget: float = math.inf,
    warmup: int = 2,
    least: float = 0.0,
    clock: Callable[[], float] = time.perf_counter,
    wall_clock: Callable[[], float] = time.perf_counter,
) -> Rounds:
    """Builds and warms up each way, then runs all of them in turn in each round.

    Args:
        ways: name -> function that builds the callable to be timed; building is not timed.
        rounds: largest number of rounds.
        budget: seconds after which no further round begins, once there are three.
        warmup: calls of each way before the first round.
        least: seconds for which a way is called repeatedly in each round; its time is then the mean. A single short
            step would find the caches as another way left them, unlike the consecutive steps of a training.
        clock: seconds, at which all work on the device has ended; see `clock_of`.
        wall_clock: seconds, without waiting for the device; for `least` and the budget.

    Raises:
        ValueError: `rounds` is below 1, or `budget` is not positive.
    """
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    if not budget > 0:
        raise ValueError(f"budget must be a positive number of seconds, got {budget}")
    steps: dict[str, TimedCall] = {}
    failed: dict[str, str] = {}

    def attempt(name: str, act: Callable[[], object]) -> None:
        try:
            act()
        except Exception as error:  # a tool may raise anything on unknown models
            failed[name] = reason(error)
            steps.pop(name, None)
            gc.collect()  # the failed objects may have been large

    def warmed(name: str) -> None:
        steps[name] = ways[name]()
        # First calls fill caches, choose algorithms and, on a GPU, load kernels.
        for _ in range(warmup):
            steps[name]()

    for name in ways:
        attempt(name, partial(warmed, name))
    times: dict[str, list[float]] = {name: [] for name in steps}

    def timed(name: str) -> None:
        start, enough, calls = clock(), wall_clock() + least, 0
        while not calls or wall_clock() < enough:
            steps[name]()
            calls += 1
        times[name].append((clock() - start) / calls)

    end = wall_clock() + budget
    for number in range(rounds):
        if number >= FEWEST_ROUNDS and wall_clock() > end:
            break
        # The order rotates, because the first way of a round finds the caches as the previous round left them.
        turn = number % max(1, len(steps))
        for name in [*list(steps)[turn:], *list(steps)[:turn]]:
            attempt(name, partial(timed, name))
    # Notes say, for example, which engine was chosen.
    notes = {name: note for name, step in steps.items() if (note := getattr(step, "note", ""))}
    return Rounds(seconds={name: tuple(times[name]) for name in steps}, notes=notes, failed=failed)


def clock_of(device: str) -> Callable[[], float]:
    """Returns the clock of a device, "cpu" or "cuda": on CUDA that of PyTorch's `Timer`, which waits for the device.

    `Timer.timeit` itself would call a way twice more in every round. On the CPU its clock would wait for whatever
    accelerator the machine has, and fail on one that cannot be waited for.
    """
    return timer if device.startswith("cuda") else time.perf_counter


def reason(error: Exception) -> str:
    """First line of an error, preceded by its type if it is no plain refusal."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return line if isinstance(error, (ValueError, ImportError)) else f"{type(error).__name__}: {line}"


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Time and memory of a way.

    Attributes:
        way: name of the way.
        seconds: its time in each round; empty if it failed.
        reason: why there are no times.
        note: its attribute `note`.
        memory: bytes needed beyond those in use before its first step; None if unknown.
        memory_reason: why it is unknown.
    """

    way: str
    seconds: tuple[float, ...] = ()
    reason: str = ""
    note: str = ""
    memory: Memory | None = None
    memory_reason: str = ""


@dataclass(frozen=True, kw_only=True)
class SpeedComparison:
    """Time and memory of all ways of doing the same work.

    Attributes:
        name: of the work.
        about: its sizes.
        measurements: way by way.
        peer: way relative to which speed-ups are stated.
        floor: way relative to which costs are stated, such as plain SGD; None for none.
    """

    name: str
    about: dict[str, Any]
    measurements: tuple[Measurement, ...]
    peer: str
    floor: str | None = None

    def measurement(self, way: str) -> Measurement:
        """Returns the measurement of a way; an empty measurement with the reason if the way was not run."""
        missing = f"'{way}' was not run"
        by_way = {measurement.way: measurement for measurement in self.measurements}
        return by_way.get(way, Measurement(way=way, reason=missing, memory_reason=missing))

    def time_ratio(self, numerator: str, denominator: str) -> Ratio | str:
        """Ratio of the times of two ways, or the reason why there is none."""
        pair = self.measurement(numerator), self.measurement(denominator)
        missing = [f"{measurement.way}: {measurement.reason}" for measurement in pair if not measurement.seconds]
        return missing[0] if missing else Ratio.of(pair[0].seconds, pair[1].seconds)

    def memory_ratio(self, numerator: str, denominator: str) -> float | str:
        """Ratio of the peak extra memory of two ways, or the reason why there is none."""
        first, second = (self.measurement(way) for way in (numerator, denominator))
        if first.memory is None or second.memory is None:
            lacking = first if first.memory is None else second
            return f"{lacking.way}: {lacking.memory_reason}"
        if second.memory.extra <= 0:
            return f"{second.way}: less memory than can be told"
        return first.memory.extra / second.memory.extra


def compare(
    name: str,
    probes: Mapping[str, Probe],
    *,
    peer: str,
    floor: str | None = None,
    about: Mapping[str, Any] | None = None,
    device: str = "cpu",
    rounds: int,
    budget: float = math.inf,
    memory: bool = False,
    memory_calls: int = 3,
    warmup: int = 2,
    least: float = 0.0,
) -> SpeedComparison:
    """Times all ways of doing the same work, and measures their memory.

    Args:
        name: of the work.
        probes: way -> its probe.
        peer: way with which others are compared.
        floor: way relative to which costs are stated; None for none.
        about: sizes of the work, for the report.
        device: "cpu" or "cuda".
        rounds: largest number of rounds.
        budget: seconds for the rounds.
        memory: whether to measure memory, in a fresh process for each way.
        memory_calls: of each way in its process; 1 if a single call takes long and leaves nothing behind.
        warmup: calls of each way before the first round.
        least: seconds for which a way is called repeatedly in each round; see `interleaved`.
    """
    builders = {way: probe.build for way, probe in probes.items()}
    timings = interleaved(builders, rounds=rounds, budget=budget, warmup=warmup, least=least, clock=clock_of(device))
    gc.collect()  # models and hooks form reference cycles, and the fresh processes need their memory
    measurements = []
    for way, probe in probes.items():
        failure = timings.failed.get(way, "")
        space = failure or (measured(probe, device=device, calls=memory_calls) if memory else "not asked for")
        measurements.append(
            Measurement(
                way=way,
                seconds=timings.seconds.get(way, ()),
                reason=failure,
                note=timings.notes.get(way, ""),
                memory=None if isinstance(space, str) else space,
                memory_reason=space if isinstance(space, str) else "",
            )
        )
    return SpeedComparison(name=name, about=dict(about or {}), measurements=tuple(measurements), peer=peer, floor=floor)
