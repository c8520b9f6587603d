"""What an exception makes of a cell: a refusal, or a failure."""

import torch

from leakbench.attacks.core import InconsistentObservation, NotApplicable, RankDeficient
from leakbench.audit.plan.cells import Cell
from leakbench.audit.plan.expand import plan
from leakbench.audit.run import job
from leakbench.audit.subjects.outcome import Outcome
from leakbench.audit.suite.suite import load

from ...parameters import subtests

CELLS = plan(load("quick")).cells


def of(kind: str, noise: str | None) -> Cell:
    return next(c for c in CELLS if c.request.kind == kind and c.request.release_noise == noise)


@subtests(
    ("error", "kind", "noise", "refused"),
    [
        (NotApplicable("two\nparts"), "reconstruction", "none", True),
        (RankDeficient("two\nparts", deficit=3), "reconstruction", "calibrated", True),
        (InconsistentObservation("two\nparts"), "reconstruction", "calibrated", True),
        # Without noise every update is one that some data give.
        (InconsistentObservation("two\nparts"), "reconstruction", "none", False),
        (ValueError("two\nparts"), "reconstruction", "calibrated", False),
        # No attack is asked: whoever raises it is a defense of somebody's own.
        (NotApplicable("two\nparts"), "utility", None, False),
    ],
)
def test_an_attacks_own_refusal_is_no_failure_and_anything_else_is(monkeypatch, error, kind, noise, refused):
    class Raising:
        def __init__(self, cells: tuple[Cell, ...], device: torch.device, read: object) -> None: ...

        def outcome(self, cell: Cell) -> Outcome:
            raise error

    cell = of(kind, noise)
    monkeypatch.setattr(job, "SUBJECTS", {cell.subject: Raising})
    ((_, outcome),) = job.compute((cell,), torch.device("cpu"))
    if refused:
        assert cell.request.attack is not None
        assert outcome.skipped == f"{cell.request.attack.name} does not apply: two parts" and not outcome.error
    else:
        assert not outcome.skipped and outcome.error.startswith(f"{type(error).__name__}: two parts")
