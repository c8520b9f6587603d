"""Comparison of cells with the control `public_only`: the same network, trained on the public examples alone.

A defense that proves an epsilon and is no better has bought nothing with the private examples. Cells are compared seed
by seed, by the intervals of the records, which are over test examples.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ..metrics import METRICS, KnownMetric
from .rows import Row

ACCURACY = METRICS["accuracy"]
COMPARED = (ACCURACY, METRICS["loss"])
"""Metrics of a model whose records have intervals over test examples; sentences are about the first."""

Verdict = Literal["above", "below", "untold"]
"""Place of `public_only` against a cell: above or below it in every seed by disjoint intervals, or neither."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """Value of a record's metric, with the ends of its interval."""

    value: float
    low: float
    high: float


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
        control = {*intervals(self.control)}
        seeds = [(row, {*intervals(row)}) for row, _ in self.verdicts]
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


def public_numbers(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Returns the comparisons as plain JSON values: for each row and metric the control's place, and both intervals.

    Args:
        rows: of the board.
    """
    return [
        {
            "suite": comparison.control.suite,
            "data": comparison.control.task.data,
            "model": comparison.control.task.model,
            "control": comparison.control.label,
            "rows": [
                {
                    "label": row.label,
                    "unit": row.claim and row.claim.unit,
                    "epsilon": row.claim and row.claim.epsilon,
                    "metrics": {metric.name: _numbers(comparison.control, row, metric) for metric in COMPARED},
                }
                for row in (*(row for row, _ in comparison.verdicts), *comparison.missing)
            ],
        }
        for comparison in public_comparisons(rows)
    ]


def _numbers(control: Row, row: Row, metric: KnownMetric) -> dict[str, Any]:
    place, theirs, ours = place_of(control, row, metric), intervals(control, metric), intervals(row, metric)
    is_better = (place == "above") == (metric.better == "higher")
    word = "undecided" if place == "untold" else "better" if is_better else "worse"
    return {
        "public_only_is": place and word,
        "seeds": [
            {"seed": seed, "public_only": asdict(theirs[seed]), "row": asdict(ours[seed])}
            for seed in sorted(ours.keys() & theirs.keys())
        ],
    }


def place_of(control: Row, row: Row, metric: KnownMetric = ACCURACY) -> Verdict | None:
    """Place of the control against a row; None if no seed has both with an interval.

    Args:
        control: row of `public_only`.
        row: row to compare with it.
        metric: of models.
    """
    ours, theirs = intervals(row, metric), intervals(control, metric)
    pairs = [(theirs[seed], ours[seed]) for seed in ours.keys() & theirs.keys()]
    if not pairs:
        return None
    if all(public.low > private.high for public, private in pairs):
        return "above"
    return "below" if all(public.high < private.low for public, private in pairs) else "untold"


def intervals(row: Row, metric: KnownMetric = ACCURACY) -> dict[int, Interval]:
    """Interval of a metric in each seed's record; seeds without an interval are left out.

    Args:
        row: of the board.
        metric: of models.
    """
    records = {seed: r for cell in row.cells if cell.kind == metric.kind for seed, r in cell.records.items()}
    measured = {seed: record.metrics[metric.name] for seed, record in records.items() if metric.name in record.metrics}
    return {
        seed: Interval(value=own.value, low=own.low, high=own.high)
        for seed, own in measured.items()
        if own.value is not None and own.low is not None and own.high is not None
    }


def _control_words(control: Row) -> str:
    accuracy = control.accuracy.words(ACCURACY.digits)
    return (
        f"{control.suite}, {control.task.data}: the same network, trained on public examples alone (public_only, "
        f"epsilon 0), has accuracy {accuracy} and is above"
    )
