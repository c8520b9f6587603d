"""What one job computes: a trained model and the attacks on it, or shared updates and the attack on them."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch

from ..plan.expand import Cell
from ..subjects.outcome import Outcome
from ..subjects.shared_update import SharedUpdates
from ..subjects.trained_model import TrainedModel


def compute(cells: tuple[Cell, ...], device: torch.device) -> Iterator[tuple[Cell, Outcome]]:
    """Computes cells that share a training, or a single shared update, one after another.

    Args:
        cells: of one job.
        device: where.

    Yields:
        Each cell with its outcome; an exception in one is its error and the next goes on.
    """
    shared = cells[0].kind == "reconstruction"
    subject = SharedUpdates(cells[0], device) if shared else TrainedModel(cells, device)
    for cell in cells:
        start = time.perf_counter()
        try:
            outcome = subject.outcome(cell)
        except Exception as error:  # whatever a method raises is the result of its cell, not the end of the run
            outcome = Outcome(error=_sentence(error))
        outcome.seconds = time.perf_counter() - start
        yield cell, outcome


def _sentence(error: Exception) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    words = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {words} ({Path(place.filename).name}, line {place.lineno}, in {place.name})"
