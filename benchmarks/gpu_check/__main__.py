"""Command line: `python -m leakbench.benchmarks.gpu_check`, from the root of a checkout."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer

from ..speed import report
from ..speed.part import check_choices
from .document import line, table, verdict, write
from .parts import PARTS, CheckPart
from .processes import PartCommand, PartOutcome, command_of, run_part
from .rows import CheckedRow, PartSettings

_MOST_JOBS = 12
# Plain tracebacks, as of the speed benchmarks.
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def gpu_check(
    seconds: Annotated[float, typer.Option(help="Budget of all parts together.")] = 360.0,
    only: Annotated[list[str] | None, typer.Option(metavar="PART", help="Only this part; may be repeated.")] = None,
    out: Annotated[Path, typer.Option(help="Where the results go.")] = Path("results/gpu_check"),
    device: Annotated[str, typer.Option(help="cuda, or cpu.")] = "cuda",
    small: Annotated[bool, typer.Option("--small", help="Small sizes: shows that all parts work.")] = False,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes of tests and suites; 12 at most.")] = None,
) -> None:
    """Checks numbers, then measures times and memory; exit 1 for a wrong number, never for a slow one."""
    if device not in ("cpu", "cuda"):
        raise typer.BadParameter(f"device must be cpu or cuda, got '{device}'")
    if device == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("device must be cpu where torch finds no CUDA device, got 'cuda'")
    if not seconds > 0:
        raise typer.BadParameter(f"seconds must be a positive number, got {seconds}")
    try:
        check_choices("only", only or (), [part.name for part in PARTS])
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    # SIGTERM ends the part's processes as Ctrl-C does, and what was measured has been written.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    settings = PartSettings(
        device=device,
        small=small,
        seconds=seconds,
        jobs=jobs or min(_MOST_JOBS, os.cpu_count() or 1),
        folder=out.resolve(),
    )
    outcomes = check([part for part in PARTS if not only or part.name in only], settings)
    raise typer.Exit(1 if any(outcome.wrong for outcome in outcomes) else 0)


def check(
    parts: Sequence[CheckPart], settings: PartSettings, *, command: PartCommand = command_of
) -> list[PartOutcome]:
    """Runs parts within a budget, prints and writes their rows as they come, and returns their outcomes.

    Each part has its share of the seconds that are left, so that the unused ones of a part are those of later parts.

    Args:
        parts: in the order in which they run.
        settings: with the budget of all parts, and the folder of the results.
        command: of a part's process.
    """
    environment = report.environment(settings.device)
    about = {"seconds": settings.seconds, "small": settings.small, "parts": [part.name for part in parts]}
    end, outcomes = time.monotonic() + settings.seconds, []
    for number, part in enumerate(parts):
        budget = max(0.0, end - time.monotonic()) * part.seconds / sum(later.seconds for later in parts[number:])
        _say(f"{part.name}: {part.about.lower()}, at most {budget:.0f} s")

        def keep(outcome: PartOutcome, row: CheckedRow) -> None:
            _say(line(row))
            write([*outcomes, outcome], environment, about, settings.folder)

        own = PartSettings(
            device=settings.device,
            small=settings.small,
            seconds=budget,
            jobs=settings.jobs,
            folder=settings.folder / "parts",
        )
        outcomes.append(run_part(part, own, keep, command=command))
        _say(f"{part.name}: {outcomes[-1].status} in {outcomes[-1].seconds:.0f} s {outcomes[-1].reason}".rstrip())
        write(outcomes, environment, about, settings.folder)
    for outcome in outcomes:
        print(table(outcome).markdown())
    for sentence in (sentence for outcome in outcomes for sentence in outcome.wrong):
        print(f"WRONG: {sentence}")
    print(f"{verdict(outcomes)}; written to {settings.folder}")
    return outcomes


def _say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


if __name__ == "__main__":
    app(prog_name="python -m leakbench.benchmarks.gpu_check")
