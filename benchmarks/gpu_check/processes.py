"""A part in a process of its own, whose rows are read as it prints them, and which is ended at its budget."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Literal

from .parts import CheckPart
from .rows import CheckedRow, PartSettings

ROOT = Path(__file__).resolve().parents[2]
PartStatus = Literal["done", "over its budget", "died", "not measured"]


@dataclass(kw_only=True)
class PartOutcome:
    """Rows of a part, and how it ended.

    Attributes:
        name: of the part.
        about: heading of its table.
        status: how it ended.
        reason: why it was not measured, or how it died.
        seconds: that it took.
        rows: in the order of the part.
    """

    name: str
    about: str
    status: PartStatus = "done"
    reason: str = ""
    seconds: float = 0.0
    rows: list[CheckedRow] = field(default_factory=list)

    @property
    def wrong(self) -> list[str]:
        """Sentences on wrong numbers; a part that died is one, a part over its budget is not."""
        sentences = [f"{self.name}, {row.name}: {sentence}" for row in self.rows for sentence in row.wrong]
        return sentences + [f"{self.name}: died, {self.reason}"] * (self.status == "died")


PartCommand = Callable[[CheckPart, PartSettings], Sequence[str]]
"""The command of a part's process."""


def command_of(part: CheckPart, settings: PartSettings) -> list[str]:
    """Returns the command of a part's process."""
    return [sys.executable, "-m", f"{__package__}.parts", part.name, settings.to_json()]


def run_part(
    part: CheckPart,
    settings: PartSettings,
    on_row: Callable[[PartOutcome, CheckedRow], None],
    *,
    command: PartCommand = command_of,
) -> PartOutcome:
    """Runs a part within its budget.

    Args:
        part: the part.
        settings: with its budget; what its process writes to standard error goes to a file in the folder.
        on_row: called with the outcome so far and a new row.
        command: of the part's process.
    """
    outcome, begun = PartOutcome(name=part.name, about=part.about), time.monotonic()
    settings.folder.mkdir(parents=True, exist_ok=True)
    log = settings.folder / f"{part.name}.log"
    with log.open("w", encoding="utf-8") as complaints:
        process = subprocess.Popen(  # noqa: S603  this interpreter and our own module
            list(command(part, settings)),
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(_paths()), "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=complaints,
            text=True,
            start_new_session=True,  # so that its own processes end with it
        )
        lines: queue.Queue[str | None] = queue.Queue()
        reader = threading.Thread(target=_forward, args=(process.stdout, lines), daemon=True)
        reader.start()
        try:
            _read(process, lines, outcome, begun + settings.seconds, on_row)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
            reader.join()
    outcome.seconds = time.monotonic() - begun
    if outcome.status == "done" and code:
        written = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        ended = f"ended by signal {-code}" if code < 0 else f"exit code {code}"
        outcome.status, outcome.reason = "died", f"{ended}: {written[-1].strip()}" if written else ended
    return outcome


def _paths() -> list[str]:
    """Returns the import path: a checkout that is not installed is found by its path."""
    return [path for path in (str(ROOT), os.environ.get("PYTHONPATH", "")) if path]


def _read(
    process: subprocess.Popen[str],
    lines: queue.Queue[str | None],
    outcome: PartOutcome,
    end: float,
    on_row: Callable[[PartOutcome, CheckedRow], None],
) -> None:
    """Reads rows until the process has ended or its budget has."""
    while True:
        try:
            line = lines.get(timeout=max(0.0, end - time.monotonic()))
        except queue.Empty:
            outcome.status = "over its budget"
            return
        if line is None:
            # The pipe closes with the last process that holds it; the part's own may take a moment longer.
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(1.0, end - time.monotonic()))
            return
        if row := CheckedRow.from_line(line):
            outcome.rows.append(row)
            on_row(outcome, row)
        elif reason := _missing(line):
            outcome.status, outcome.reason = "not measured", reason


def _forward(stream: IO[str] | None, lines: queue.Queue[str | None]) -> None:
    with stream or nullcontext(()) as printed:
        for line in printed:
            lines.put(line)
    lines.put(None)


def _missing(line: str) -> str:
    with suppress(ValueError, KeyError, TypeError):
        return str(json.loads(line)["missing"])
    return ""
