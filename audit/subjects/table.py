"""Table of subjects, by name, and their protocol: another subject is a file beside this one and a row here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from ..plan.artifact import Artifacts
from ..plan.cells import Cell
from .outcome import Outcome
from .shared_update import SharedUpdates
from .trained_model import TrainedModel


class Subject(Protocol):
    """What the cells of one job attack. What they share, as a training, is computed when the first of them asks."""

    def outcome(self, cell: Cell) -> Outcome:
        """Computes one cell.

        Args:
            cell: one of those that the subject was made for.
        """
        ...


# Artifacts are for subjects that wait for other trainings, as a bank of shadow models; shared updates wait for none.
SUBJECTS: dict[str, Callable[[tuple[Cell, ...], torch.device, Artifacts], Subject]] = {
    "trained_model": lambda cells, device, artifacts: TrainedModel(cells, device, artifacts),
    "shared_update": lambda cells, device, artifacts: SharedUpdates(cells, device),
}
"""Name -> what makes one from the cells of a job, the device to compute on, and what its cells waited for."""
