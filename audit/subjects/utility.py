"""Utility of a trained model on held-out examples."""

from __future__ import annotations

from torch import nn

from leakbench.attacks.core import Examples
from leakbench.leaderboard.records.record import Metric

from ..plan.cells import Cell
from ..scoring.utility import losses, score_utility
from ..targets.observe import logits_of
from .outcome import Finding, column
from .trained_run import TrainedRun


def utility(model: TrainedRun, cell: Cell) -> Finding:
    """Measures the model's utility on held-out examples."""
    return utility_of(model.run.model, model.test, model.cosines.score())


def utility_of(network: nn.Module, test: Examples, successive_cosine: Metric) -> Finding:
    """Measures a network's utility on held-out examples.

    Args:
        network: after its training.
        test: the held-out examples.
        successive_cosine: of the updates of its training.
    """
    logits = logits_of(network, test.inputs)
    columns = {
        "id": column(test.ids),
        "label": column(test.labels),
        "loss": column(losses(logits, test.labels)),
        # NaN sorts above every number, so argmax would return a class: -1, an invalid label, counts as wrong.
        "predicted": column(logits.argmax(dim=1).masked_fill(logits.isnan().any(dim=1), -1)),
    }
    return Finding(score_utility(logits, test.labels) | {"successive_cosine": successive_cosine}, columns)
