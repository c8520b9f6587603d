"""Run of a benchmark ("part"): settings shared by all benchmarks, its comparisons and targets, and its document."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypedDict

import pandas as pd

from . import report
from .harness import SpeedComparison, clock_of, compare, interleaved
from .memory import Probe
from .targets import SpeedTarget

ROUNDS = (
    "All ways run in turn, round by round, in one process; ratios are medians of the ratios within a round, with their "
    "first and last decile."
)
"""Sentence on timing and comparison, for the method of a document."""


class Options(TypedDict, total=False):
    """Settings shared by all benchmarks; a benchmark has its own value for an absent setting or None.

    Attributes:
        device: "cpu" or "cuda"; "cpu" if absent.
        quick: small cases and few rounds, as a smoke test; False if absent.
        rounds: largest number of rounds of a comparison.
        budget: seconds for the rounds of a comparison.
        memory: whether peak memory is measured, in a process for each way.
        say: receives progress messages.
    """

    device: str
    quick: bool
    rounds: int | None
    budget: float | None
    memory: bool | None
    say: Callable[[str], None]


class SpeedPart:
    """Run of a benchmark, which collects comparisons and targets for its document.

    Attributes:
        device: "cpu" or "cuda".
        quick: whether cases are small and rounds few.
        rounds: largest number of rounds of a comparison.
        budget: seconds for the rounds of a comparison.
        memory: whether peak memory is measured.
        comparisons: in the order in which they were made.
        targets: judged when the document is made.
    """

    def __init__(
        self,
        module: str,
        options: Options,
        *,
        rounds: int = 15,
        quick_rounds: int = 3,
        budget: float = 90.0,
        memory: bool | None = None,
    ) -> None:
        """Takes the module with the part's `build`, the options of this run, and values for absent options.

        Args:
            module: full name, of which the last component names the part.
            options: of this run.
            rounds: number of rounds.
            quick_rounds: number of rounds if quick.
            budget: seconds for the rounds of a comparison.
            memory: whether peak memory is measured; unless quick where None.

        Raises:
            ValueError: fewer rounds than one.
        """
        self.module, self.name = module, module.rpartition(".")[2]
        self.device, self.quick = options.get("device", "cpu"), options.get("quick", False)
        chosen_rounds = options.get("rounds")
        self.rounds = (quick_rounds if self.quick else rounds) if chosen_rounds is None else chosen_rounds
        if self.rounds < 1:
            raise ValueError(f"rounds must be at least 1, got {self.rounds}; leave it out for {rounds}")
        seconds, measured = options.get("budget"), options.get("memory")
        self.budget = budget if seconds is None else seconds
        self.memory = measured if measured is not None else not self.quick if memory is None else memory
        self._say = options.get("say", lambda _line: None)
        self.comparisons: list[SpeedComparison] = []
        self.targets: list[SpeedTarget] = []
        self._environment = report.environment(self.device)  # read first: later the load includes this benchmark

    def say(self, line: str) -> None:
        """Sends a progress message."""
        self._say(f"{self.name}: {line}")

    def compare(
        self,
        name: str,
        ways: Iterable[str],
        arguments: Mapping[str, Any],
        *,
        peer: str,
        about: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> SpeedComparison:
        """Compares ways of doing the same work, and keeps the comparison.

        Args:
            name: of the work.
            ways: each built by the module's `build`.
            arguments: of `build`, besides `way` and `device`.
            peer: way with which others are compared.
            about: sizes, for the record; the arguments where None.
            settings: of `harness.compare`, instead of those of this run.
        """
        probes = {way: Probe(f"{self.module}:build", {**arguments, "way": way, "device": self.device}) for way in ways}
        usual = {"rounds": self.rounds, "budget": self.budget, "memory": self.memory}
        about = arguments if about is None else about
        compared = compare(name, probes, peer=peer, about=about, device=self.device, **(usual | settings))
        self.comparisons.append(compared)
        return compared

    def case(
        self, ways: Mapping[str, Callable[[], Any]], *, baseline: str, checks: Mapping[str, Any], **about: Any
    ) -> dict[str, Any]:
        """Times ways that share large operands, each called once before the rounds.

        Args:
            ways: name -> callable.
            baseline: way to whose time in the same round the others' are divided.
            checks: agreement of the ways, for the record.
            about: name and sizes of the case, for the record.

        Returns:
            Plain data. `ratio` is the median over rounds of a way's time over the baseline's: below 1 is faster. A way
            that failed has a `reason` instead of figures.

        Raises:
            ValueError: the baseline failed.
        """
        builders = {way: lambda call=call: call for way, call in ways.items()}
        rounds = interleaved(builders, rounds=self.rounds, budget=self.budget, warmup=1, clock=clock_of(self.device))
        if baseline not in rounds.seconds:
            missing = rounds.failed.get(baseline, "no such way")
            raise ValueError(f"baseline {baseline!r} must run, because other ways are compared with it, got {missing}")
        seconds = pd.DataFrame(rounds.seconds)
        ratios = seconds.div(seconds[baseline], axis=0)
        figures = {
            "median_s": seconds.median(), "min_s": seconds.min(), "rounds": seconds.count(), "ratio": ratios.median()
        }  # fmt: skip
        measured = pd.DataFrame(figures).to_dict("index")
        failed = dict.fromkeys(figures) | {"rounds": 0}
        ways_of_case = {way: {**measured.get(way, failed), "reason": rounds.failed.get(way)} for way in ways}
        return {**about, "ways": ways_of_case, "baseline": baseline, "checks": dict(checks)}

    def document(
        self, *, title: str, method: str = "", settings: Mapping[str, Any] | None = None, **content: Any
    ) -> dict[str, Any]:
        """Returns the document, as plain data for `report`.

        Args:
            title: above its tables.
            method: of the measurements, in words.
            settings: further settings of the part.
            content: its other keys.
        """
        shared = {"rounds": self.rounds, "budget_seconds": self.budget, "quick": self.quick, "memory": self.memory}
        return {
            "benchmark": self.name,
            "title": title,
            "method": method,
            "environment": self._environment,
            "settings": {**shared, **(settings or {})},
            "comparisons": [report.as_dict(comparison) for comparison in self.comparisons],
            "targets": [target.judge(self.comparisons) for target in self.targets],
            **content,
        }


def check_choices(argument: str, chosen: Sequence[str], known: Sequence[str]) -> None:
    """Raises `ValueError` if a choice is not known."""
    for name in chosen:
        if name not in known:
            raise ValueError(f"{argument} must be one of {', '.join(known)}, got '{name}'")
