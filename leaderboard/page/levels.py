"""Horizontal lines of plots of accuracy: the control that was trained on the public examples alone."""

from collections.abc import Sequence

from ..board.rows import Row
from ..metrics import METRICS
from .plots import Level

ACCURACY = METRICS["accuracy"]


def public_levels(public_only: Sequence[Row]) -> tuple[list[Level], list[str]]:
    """Returns a line for each control with an accuracy, and the sentence that explains them, if there are any.

    Args:
        public_only: rows of the control.
    """
    levels = [
        Level(y=row.accuracy.value, words=f"public_only {row.accuracy.value:.{ACCURACY.digits}f}, ε 0")
        for row in public_only
        if row.accuracy.value is not None
    ]
    sentence = (
        "Dashed: public_only, the same network trained on the public examples alone; no private example is in it, so "
        "its ε is 0 for records and for clients."
    )
    return levels, [sentence] if levels else []
