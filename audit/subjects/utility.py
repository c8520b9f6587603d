"""Utility of a trained model on held-out examples."""

from __future__ import annotations

from ..plan.cells import Cell
from ..scoring.utility import losses, score_utility
from ..targets.observe import logits_of
from .outcome import Finding, column
from .trained_run import TrainedRun


def utility(model: TrainedRun, cell: Cell) -> Finding:
    """Measures the model's utility on held-out examples."""
    test = model.test
    logits = logits_of(model.run.model, test.inputs)
    columns = {
        "id": column(test.ids),
        "label": column(test.labels),
        "loss": column(losses(logits, test.labels)),
        # NaN sorts above every number, so argmax would return a class: -1, an invalid label, counts as wrong.
        "predicted": column(logits.argmax(dim=1).masked_fill(logits.isnan().any(dim=1), -1)),
    }
    return Finding(score_utility(logits, test.labels) | {"successive_cosine": model.cosines.score()}, columns)
