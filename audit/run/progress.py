"""Progress of a run on stderr: a bar with the time left on a terminal, plain lines elsewhere, nothing when quiet."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

Report = Callable[[int, int, str], None]
"""(units done, total number, latest event); units are cells and the artifacts that they depend on."""

QUIET = 30.0
"""Seconds without a line after which the current step is also reported outside a terminal."""


@dataclass
class RunProgress:
    """Progress of a run: finished units, and the current step.

    Attributes:
        report: displays it.
        total: total number of units.
        finished: units done.
    """

    report: Report
    total: int
    finished: int = 0

    def now(self, activity: str) -> None:
        """Reports the latest event."""
        self.report(self.finished, self.total, activity)

    def doing(self, activity: str) -> None:
        """Reports the current step of a unit."""
        self.report(self.finished, self.total, f"{STEPPING}{activity}")


STEPPING = "… "
"""Prefix of the message about a step in progress, as opposed to a finished unit."""


@contextmanager
def show(*, quiet: bool = False) -> Iterator[Report]:
    """Yields the function that displays a run's progress.

    Args:
        quiet: report nothing.
    """
    console = Console(stderr=True)
    if quiet:
        yield lambda done, total, activity: None
    elif console.is_terminal:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("starting", total=None)
            yield lambda done, total, activity: bar.update(task, completed=done, total=total, description=activity)
    else:
        start = last = time.monotonic()

        def line(done: int, total: int, activity: str) -> None:
            nonlocal last
            if activity.startswith(STEPPING) and time.monotonic() - last < QUIET:
                return
            last = time.monotonic()
            spent = last - start
            # A rough estimate, which assumes that all units take equally long, those of earlier runs included. None is
            # given for the first twentieth, which imports and the compilation of kernels prolong.
            remaining = f", about {spent / done * (total - done):.0f} s left" if total <= 20 * done < 20 * total else ""
            print(f"[{done}/{total}] {spent:.0f} s{remaining}: {activity}", file=sys.stderr, flush=True)

        yield line
