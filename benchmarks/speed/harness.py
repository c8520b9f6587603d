"""Comparison of the speed of several ways of doing one thing, in one process, in turn, round by round.

The speed of a machine drifts from minute to minute by more than the differences that are to be measured. So each way
runs once in every round, in an order that rotates, and two ways are compared by the median of their ratios within a
round, in which drift cancels. A way that fails has no number but a reason, in one sentence.
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
import torch

from .memory import Memory, Probe, measured

TimedCall = Callable[[], object]

# The budget never cuts a comparison below this many rounds: a median of fewer is no median.
FEWEST_ROUNDS = 3


@dataclass(frozen=True)
class Ratio:
    """A ratio of two times: the median over the rounds, and where 8 rounds in 10 lie.

    Attributes:
        median: of the ratios within a round.
        low: their first decile.
        high: their last decile.
        n: number of rounds.
    """

    median: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
        """The ratio of times that were taken in pairs, one pair a round."""
        # Within a round, in which the machine's drift is the same for both.
        ratios = [a / b for a, b in zip(numerators, denominators, strict=True)]
        low, high = np.quantile(ratios, (0.1, 0.9))
        return cls(statistics.median(ratios), float(low), float(high), len(ratios))


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """Times, notes and failures of several ways, by name.

    Attributes:
        seconds: way -> its time in each round.
        notes: way -> what it says of itself in its attribute `note`, where it has one.
        failed: way -> why it has no times.
    """

    seconds: dict[str, tuple[float, ...]] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def _check(rounds: int, budget: float) -> None:
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    if not budget > 0:
        raise ValueError(f"budget must be a positive number of seconds, got {budget}")


def interleaved(
    ways: Mapping[str, Callable[[], TimedCall]],
    *,
    rounds: int,
    budget: float = math.inf,
    warmup: int = 2,
    least: float = 0.0,
    clock: Callable[[], float] = time.perf_counter,
    synchronize: Callable[[], object] = lambda: None,
) -> Rounds:
    """Builds and warms up each way, then runs one of each per round.

    Args:
        ways: name -> what builds the callable that is timed; building is not timed.
        rounds: at most so many.
        budget: seconds after which no further round begins, once there are three.
        warmup: calls of each way before the first round.
        least: seconds for which a way is called again in each round, whose time is then the mean. A run takes its steps
            one after another; a short one by itself finds in the caches what another way has left there.
        clock: says the time in seconds.
        synchronize: waits until the device has done what was asked of it.

    Raises:
        ValueError: for a number of rounds below 1 or a budget that is not positive.
    """
    _check(rounds, budget)
    steps: dict[str, TimedCall] = {}
    failed: dict[str, str] = {}

    def attempt(name: str, act: Callable[[], object]) -> bool:
        try:
            act()
        except Exception as error:  # whatever a tool raises on a model that it does not know
            failed[name] = reason(error)
            steps.pop(name, None)
            gc.collect()  # what failed may have been large
        return name not in failed

    def warmed(name: str) -> None:
        steps[name] = ways[name]()
        # First calls fill caches, choose algorithms and, on a GPU, load kernels.
        for _ in range(warmup):
            steps[name]()

    for name in ways:
        attempt(name, partial(warmed, name))
    times: dict[str, list[float]] = {name: [] for name in steps}

    def timed(name: str) -> None:
        synchronize()
        # After waiting: what another way left on the device would be counted here.
        start, calls = clock(), 0
        while not calls or clock() - start < least:
            steps[name]()
            calls += 1
        synchronize()
        times[name].append((clock() - start) / calls)

    begun = clock()
    for number in range(rounds):
        if number >= FEWEST_ROUNDS and clock() - begun > budget:
            break
        for name in _rotated(list(steps), number):
            attempt(name, partial(timed, name))
    return Rounds(seconds={name: tuple(times[name]) for name in steps}, notes=_notes(steps), failed=failed)


def _rotated(names: list[str], number: int) -> list[str]:
    """The order of a round: the first way of one finds the caches that the last one of the round before left."""
    turn = number % max(1, len(names))
    return names[turn:] + names[:turn]


def _notes(steps: Mapping[str, TimedCall]) -> dict[str, str]:
    """What the ways say of themselves, as the engine that was chosen."""
    return {name: note for name, step in steps.items() if (note := getattr(step, "note", ""))}


def reason(error: Exception) -> str:
    """The first line of an error, with its kind where that is not a plain refusal."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return line if isinstance(error, (ValueError, ImportError)) else f"{type(error).__name__}: {line}"


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Time and memory of one way.

    Attributes:
        way: its name.
        seconds: its time in each round; empty where it failed.
        reason: why there are no times.
        note: what it says of itself.
        memory: what it needs beyond what was there before its first step; None where that is not known.
        memory_reason: why it is not.
    """

    way: str
    seconds: tuple[float, ...] = ()
    reason: str = ""
    note: str = ""
    memory: Memory | None = None
    memory_reason: str = ""


@dataclass(frozen=True, kw_only=True)
class SpeedComparison:
    """Time and memory of all ways of doing one thing.

    Attributes:
        name: of the thing.
        about: its sizes.
        measurements: way by way.
        peer: the way that all are measured against: how many times as fast?
        floor: the way whose cost is the least to be expected; None where there is none.
    """

    name: str
    about: dict[str, Any]
    measurements: tuple[Measurement, ...]
    peer: str
    floor: str | None = None

    def measurement(self, way: str) -> Measurement:
        """The measurement of a way; an empty one that says so where the way was not run."""
        missing = f"'{way}' was not run"
        found = {measurement.way: measurement for measurement in self.measurements}
        return found.get(way, Measurement(way=way, reason=missing, memory_reason=missing))

    def time_ratio(self, numerator: str, denominator: str) -> Ratio | str:
        """Time of one way over that of another, or why there is none."""
        pair = self.measurement(numerator), self.measurement(denominator)
        missing = [f"{measurement.way}: {measurement.reason}" for measurement in pair if not measurement.seconds]
        return missing[0] if missing else Ratio.of(pair[0].seconds, pair[1].seconds)

    def memory_ratio(self, numerator: str, denominator: str) -> float | str:
        """Peak extra memory of one way over that of another, or why there is none."""
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
    """Times all ways of doing one thing, and measures their memory.

    Args:
        name: of the thing.
        probes: way -> how to build it.
        peer: the way that others are compared with.
        floor: the way whose cost is the least to be expected.
        about: sizes, for the record.
        device: "cpu" or "cuda".
        rounds: at most so many.
        budget: seconds for the rounds.
        memory: whether to start a fresh process for each way and look at its memory.
        memory_calls: of each way in its process; 1 where a single one takes long and leaves nothing behind.
        warmup: calls of each way before the first round.
        least: seconds for which a way is called again in each round; see `interleaved`.
    """
    wait = torch.cuda.synchronize if device.startswith("cuda") else _nothing
    builders = {way: probe.build for way, probe in probes.items()}
    found = interleaved(builders, rounds=rounds, budget=budget, warmup=warmup, least=least, synchronize=wait)
    gc.collect()  # models and their hooks point at one another, and the fresh processes need the room
    measurements = []
    for way, probe in probes.items():
        failure = found.failed.get(way, "")
        space = (
            (failure or "not asked for")
            if failure or not memory
            else measured(probe, device=device, calls=memory_calls)
        )
        measurements.append(
            Measurement(
                way=way,
                seconds=found.seconds.get(way, ()),
                reason=failure,
                note=found.notes.get(way, ""),
                memory=None if isinstance(space, str) else space,
                memory_reason=space if isinstance(space, str) else "",
            )
        )
    return SpeedComparison(name=name, about=dict(about or {}), measurements=tuple(measurements), peer=peer, floor=floor)


def _nothing() -> None:
    """Waits for nothing: on a CPU the work is done when a call returns."""
