"""Matrix of a section: a row for each defense, a column for each membership attack, AUC and TPR in its cells.

A cell has its ROC curves on logarithmic axes beside the bound of the claim, a histogram of scores, all of its numbers
and its settings. Curves are thinned to `POINTS` rates, evenly on the logarithm of the false positive rate: every number
of false positives at the left end is kept, and so are the rates of `KEPT`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from markupsafe import Markup
from numpy import ndarray

from ..board.aggregate import BoardCell, Estimate, over_seeds
from ..board.content import Footnotes, largest_words
from ..board.rows import RANKED_BY, Row
from ..metrics import METRICS
from ..records.fields import MethodUsed
from ..records.folder import ArraysFolder
from ..records.labels import differences, key_of, word
from ..records.record import Record, RecordError
from .drawing import RocCurve, decades_below, histogram, roc
from .plots import Style, marker
from .roc import allowed_by_claim, rates, scores_of
from .tables import Value, value

AUC, TPR = METRICS["auc"], METRICS["tpr_at_1pct_fpr"]

POINTS = 40
"""Largest number of rates of a cell's curve, besides those of `KEPT`."""

KEPT = (0.001, 0.01, 0.1)
"""False positive rates that thinning keeps."""

SEEDS = 5
"""Largest number of seeds whose curves a cell draws."""

BINS = 24
"""Bins of a histogram; the first and the last hold all scores beyond them."""


@dataclass(frozen=True, kw_only=True)
class MatrixCell:
    """Result of a membership attack on a defense.

    Attributes:
        anchor: id of its element, from the id of its first seed's record.
        title: defense and attack.
        auc: mean over seeds, with its interval alone.
        tpr: at a false positive rate of 1 %, the same.
        count: seeds and candidates, as "3 seeds of 1000".
        heat: position of the AUC between chance and 1, per cent, for its colour.
        flags: of its records.
        numbers: (metric, value, interval, count, most allowed, remark) for each metric.
        allowed: caveat about the most allowed; empty for none.
        settings: of the attack, in words.
        access: threat model, in words.
        records: (seed, id) of each record.
        roc: plot of its curves; None without scores.
        decades: of the axes of that plot; None without it.
        scores: histogram; None without scores.
        remarks: reasons why something is not shown.
    """

    anchor: str
    title: str
    auc: Value
    tpr: Value
    count: str
    heat: float
    flags: tuple[str, ...]
    numbers: tuple[tuple[str, ...], ...]
    allowed: str
    settings: str
    access: str
    records: tuple[tuple[int, str], ...]
    roc: Markup | None = None
    decades: int | None = None
    scores: Markup | None = None
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class MatrixLine:
    """Row of the matrix; a cell is text where there is no result: the status and its reason."""

    name: str
    details: str
    control: str
    key: Markup
    cells: tuple[MatrixCell | tuple[str, str], ...]


@dataclass(kw_only=True)
class AttackMatrix:
    """Matrix of a section; `attacks` are the labels of its columns."""

    attacks: tuple[str, ...]
    lines: list[MatrixLine] = field(default_factory=list)

    @property
    def cells(self) -> list[MatrixCell]:
        """Cells with a result, row by row."""
        return [cell for line in self.lines for cell in line.cells if isinstance(cell, MatrixCell)]


def matrix(rows: Sequence[Row], folder: ArraysFolder, style: Style, notes: Footnotes) -> AttackMatrix | None:
    """Makes the matrix of a section; None if no membership attack has a result there.

    Args:
        rows: of the section.
        folder: of the arrays of its records.
        style: method -> (colour, marker).
        notes: collects the reasons for missing numbers.
    """
    labels = _attack_labels(_first(cell) for row in rows for cell in row.cells if cell.kind == RANKED_BY)
    if not labels:
        return None
    attack_matrix = AttackMatrix(attacks=tuple(labels.values()))
    for row in rows:
        cells = {_key(_first(cell)): cell for cell in row.cells if cell.kind == RANKED_BY}
        attack_matrix.lines.append(
            MatrixLine(
                name=row.defense.name,
                details=row.details,
                control=row.control or "",
                key=marker(*style[row.method], hollow=row.claim is None or row.claim.epsilon is None),
                cells=tuple(
                    _cell(row, cells[key], label, folder, notes) if key in cells else _absent(row, key)
                    for key, label in labels.items()
                ),
            )
        )
    return attack_matrix


def _attack_labels(firsts: Iterable[Record]) -> dict[str, str]:
    """Key of an attack with its settings -> its name, with the settings in which attacks of the same name differ."""
    attacks = {_key(record): record.attack for record in firsts if record.attack is not None}
    labels = {}
    for name in sorted({attack.name for attack in attacks.values()}):
        same = {key: attack for key, attack in attacks.items() if attack.name == name}
        words = differences([attack.settings for attack in same.values()])
        labels |= {key: f"{name} ({text})" if text else name for key, text in zip(same, words, strict=True)}
    return labels


def _key(record: Record) -> str:
    attack = record.attack or MethodUsed(name=record.kind)
    return key_of((attack.name, attack.settings))


def _first(cell: BoardCell) -> Record:
    return next(iter(cell.records.values()))


def _absent(row: Row, key: str) -> tuple[str, str]:
    """Status and reason of an attack without a result on a row."""
    unranked = [r for r in row.unranked if r.kind == RANKED_BY and _key(r) == key]
    return (unranked[0].status, unranked[0].reason or "") if unranked else ("not run", "no record")


def _cell(row: Row, cell: BoardCell, label: str, folder: ArraysFolder, notes: Footnotes) -> MatrixCell:
    first = _first(cell)
    auc, tpr = over_seeds(AUC.name, cell), over_seeds(TPR.name, cell)
    plots = _plots(cell, folder, f"{row.label}, {label}")
    names = dict.fromkeys(name for record in cell.records.values() for name in record.metrics)
    settings = first.attack.settings if first.attack else {}
    requires = {} if first.requires is None else dict(first.requires)
    access = [f"{name} {_several(needed)}" for name, needed in requires.items() if needed]
    return MatrixCell(
        anchor=f"cell-{first.id}",
        title=f"{row.label} x {label}",
        auc=value(auc, notes),
        tpr=value(tpr, notes),
        count=_count(auc, cell),
        heat=round(100 * min(max(2 * (auc.value or 0.5) - 1, 0.0), 1.0), 1),
        flags=tuple(dict.fromkeys(flag for record in cell.records.values() for flag in record.flags)),
        numbers=tuple(_number(over_seeds(name, cell), cell) for name in names if name in METRICS),
        allowed="; ".join(dict.fromkeys(filter(None, (auc.largest_note, tpr.largest_note)))),
        settings=", ".join(f"{name} {word(setting)}" for name, setting in settings.items()) or "none",
        access="; ".join(access),
        records=tuple((seed, record.id) for seed, record in cell.records.items()),
        roc=plots.roc,
        decades=plots.decades,
        scores=plots.scores,
        remarks=plots.remarks,
    )


def _several(needed: object) -> str:
    items = needed if isinstance(needed, list | tuple) else [needed]
    return ", ".join(str(item).lower() for item in items)


def _number(estimate: Estimate, cell: BoardCell) -> tuple[str, ...]:
    metric = METRICS[estimate.metric]
    low_high = (
        "" if estimate.ends is None else f"[{estimate.ends[0]:.{metric.digits}f}, {estimate.ends[1]:.{metric.digits}f}]"
    )
    number = "n/a" if estimate.value is None else metric.number(estimate.value, metric.digits)
    count = "" if estimate.value is None else _count(estimate, cell)
    return metric.label, number, low_high, count, largest_words(estimate, metric.digits), estimate.reason or ""


def _count(estimate: Estimate, cell: BoardCell) -> str:
    """Seeds and candidates behind an estimate, as "3 seeds of 1000"."""
    sizes = sorted({cell.records[seed].metrics[estimate.metric].n or 0 for seed in estimate.seeds})
    if not sizes:
        return ""
    span = "-".join(str(size) for size in dict.fromkeys((sizes[0], sizes[-1])))
    return f"{estimate.n} seed{'' if estimate.n == 1 else 's'} of {span}"


@dataclass(frozen=True, kw_only=True)
class _Plots:
    roc: Markup | None = None
    decades: int | None = None
    scores: Markup | None = None
    remarks: tuple[str, ...] = ()


def _plots(cell: BoardCell, folder: ArraysFolder, words: str) -> _Plots:
    """Draws the curves of a cell's first seeds and the scores of its first."""
    curves: list[RocCurve] = []
    least, scores, remarks = 1.0, None, []
    for seed, record in list(cell.records.items())[:SEEDS]:
        try:
            values, members = scores_of(record, folder)
            fprs, tprs = rates(values, members, points=POINTS, kept=KEPT)
        except RecordError as error:
            remarks.append(f"Seed {seed} is not drawn: {error}.")
            continue
        curves.append(list(zip(fprs.tolist(), tprs.tolist(), strict=True)))
        least = min(least, float(fprs[0]))
        scores = scores or _scores(values, members, f"Scores of {words}, seed {seed}")
    if (more := len(cell.records) - SEEDS) > 0:
        remarks.append(f"Curves are of the first {SEEDS} seeds; {more} more are in the arrays beside the records.")
    if not curves or least >= 1:
        return _Plots(scores=scores, remarks=tuple(remarks))
    decades = decades_below(least)
    allowed = _largest_allowed(cell.records.values())
    bound = (
        "the most that the claim allows is dashed" if allowed else "the claim allows everything, or nothing is claimed"
    )
    title = f"ROC on logarithmic axes: {words}; {len(curves)} seeds, {bound}"
    return _Plots(
        roc=roc(curves, allowed, decades=decades, words=title), decades=decades, scores=scores, remarks=tuple(remarks)
    )


def _largest_allowed(records: Iterable[Record]) -> RocCurve:
    """Bound that all seeds' claims satisfy: at each rate the largest; empty if a seed lacks it."""
    bounds = [dict(allowed_by_claim(record)) for record in records]
    if not all(bounds):
        return []
    return [(fpr, max(bound[fpr] for bound in bounds)) for fpr in bounds[0] if all(fpr in bound for bound in bounds)]


def _scores(scores: ndarray, members: ndarray, words: str) -> Markup:
    """Histogram over bins between the 1st and the 99th percentile; all scores beyond are in the outer bins."""
    finite = scores[np.isfinite(scores)]
    low, high = (float(end) for end in np.quantile(finite, [0.01, 0.99])) if len(finite) else (0.0, 1.0)
    if not low < high:
        low, high = low - 0.5, low + 0.5
    places = np.clip((np.clip(scores, low, high) - low) / (high - low) * BINS, 0, BINS - 1).astype(int)
    counts = [np.bincount(places[group], minlength=BINS).tolist() for group in (members, ~members)]
    ends = f"≤ {low:.3g}", f"≥ {high:.3g}"
    words = f"{words}: {int(members.sum())} members, filled, and {int((~members).sum())} non-members, outlined"
    return histogram(*counts, ends=ends, words=words)
