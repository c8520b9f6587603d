"""Registry of subjects by name, and their protocol: a new subject is a file in this folder and an entry here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from ..plan.artifact import Artifacts
from ..plan.cells import Cell
from .checkpoint import AttackedCheckpoint
from .federation import FederatedModel
from .outcome import Outcome
from .shared_update import SharedUpdates
from .trained_model import TrainedModel


class Subject(Protocol):
    """The object that the cells of a job attack; work that they share, such as training, is done at the first cell."""

    def outcome(self, cell: Cell) -> Outcome:
        """Computes a cell.

        Args:
            cell: a cell of the subject's job.
        """
        ...


# Artifacts are for subjects that depend on other trainings, such as a bank of shadow models; shared updates do not.
SUBJECTS: dict[str, Callable[[tuple[Cell, ...], torch.device, Artifacts], Subject]] = {
    "trained_model": lambda cells, device, artifacts: TrainedModel(cells, device, artifacts),
    "federation": lambda cells, device, artifacts: FederatedModel(cells, device, artifacts),
    "checkpoint": lambda cells, device, artifacts: AttackedCheckpoint(cells, device),
    "shared_update": lambda cells, device, artifacts: SharedUpdates(cells, device),
}
"""Name -> factory of a subject, from the cells of a job, the device, and the artifacts that its cells depend on."""
