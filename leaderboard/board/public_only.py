"""Comparison of cells with the control `public_only`: the same network, trained on the public examples alone.

A defense that proves an epsilon and is no better has bought nothing with the private examples. Cells are compared seed
by seed, by the intervals of the records, which are over test examples.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..metrics import METRICS
from .rows import Row

ACCURACY = METRICS["accuracy"]

Verdict = Literal["above", "below", "untold"]
"""Place of `public_only` against a cell: above or below it in every seed by disjoint intervals, or neither."""


@dataclass(frozen=True, kw_only=True)
class PublicComparison:
    """Accuracy of `public_only` against the cells of a suite that prove an epsilon.

    Attributes:
        control: row of the control.
        verdicts: (row, place of the control) for each compared row, in the order of the board.
        missing: rows that prove an epsilon and share no measured seed with the control.
    """

    control: Row
    verdicts: tuple[tuple[Row, Verdict], ...]
    missing: tuple[Row, ...] = ()

    @property
    def _shared(self) -> list[tuple[Row, set[int], set[int]]]:
        """(row, seeds that it shares with the control, seeds of either) of the compared rows."""
        control = {*accuracies(self.control)}
        seeds = [(row, {*accuracies(row)}) for row, _ in self.verdicts]
        return [(row, own & control, own | control) for row, own in seeds]

    @property
    def sentence(self) -> str:
        """Cells that the control is above, and those that it is not."""
        above, below, untold = (
            [row.label for row, place in self.verdicts if place == verdict] for verdict in ("above", "below", "untold")
        )
        cells = len(self.verdicts) + len(self.missing)
        share = "every cell that proves" if len(above) == cells else f"{len(above)} of {cells} cells that prove"
        units = {row.section[3] for row, _ in self.verdicts}
        words = f"{_control_words(self.control)} {share} an epsilon"
        words += f"{', of either privacy unit' if len(units) > 1 else ''}: "
        words += "in every seed that both have, by the records' 95 % intervals over test examples."
        few = [f"{row.label} {len(seeds)} of {len(own)}" for row, seeds, own in self._shared if len(seeds) < len(own)]
        if few:
            words += f" Compared in fewer seeds than were measured: {', '.join(few)}."
        if below:
            words += f" Above it: {', '.join(below)}."
        if untold:
            words += f" Not decided: {', '.join(untold)}."
        if self.missing:
            words += f" Without a common seed: {', '.join(row.label for row in self.missing)}."
        return words


def public_comparisons(rows: Sequence[Row]) -> list[PublicComparison]:
    """Compares every `public_only` control with the rows of its suite, data and model that prove an epsilon.

    Rows of both privacy units are compared: the control reads no private example, so its epsilon is 0 for either.

    Args:
        rows: of the board.
    """
    comparisons = []
    for control in rows:
        if control.control != "public_only":
            continue
        rivals = [
            row
            for row in rows
            if row.control is None
            and row.section[:3] == control.section[:3]
            and row.claim is not None
            and row.claim.epsilon is not None
        ]
        verdicts: list[tuple[Row, Verdict]] = []
        missing: list[Row] = []
        for row in rivals:
            if (place := place_of(control, row)) is None:
                missing.append(row)
            else:
                verdicts.append((row, place))
        if verdicts:
            comparisons.append(PublicComparison(control=control, verdicts=tuple(verdicts), missing=tuple(missing)))
    return comparisons


def public_sentences(rows: Sequence[Row]) -> list[str]:
    """Sentences of `public_comparisons`; empty without such a control."""
    return [comparison.sentence for comparison in public_comparisons(rows)]


def place_of(control: Row, row: Row) -> Verdict | None:
    """Place of the control against a row; None if no seed has both with an interval.

    Args:
        control: row of `public_only`.
        row: row to compare with it.
    """
    ours, theirs = accuracies(row), accuracies(control)
    pairs = [(theirs[seed], ours[seed]) for seed in sorted(ours.keys() & theirs.keys())]
    if not pairs:
        return None
    if all(public[0] > private[1] for public, private in pairs):
        return "above"
    return "below" if all(public[1] < private[0] for public, private in pairs) else "untold"


def accuracies(row: Row) -> dict[int, tuple[float, float]]:
    """Interval of the accuracy in each seed's record; seeds without an interval are left out."""
    records = {seed: r for cell in row.cells if cell.kind == ACCURACY.kind for seed, r in cell.records.items()}
    metrics = {seed: record.metrics.get(ACCURACY.name) for seed, record in records.items()}
    return {
        seed: (metric.low, metric.high)
        for seed, metric in metrics.items()
        if metric is not None and metric.low is not None and metric.high is not None
    }


def _control_words(control: Row) -> str:
    accuracy = control.accuracy.words(ACCURACY.digits)
    return (
        f"{control.suite}, {control.task.data}: the same network, trained on public examples alone (public_only, "
        f"epsilon 0), has accuracy {accuracy} and is above"
    )
