"""Computation of one job: its subject, made once, and the outcome of each of its cells."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from leakbench.attacks.core import InconsistentObservation, NotApplicable
from leakbench.leaderboard.records.record import DOES_NOT_APPLY

from ..catalog import methods as catalog
from ..catalog import plugins
from ..catalog.messages import in_one_line
from ..isolation.worker import BesideTheData, frames_of
from ..plan.artifact import Artifacts
from ..plan.cells import Cell
from ..plan.request import Request
from ..subjects.outcome import Outcome
from ..subjects.table import SUBJECTS, Subject

BESIDE = "ran_beside_the_data"
"""Flag of a cell whose attack is none of ours, and could not be given a process of its own."""


def compute(
    cells: tuple[Cell, ...], device: torch.device, read: Callable[[], Artifacts] = dict
) -> Iterator[tuple[Cell, Outcome]]:
    """Computes cells that share a subject, one after another.

    Args:
        cells: of one job.
        device: where.
        read: gives the results that the cells waited for.

    Yields:
        Each cell with its outcome; an exception in one is its error and the next goes on.
    """
    subject: Subject | None = None
    for cell in cells:
        start, beside = time.perf_counter(), BesideTheData.times
        try:
            # Within the try, and again for each cell: a subject that cannot be made is the error of all of them.
            if subject is None:
                subject = SUBJECTS[cell.subject](cells, device, read())
            outcome = subject.outcome(cell)
        # Whatever a method raises is the result of its cell; `sys.exit` would end the run without a word.
        except (Exception, SystemExit) as error:
            refused = _refusal(error, cell.request)
            outcome = Outcome(skipped=refused) if refused else Outcome(error=_sentence(error, cell.request))
        if BesideTheData.times > beside:
            outcome.flags.append(BESIDE)
        outcome.seconds = time.perf_counter() - start
        yield cell, outcome


def _refusal(error: BaseException, request: Request) -> str:
    """The attack's own word that this architecture or release is not for it, which is no failure; empty for a failure.

    An update that no data give is one where it has noise, which a closed form without knowledge of it cannot tell; any
    other such update is a mistake of ours or of the attack.
    """
    noisy = request.release_noise == "calibrated"
    told = isinstance(error, NotApplicable) or (noisy and isinstance(error, InconsistentObservation))
    if request.attack is None or not told:
        return ""
    return f"{request.attack.name} {DOES_NOT_APPLY}{' '.join(str(error).split())}"


def _sentence(error: BaseException, request: Request) -> str:
    """Exception and place in one sentence; the place is in a third party's method where the traceback passes one.

    Whoever wrote that method knows its lines, and not those of this library that it called.
    """
    words = in_one_line(error)
    frames = frames_of(error)
    methods = [m for m in (request.attack, request.defense) if m is not None and catalog.foreign(m.kind, m.name)]
    for method in methods:
        sources = plugins.source_files(method.name) if plugins.is_path(method.name) else []
        files = {str(file.resolve()) for file in sources}
        # The last of its own frames: the line that called into the library, or raised by itself.
        if own := [frame for frame in frames if str(Path(frame.filename).resolve()) in files]:
            written = Path(method.name.rpartition(":")[0])  # as the user named it
            file = written.with_name(Path(own[-1].filename).name)
            return f"{words} ({file}, line {own[-1].lineno}, in {own[-1].name})"
    place = f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}, in {frames[-1].name}"
    asked = "".join(f"; {catalog.KINDS[m.kind]} {catalog.origin(m.kind, m.name)}" for m in methods)
    return f"{words} ({place}{asked})"
