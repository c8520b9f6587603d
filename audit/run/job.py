"""Computation of a job: its subject, constructed once, and the outcome of each of its cells."""

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
"""Flag of a third-party attack that could not be given a separate process."""


def compute(
    cells: tuple[Cell, ...], device: torch.device, read: Callable[[], Artifacts] = dict
) -> Iterator[tuple[Cell, Outcome]]:
    """Computes cells that share a subject, sequentially.

    Args:
        cells: of a job.
        device: device of the computation.
        read: returns the artifacts that the cells depend on.

    Yields:
        Each cell with its outcome; an exception in a cell is recorded as its error, and the next cell follows.
    """
    subject: Subject | None = None
    for cell in cells:
        start, beside = time.perf_counter(), BesideTheData.times
        try:
            # Within the try, and again for each cell: failure to construct the subject is the error of all cells.
            if subject is None:
                subject = SUBJECTS[cell.subject](cells, device, read())
            outcome = subject.outcome(cell)
        # Any exception of a method is the result of its cell; `sys.exit` would end the run silently.
        except (Exception, SystemExit) as error:
            refused = _refusal(error, cell.request)
            outcome = Outcome(skipped=refused) if refused else Outcome(error=_sentence(error, cell.request))
        if BesideTheData.times > beside:
            outcome.flags.append(BESIDE)
        outcome.seconds = time.perf_counter() - start
        yield cell, outcome


def _refusal(error: BaseException, request: Request) -> str:
    """Returns the attack's statement that this architecture or release is unsupported; empty for a failure.

    An update consistent with no data can arise from noise, which a closed form without knowledge of the noise cannot
    detect; any other such update is an error of this library or of the attack.
    """
    noisy = request.release_noise == "calibrated"
    refused = isinstance(error, NotApplicable) or (noisy and isinstance(error, InconsistentObservation))
    if request.attack is None or not refused:
        return ""
    return f"{request.attack.name} {DOES_NOT_APPLY}{' '.join(str(error).split())}"


def _sentence(error: BaseException, request: Request) -> str:
    """Returns exception and location in one sentence; the location is in a third party's method if on the traceback.

    The author of that method knows its lines, not those of this library below them.
    """
    words = in_one_line(error)
    frames = frames_of(error)
    methods = [m for m in (request.attack, request.defense) if m is not None and catalog.foreign(m.kind, m.name)]
    for method in methods:
        sources = plugins.source_files(method.name) if plugins.is_path(method.name) else []
        files = {str(file.resolve()) for file in sources}
        # The last of its own frames: the line that called into the library, or raised the exception.
        if own := [frame for frame in frames if str(Path(frame.filename).resolve()) in files]:
            written = Path(method.name.rpartition(":")[0])  # as spelled by the user
            file = written.with_name(Path(own[-1].filename).name)
            return f"{words} ({file}, line {own[-1].lineno}, in {own[-1].name})"
    place = f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}, in {frames[-1].name}"
    origins = "".join(f"; {catalog.KINDS[m.kind]} {catalog.origin(m.kind, m.name)}" for m in methods)
    return f"{words} ({place}{origins})"
