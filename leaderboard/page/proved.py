"""Plot of proved lower bounds on epsilon against the claim that they may refute, on one scale.

A bound has its own relation of neighbours, so it stands against the claim for that relation, which is in its detail.
Bounds of several attacks are separate lanes, because their error probabilities add up.
"""

import math
from collections import Counter
from collections.abc import Sequence

from ..board.aggregate import BoardCell
from ..board.proved_bound import PROVED, attack_bounds, bound_words
from ..board.rows import Row
from .figures import Figure
from .lanes import Lane, lanes
from .plots import Style

MOST = 40
"""Largest number of lanes; the table below has all bounds."""

TITLE = "Proved against claimed ε, on one scale"


def proved_figures(rows: Sequence[Row], style: Style, name: str) -> list[Figure]:
    """Draws the bounds of a section; empty if its records have no metric of a proved bound.

    Args:
        rows: of the section.
        style: method -> (colour, marker).
        name: unique on the page; a prefix of the plot's name.
    """
    bounds: list[Lane] = []
    numbers: list[tuple[str, ...]] = []
    missing: Counter[tuple[str, str]] = Counter()
    proved_of = [(row, proved) for row in rows for proved in attack_bounds(row)]
    for row, proved in proved_of:
        cell, metric, bound = proved.cell, proved.metric, proved.estimate
        if bound.value is None:
            missing[cell.attack or "", bound.reason or ""] += 1
            continue
        claimed, relation = math.inf if proved.claimed is None else proved.claimed, proved.relation
        claim_words = "no finite claim" if math.isinf(claimed) else f"claimed ε {claimed:.2f}"
        if relation:
            claim_words += f" for {relation.replace('_', ' ')}"
        count = _count(cell, metric, bound.seeds)
        title = f"{row.label}: ε at least {bound_words(bound.value)} by {cell.attack}, from {PROVED[metric]} ({count})"
        bounds.append(
            Lane(
                label=row.label,
                by=f"{cell.attack}, {PROVED[metric].partition(' ')[0]}",
                proved=bound.value,
                claimed=claimed,
                colour=style[row.method][0],
                shape=style[row.method][1],
                hollow=metric == "canary_epsilon",
                words=f"{title}; {claim_words}",
            )
        )
        numbers.append(
            (row.label, cell.attack or "", PROVED[metric], "∞" if math.isinf(claimed) else f"{claimed:.2f}", relation,
             bound_words(bound.value), count)
        )  # fmt: skip
    aside = tuple(
        f"Not shown: {attack} on {count} row{'s' * (count > 1)}, {why}." for (attack, why), count in missing.items()
    )
    if not bounds:
        return [Figure(name=f"{name}-proved", title=TITLE, caption=aside)] if aside else []
    kinds = [PROVED[metric] for metric in PROVED if any(numbers_of[2] == PROVED[metric] for numbers_of in numbers)]
    caption = (
        "Each mark is a lower bound proved with confidence 0.95 by one attack, the least of its seeds; the bar behind "
        "it is the claim for the same relation of neighbours, and without a finite claim it has no end. Marks are "
        "filled for pairs of members and non-members, and outlined for canaries. Beyond its bar, a mark would refute "
        "the claim at that confidence. A bound near 0 proves no safety, because one training gives few trials.",
        *([f"Drawn are the first {MOST} of {len(bounds)}, in the order of the board."] if len(bounds) > MOST else []),
        *aside,
    )
    headers = ("defense", "attack", "from", "claimed ε", "relation", "proved ε, at least", "n")
    return [
        Figure(
            name=f"{name}-proved",
            title=TITLE,
            drawing=lanes(bounds[:MOST], words=f"{TITLE}: {len(bounds)} bounds from {' and '.join(kinds)}"),
            caption=caption,
            headers=headers,
            numbers=tuple(numbers),
        )
    ]


def _count(cell: BoardCell, metric: str, seeds: Sequence[int]) -> str:
    sizes = sorted({cell.records[seed].metrics[metric].n or 0 for seed in seeds})
    span = "-".join(str(size) for size in dict.fromkeys((sizes[0], sizes[-1])))
    return f"{len(seeds)} seed{'' if len(seeds) == 1 else 's'} of {span}"
