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
from ..isolation.worker import InProcessRuns, frames_of
from ..plan.artifact import Artifacts
from ..plan.cells import Cell
from ..plan.request import Request
from ..subjects.outcome import Outcome
from ..subjects.table import SUBJECTS, Subject

BESIDE = "ran_beside_the_data"
"""Flag of a cell whose third-party attack ran in the process that holds the private data."""


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
        start, beside = time.perf_counter(), InProcessRuns.times
        try:
            # Within the try, and tried again for each cell: if the subject cannot be constructed, every cell fails.
            if subject is None:
                subject = SUBJECTS[cell.subject](cells, device, read())
            outcome = subject.outcome(cell)
        # An exception of a method, of any class, fails its cell only; `sys.exit` would end the run silently.
        except (Exception, SystemExit) as error:
            refused = _refusal(error, cell.request)
            outcome = Outcome(skipped=refused) if refused else Outcome(error=sentence(error, cell.request))
        if InProcessRuns.times > beside:
            outcome.flags.append(BESIDE)
        outcome.seconds = time.perf_counter() - start
        yield cell, outcome


def _refusal(error: BaseException, request: Request) -> str:
    """Returns the attack's reason why it does not apply to this model or release; empty if it failed instead.

    Noise can make an update inconsistent with any data, which a closed form without knowledge of the noise cannot tell
    from an error. An inconsistent update without noise is an error of this library or of the attack.
    """
    noisy = request.release_noise == "calibrated"
    refused = isinstance(error, NotApplicable) or (noisy and isinstance(error, InconsistentObservation))
    if request.attack is None or not refused:
        return ""
    return f"{request.attack.name} {DOES_NOT_APPLY}{' '.join(str(error).split())}"


def sentence(error: BaseException, request: Request) -> str:
    """Returns exception and location in a sentence.

    If the traceback passes through a third-party method, its line is named, which its author knows, instead of a line
    of this library that it called.

    Args:
        error: raised while the cell was computed.
        request: of the cell.
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
