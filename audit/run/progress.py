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
"""(pieces done, pieces in all, what just happened); pieces are cells, and the shadow models that they wait for."""

QUIET = 30.0
"""Seconds without a line, after which what is being done is told off a terminal, too."""


@dataclass
class Told:
    """Progress of one run: pieces that are done, and meanwhile what is being done.

    Attributes:
        report: shows it.
        total: pieces in all.
        finished: pieces done.
    """

    report: Report
    total: int
    finished: int = 0

    def now(self, what: str) -> None:
        """Says what just happened."""
        self.report(self.finished, self.total, what)

    def doing(self, what: str) -> None:
        """Says which step a piece has reached."""
        self.report(self.finished, self.total, f"{STEPPING}{what}")


STEPPING = "… "
"""Begins what is being done, in place of what just happened."""


@contextmanager
def show(*, quiet: bool = False) -> Iterator[Report]:
    """Yields the function that a run reports its progress to.

    Args:
        quiet: report nothing.
    """
    console = Console(stderr=True)
    if quiet:
        yield lambda done, total, what: None
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
            yield lambda done, total, what: bar.update(task, completed=done, total=total, description=what)
    else:
        start = last = time.monotonic()

        def line(done: int, total: int, what: str) -> None:
            nonlocal last
            if what.startswith(STEPPING) and time.monotonic() - last < QUIET:
                return
            last = time.monotonic()
            spent = last - start
            # As if all pieces took equally long, those of former runs included: a rough guide. The first twentieth
            # waits for imports and for kernels to be compiled, and would promise hours.
            left = f", about {spent / done * (total - done):.0f} s left" if total <= 20 * done < 20 * total else ""
            print(f"[{done}/{total}] {spent:.0f} s{left}: {what}", file=sys.stderr, flush=True)

        yield line
