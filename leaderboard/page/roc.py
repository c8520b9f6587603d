"""ROC curves of membership attacks, measured and as bounded by the claims, on logarithmic axes.

Carlini et al., "Membership Inference Attacks From First Principles", S&P 2022, for the axes, because the true positive
rate matters at low false positive rates. The measured curve is computed from the scores beside the records. The bound
was computed with the claim, and is in the detail of the record's AUC.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy import ndarray

from ..board.aggregate import BoardCell
from ..board.rows import RANKED_BY, Row
from ..kinds import KINDS
from ..records.arrays import read_table
from ..records.details import AucDetail
from ..records.files import read_bytes
from ..records.folder import ArraysFolder, arrays_path
from ..records.left_out import FLAG, REASON
from ..records.record import Record, RecordError
from .axes import Axis
from .figures import Figure, epsilon_words, facet_of, facets
from .plots import PlotLine, Style

LETTERS = 28
"""Longest label of a line; the legend has the full names."""

MOST = 8
"""Largest number of rows in a drawing; more lines cannot be distinguished."""

_POINTS = 160
"""Points of a measured curve, evenly spread over the logarithm of the false positive rate."""


def roc_figures(rows: Sequence[Row], folder: ArraysFolder, style: Style, name: str) -> list[Figure]:
    """Draws the ROC curves of a section, a plot for each guarantee; empty if no scores lie beside its records.

    Args:
        rows: of the section.
        folder: of the arrays of its records.
        style: method -> (colour, marker).
        name: unique on the page; a prefix of the plot's name.
    """
    drawn = []
    for place, (words, facet) in enumerate(facets([row for row in rows if row.control != "negative"])):
        figure = _facet(facet, folder, style, f"{name}-roc{place or ''}")
        drawn += [] if figure is None else [facet_of(figure, words, first=not drawn)]
    return drawn


def _facet(shown: Sequence[Row], folder: ArraysFolder, style: Style, name: str) -> Figure | None:
    with_cell = [(row, cell) for row in shown if (cell := _leading(row)) is not None]
    lines: list[PlotLine] = []
    bounds: dict[tuple[tuple[float, float], ...], list[Row]] = {}
    left_out: list[str] = []
    for row, cell in with_cell[:MOST]:
        record = next(iter(cell.records.values()))
        try:
            fprs, tprs = measured(record, folder)
        except RecordError as error:
            left_out.append(f"Not shown: {row.label}, {error}.")
            continue
        row_title = f"{row.label}: {cell.attack}, seed {record.seed}, claimed ε {epsilon_words(row)}"
        places = list(zip(fprs.tolist(), tprs.tolist(), strict=True))
        label = row.method if len(row.method) <= LETTERS else row.defense.name
        lines.append(PlotLine(places=places, series=row.method, title=f"{row_title}, measured", label=label))
        if allowed := tuple(allowed_by_claim(record)):
            bounds.setdefault(allowed, []).append(row)
    lines += [
        PlotLine(
            places=allowed,
            series="",
            title=f"the most allowed, claimed ε {epsilon_words(bounded[0])}: {', '.join(row.label for row in bounded)}",
            label=f"allowed, ε {epsilon_words(bounded[0], 1)}",
            bound=True,
        )
        for allowed, bounded in bounds.items()
    ]
    specification = roc_plot(lines, style)
    if specification is None:
        return None
    if len(with_cell) > MOST:
        left_out.append(f"Not shown: {len(with_cell) - MOST} more rows, for want of markers.")
    title = "ROC curves against what claims allow"
    caption = (
        "Lines are measured, of the strongest attack on each row with its first seed, from one false alarm on; marks "
        "tell them apart. Dots are the most that a claim allows any test; none are drawn where it allows everything. "
        "The dashed line is chance. Few members and non-members lie at the left end, so a line may cross its dots "
        "there by chance, and that of an attack that is told everybody else's contribution anywhere: scores of one run "
        "share its noise.",
        *left_out,
    )
    return Figure(name=name, title=title, specification=specification, caption=caption)


def roc_plot(lines: Sequence[PlotLine], style: Style) -> dict[str, Any] | None:
    """Specifies ROC curves on logarithmic axes; None if no measured curve has a point below a false positive rate of 1.

    Args:
        lines: measured, from one false positive on, and bounds.
        style: series -> (colour, marker).
    """
    least = min((line.places[0][0] for line in lines if not line.bound), default=1.0)
    if least >= 1:
        return None
    # Imported here because Altair takes a second to import, and pages without plots do without.
    from .specifications import curves

    x = Axis(title="false positive rate", low=least, high=1.0, log=True)
    y = Axis(title="true positive rate", low=least / 2, high=1.0, log=True)
    return curves(lines, x=x, y=y, style=style)


def measured(record: Record, folder: ArraysFolder) -> tuple[ndarray, ndarray]:
    """False and true positive rates of a record's scores, see `rates`.

    Raises:
        RecordError: there are no scores, or they lack members or non-members.
    """
    return rates(*scores_of(record, folder))


def scores_of(record: Record, folder: ArraysFolder) -> tuple[ndarray, ndarray]:
    """Scores of a record's candidates, and whether each is a member, which the attack did not know.

    Raises:
        RecordError: there are no scores.
    """
    if record.arrays is None:
        raise RecordError("no scores lie beside its record")
    if FLAG in record.flags:
        raise RecordError(REASON)
    try:
        table = read_table(read_bytes(arrays_path(record, folder), "arrays"), ["score", "member"])
        scores, members = (table[column].to_numpy() for column in ("score", "member"))
    except (OSError, ValueError):
        raise RecordError("its scores cannot be read") from None
    return scores, members.astype(bool)


def rates(
    scores: ndarray, members: ndarray, *, points: int = _POINTS, kept: Sequence[float] = ()
) -> tuple[ndarray, ndarray]:
    """False positive rates from one false positive on, and the true positive rate with at most that many.

    Ties share a threshold. Rates are thinned evenly on a logarithmic axis, which keeps every number of false positives
    at the left end.

    Args:
        scores: [n], larger for members.
        members: bool [n].
        points: largest number of rates, besides those kept.
        kept: false positive rates that thinning keeps.

    Raises:
        RecordError: members or non-members are missing, or a score is NaN.
    """
    inside, outside = _groups(scores, members)
    spread = np.geomspace(1, len(outside), points).round().astype(int)
    counts = [math.floor(fpr * len(outside) + 1e-9) for fpr in kept]
    alarms = np.unique([*spread, *filter(None, counts)])
    # Scores above the first surplus non-member: the most true positives at that many false positives.
    tprs = 1 - np.searchsorted(inside, outside[::-1][alarms[:-1]], side="right") / len(inside)
    # Not the false positives that occur: without any, as of a perfect attack, a logarithmic axis has no place for them.
    return alarms / len(outside), np.append(tprs, 1.0)


def _groups(scores: ndarray, members: ndarray) -> tuple[ndarray, ndarray]:
    """Sorted scores of members and of non-members."""
    inside, outside = np.sort(scores[members]), np.sort(scores[~members])
    if not len(inside) or not len(outside) or np.isnan(scores).any():
        raise RecordError("its scores are not of members and non-members")
    return inside, outside


def _leading(row: Row) -> BoardCell | None:
    """Cell of the strongest attack of the ranking kind; None if none was measured."""
    lead = next((estimate.attack for estimate in row.main(KINDS[RANKED_BY]) if estimate.attack), None)
    return next((cell for cell in row.cells if cell.kind == RANKED_BY and cell.attack == lead), None)


def allowed_by_claim(record: Record) -> list[tuple[float, float]]:
    """Largest true positive rates under the claim; empty if the record has none, or everything is allowed."""
    points = AucDetail.of(record.metrics["auc"].detail).largest_roc if "auc" in record.metrics else []
    return [] if all(tpr >= 1 for _, tpr in points) else points
