"""Plot of proved lower bounds on epsilon against the claim that they may refute, on axes of equal scale.

A bound has its own relation of neighbours, so it stands against the claim for that relation, which is in its detail.
Bounds of several attacks are separate marks, because their error probabilities add up.
"""

import math
from collections import Counter
from collections.abc import Sequence

from ..board.aggregate import BoardCell
from ..board.proved_bound import PROVED, attack_bounds
from ..board.rows import Row
from .axes import Axis
from .drawing import ProvedMark, equal_scales
from .figures import Figure
from .plots import Point, Style

LABELLED = 12
"""Largest number of marks that have labels."""

TITLE = "Proved against claimed ε, on equal scales"


def proved_figures(rows: Sequence[Row], style: Style, name: str) -> list[Figure]:
    """Draws the bounds of a section; empty if its records have no metric of a proved bound.

    Args:
        rows: of the section.
        style: method -> (colour, marker).
        name: unique on the page; a prefix of the plot's name.
    """
    marks: list[ProvedMark] = []
    numbers: list[tuple[str, ...]] = []
    missing: Counter[tuple[str, str]] = Counter()
    bounds = [(row, proved) for row in rows for proved in attack_bounds(row)]
    for row, proved in bounds:
        cell, metric, bound = proved.cell, proved.metric, proved.estimate
        if bound.value is None:
            missing[cell.attack or "", bound.reason or ""] += 1
            continue
        claimed, relation = math.inf if proved.claimed is None else proved.claimed, proved.relation
        claim_words = "no finite claim" if math.isinf(claimed) else f"claimed ε {claimed:.2f}"
        if relation:
            claim_words += f" for {relation.replace('_', ' ')}"
        count = _count(cell, metric)
        title = f"{row.label}: ε at least {bound.value:.2f} by {cell.attack}, from {PROVED[metric]} ({count})"
        point = Point(
            x=claimed,
            y=bound.value,
            series=row.method,
            label=row.method if len(row.method) <= 24 else row.defense.name,
            title=f"{title}; {claim_words}",
            hollow=metric == "canary_epsilon",
        )
        marks.append(ProvedMark(point=point, colour=style[row.method][0], shape=style[row.method][1]))
        numbers.append(
            (row.label, cell.attack or "", PROVED[metric], "∞" if math.isinf(claimed) else f"{claimed:.2f}", relation,
             f"{bound.value:.2f}", count)
        )  # fmt: skip
    aside = tuple(
        f"Not shown: {attack} on {count} row{'s' * (count > 1)}, {why}." for (attack, why), count in missing.items()
    )
    if not marks:
        return [Figure(name=f"{name}-proved", title=TITLE, caption=aside)] if aside else []
    if len(marks) > LABELLED:
        marks = [ProvedMark(point=_bare(mark.point), colour=mark.colour, shape=mark.shape) for mark in marks]
    kinds = [PROVED[metric] for metric in PROVED if any(numbers_of[2] == PROVED[metric] for numbers_of in numbers)]
    caption = (
        "Each mark is a lower bound proved with confidence 0.95 by one attack, the least of its seeds, against the "
        "claim for the same relation of neighbours. Marks are filled for pairs of members and non-members, and "
        "outlined for canaries. Above the diagonal a claim would be refuted at that confidence. A bound near 0 proves "
        "no safety, because one training gives few trials. Without a finite claim a mark stands at the right edge. "
        "Methods at the same place are set side by side.",
        *aside,
    )
    high = 1.06 * max(0.5, *(value for mark in marks for value in (mark.point.x, mark.point.y) if math.isfinite(value)))
    infinite = any(math.isinf(mark.point.x) for mark in marks)
    x, y = Axis(title="claimed ε", low=0.0, high=high, infinity=infinite), Axis(title="proved ε", low=0.0, high=high)
    words = f"{TITLE}: {len(marks)} bounds from {' and '.join(kinds)}"
    headers = ("defense", "attack", "from", "claimed ε", "relation", "proved ε, at least", "n")
    drawing = equal_scales(marks, x=x, y=y, words=words)
    return [
        Figure(
            name=f"{name}-proved",
            title=TITLE,
            drawing=drawing,
            caption=caption,
            headers=headers,
            numbers=tuple(numbers),
        )
    ]


def _count(cell: BoardCell, metric: str) -> str:
    sizes = sorted({record.metrics[metric].n or 0 for record in cell.records.values() if metric in record.metrics})
    span = "-".join(str(size) for size in dict.fromkeys((sizes[0], sizes[-1])))
    return f"{len(cell.records)} seed{'' if len(cell.records) == 1 else 's'} of {span}"


def _bare(point: Point) -> Point:
    return Point(x=point.x, y=point.y, series=point.series, title=point.title, hollow=point.hollow)
