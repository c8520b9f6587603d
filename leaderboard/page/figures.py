"""Plots of a page: points, axes and caption of each plot, from the rows of a section of the board.

Every section has utility against leakage, and the epsilon implied by attacks against the claimed epsilon; with several
budgets also accuracy against claimed epsilon and against the noise multiplier, with papers' figures; with sweeps over
sparsities or ranks the PSNR of reconstructed images. A plot without points becomes a sentence with the reason. Negative
controls are in no plot, because their models were not trained on the members.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from markupsafe import Markup

from ..board.aggregate import BoardCell, Estimate, over_seeds, worst_case
from ..board.rows import Row, guarantee_words
from ..kinds import KINDS
from ..metrics import METRICS
from .axes import Axis, axis_over
from .levels import public_levels
from .plots import Level, Point, Style, styles
from .sweep_points import SWEPT, sweep_points

ACCURACY, AUC, IMPLIED = METRICS["accuracy"], METRICS["auc"], METRICS["implied_epsilon"]
PSNR = METRICS["psnr"]
"""Metrics that plots show."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """Plot with its caption and numbers.

    Attributes:
        name: unique on the page.
        title: of the plot.
        specification: of Vega-Lite; None if there is nothing to draw, with the reason in the caption.
        caption: sentences.
        drawing: still plot, instead of a specification; None without one.
        headers: of the table of its numbers; empty without one.
        numbers: rows of that table.
    """

    name: str
    title: str
    specification: dict[str, Any] | None = None
    caption: tuple[str, ...] = ()
    drawing: Markup | None = None
    headers: tuple[str, ...] = ()
    numbers: tuple[tuple[str, ...], ...] = ()


def figures(rows: Sequence[Row], style: Style, name: str) -> list[Figure]:
    """Draws the plots of a section.

    Args:
        rows: of the section.
        style: method -> (colour, marker), the same in all sections.
        name: unique on the page; a prefix of the plots' names.

    Returns:
        Two to four plots, and one for each swept setting and variant of the release, if images were attacked; with
        several budgets utility against leakage has a plot for each.
    """
    shown = [row for row in rows if row.control != "negative"]
    drawn = []
    for place, (words, facet) in enumerate(facets(shown)):
        figure = _trade_off(facet, style, f"{name}-trade{place or ''}", over=shown)
        drawn.append(facet_of(figure, words, first=not place))
    by_auc = any(row.auc.value is not None for row in shown)
    # Without an AUC, `_trade_off` falls back to this plot.
    if by_auc and len({row.claim.epsilon for row in shown if row.claim} - {None}) > 1:
        drawn.append(_against_epsilon(shown, style, f"{name}-epsilon"))
    if len({row.noise_multiplier for row in shown} - {None, 0.0}) > 1:
        drawn.append(_against_noise(shown, style, f"{name}-noise"))
    drawn += sweeps(shown, name)
    return [*drawn, _implied(shown, style, f"{name}-implied")]


def epsilon_words(row: Row, digits: int = 2) -> str:
    """Formats the claimed epsilon of a row: ∞ if none is proved, n/a without a claim; marked if unverified.

    Args:
        row: of the board.
        digits: decimals.
    """
    if row.claim is None:
        return "n/a"
    if row.claim.epsilon is None:
        return "∞"
    return f"{row.claim.epsilon:.{digits}f}" + (" unverified" if row.claim.unverified else "")


def facets(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Splits rows into a facet for each guarantee of a contestant: (guarantee in words, rows).

    Controls of other guarantees are in every facet, as references. With a single finite guarantee, or without a
    membership attack, there is a single facet, without words.

    Args:
        rows: of a section, in the order of the board.
    """
    guarantees = dict.fromkeys(row.guarantee for row in rows if row.control is None)
    finite = [guarantee for guarantee in guarantees if math.isfinite(guarantee[0])]
    if len(finite) < 2 or not any(row.auc.value is not None for row in rows):
        return [("", list(rows))]
    ordered = sorted(guarantees, key=lambda guarantee: guarantee[0])
    references = [row.guarantee for row in rows if row.guarantee not in guarantees]
    return [(guarantee_words(g), [row for row in rows if row.guarantee in (g, *references)]) for g in ordered]


def facet_of(figure: Figure, words: str, *, first: bool) -> Figure:
    """Names a facet after its guarantee; its first sentence, which all facets share, stays with the first."""
    if not words:
        return figure
    return replace(figure, title=f"{figure.title}, {words}", caption=figure.caption if first else figure.caption[1:])


def _trade_off(rows: Sequence[Row], style: Style, name: str, *, over: Sequence[Row]) -> Figure:
    """Accuracy against leakage of a facet, on the axes of all rows of the section (`over`)."""
    if not any(row.auc.value is not None for row in over):
        figure = _against_epsilon(rows, style, name)
        remark = "No membership attack was run, so the claim stands where its success would be."
        return Figure(**{**vars(figure), "title": "Utility against claimed ε", "caption": (remark, *figure.caption)})
    kept = [row for row in rows if row.auc.value is not None and row.accuracy.value is not None]
    points = [
        _point(row, row.auc.value, row.accuracy, x_ends=row.auc.ends, label=_label(row, rows), path=_path(row))
        for row in kept
        if row.auc.value is not None
    ]
    chance = AUC.chance or 0.0
    measured = [row for row in over if row.auc.value is not None and row.accuracy.value is not None]
    ends = _ends(row.auc for row in measured)
    # Chance is in view however far all defenses are from it, and facets share their axes.
    x = axis_over("worst-case AUC of membership attacks", [chance, *ends], least=AUC.least, most=AUC.most)
    accuracies = _ends(row.accuracy for row in measured)
    y = axis_over("accuracy on held-out data", accuracies, least=ACCURACY.least, most=ACCURACY.most)
    caption = [
        "Up is more useful, left leaks less. Bars are 95 % intervals; that of the worst-case AUC reaches over "
        "the attacks compared, so its value need not lie in the middle. An outline alone has no proved ε.",
    ]
    return _figure(
        name, "Utility against leakage", points, x, y, style, caption + _left_out(rows, kept), chance=AUC.chance,
    )  # fmt: skip


def _against_epsilon(rows: Sequence[Row], style: Style, name: str) -> Figure:
    # A logarithmic axis has no place for ε 0, so the control on public examples is a horizontal line.
    public_only = [row for row in rows if row.control == "public_only"]
    rows = [row for row in rows if row.control != "public_only"]
    kept = [row for row in rows if row.claim is not None and row.accuracy.value is not None]
    points = [_point(row, _claimed(row), row.accuracy, path=_path(row)) for row in kept]
    x = _epsilon_axis(points)
    levels, words = public_levels(public_only)
    caption = ["Bars are 95 % intervals. The claim is exact accounting of the steps taken, so it has none.", *words]
    title = "Accuracy against claimed ε"
    notes = caption + _left_out(rows, kept)
    y = _accuracy_axis(points, levels)
    return _figure(name, title, points, x, y, style, notes, dodge=True, levels=levels)


def _against_noise(rows: Sequence[Row], style: Style, name: str) -> Figure:
    kept = [row for row in rows if row.noise_multiplier and row.accuracy.value is not None]
    ours = [
        # Filled marks only: here outlines are papers' figures, in other plots rows without a proved epsilon.
        _point(row, row.noise_multiplier, row.accuracy, path=_path(row), hollow=False)
        for row in kept
        if row.noise_multiplier
    ]
    theirs = _reported(kept)
    caption = ["Bars are 95 % intervals."]
    if theirs:
        caption.append("Outlines are figures that papers report for the same setting; their sources are listed below.")
    # Papers' figures are drawn at the noise of our rows, so our rows span the axis.
    x = axis_over("noise multiplier (noise std / sensitivity)", [point.x for point in ours], log=True)
    title = "Accuracy against the noise multiplier"
    points = [*ours, *theirs]
    notes = caption + _left_out(rows, kept, noise=True)
    return _figure(name, title, points, x, _accuracy_axis(points), style, notes, dodge=True)


def sweeps(rows: Sequence[Row], name: str) -> list[Figure]:
    """PSNR against sparsity and against rank, for each variant of the release, if rows sweep them."""
    drawn = []
    for swept in SWEPT:
        for variant in KINDS[PSNR.kind].variants:
            points, floors, left_out = sweep_points(rows, swept, variant)
            if len({point.x for point in points}) < 2:
                continue
            y = axis_over(PSNR.title, [v for p in points for v in _y_values(p)] + floors, least=PSNR.least)
            x = axis_over(swept.title, [point.x for point in points], log=swept.log)
            caption = [
                f"Of images found in one update {variant.preposition} its noise, by the strongest attack; higher leaks "
                "more. Bars are 95 % intervals, simultaneous over the attacks compared.",
            ]
            if floors:
                least, most = (f"{end:.1f}" for end in (min(floors), max(floors)))
                span = least if least == most else f"{least} to {most}"
                caption.append(f"The mean public image has {PSNR.with_unit(span)}: at or below that nothing was found.")
            title = f"{PSNR.label} against {swept.label}, {variant.label}"
            # A series here is a sweep over several rows, so it gets its own colour and marker.
            style = styles({point.series: point.series.partition(",")[0] for point in points})
            notes = [*caption, *left_out]
            drawn.append(_figure(f"{name}-{swept.name}-{variant.name}", title, points, x, y, style, notes, dodge=True))
    return drawn


def _reported(rows: Sequence[Row]) -> list[Point]:
    """Papers' accuracies, at the noise of the rows to which they belong."""
    points = []
    for row in rows:
        records = [r for cell in row.cells if cell.kind == ACCURACY.kind for r in cell.records.values()]
        figures = dict.fromkeys((f.value, f.source) for r in records for f in r.reported if f.metric == ACCURACY.name)
        points += [
            Point(
                x=row.noise_multiplier or 0.0,
                y=value,
                series=row.method,
                title=f"{row.label}: accuracy {value:g} reported in {source}",
                path=f"reported {_path(row)}",
                hollow=True,
            )
            for value, source in figures
            # A figure in per cent, such as 93.2, is off the axis.
            if value == ACCURACY.clip(value)
        ]
    return points


def _implied(rows: Sequence[Row], style: Style, name: str) -> Figure:
    """Epsilon implied by the attacks' scores, against the claim, which it must not exceed."""
    title = "Empirical against claimed ε"
    estimates = {i: _implied_by(row) for i, row in enumerate(rows)}
    informed_attacks = sorted({cell.attack or "" for row in rows for cell in row.cells if _knows_participation(cell)})
    aside = []
    if informed_attacks:
        names = ", ".join(informed_attacks)
        aside.append(f"Told who took part, so not comparable with a claim that sampling amplifies: {names}.")
    kept = [
        (row, estimates[i]) for i, row in enumerate(rows) if estimates[i].value is not None and row.claim is not None
    ]
    if not kept:
        reasons = dict.fromkeys(estimate.reason or "" for estimate in estimates.values())
        why = "; ".join(filter(None, reasons)) or "there are no rows"
        return Figure(name=name, title=title, caption=(f"Not shown: {why}.", *aside))
    points = [
        Point(
            x=_claimed(row),
            y=estimate.value or 0.0,
            y_ends=estimate.ends,
            series=row.method,
            label=_label(row, rows, with_epsilon=False),
            title=f"{row.label}: implied ε {estimate.words(2)} by {estimate.attack}, claimed ε {epsilon_words(row)}",
            hollow=math.isinf(_claimed(row)),
        )
        for row, estimate in kept
    ]
    y = axis_over("ε implied by the strongest attack", [0.0, *(v for p in points for v in _y_values(p))], least=0)
    over = [row.label for row, estimate in kept if estimate.value is not None and estimate.value > _claimed(row)]
    caption = [
        "What an attack's true and false positive rates, at a threshold fixed on other candidates, imply about ε. "
        "All scores of one run share its noise, so this is no proved lower bound, and the shaded region is where a "
        "claim would be in doubt, not where it is refuted by proof.",
        "Bars are 95 % intervals over seeds.",
        f"Above the diagonal: {', '.join(over) if over else 'none'}.",
        *aside,
    ]
    caption += [
        f"Not shown: {row.label}, {estimates[i].reason or 'no claim'}."
        for i, row in enumerate(rows)
        if estimates[i].value is None or row.claim is None
    ]
    numbers = tuple(
        (row.label, epsilon_words(row), estimate.words(2), estimate.attack or "", estimate.reason or "")
        for row, estimate in kept
    )
    figure = _figure(name, title, points, _epsilon_axis(points), y, style, caption, equality=True, dodge=True)
    headers = ("defense", "claimed ε", "implied ε", "by", "remark")
    return Figure(**{**vars(figure), "headers": headers, "numbers": numbers})


def _implied_by(row: Row) -> Estimate:
    cells = [cell for cell in row.cells if cell.kind == IMPLIED.kind and not _knows_participation(cell)]
    cells = [cell for cell in cells if any(IMPLIED.name in record.metrics for record in cell.records.values())]
    missing = f"no {IMPLIED.kind} attack in these records has the metric {IMPLIED.name}"
    worst = worst_case(IMPLIED.name, cells, missing=missing)
    if worst.value is None or worst.ends is not None:
        return worst
    # Weak attacks imply 0 under every seed, so they have no interval; the strongest attack's own is shown then.
    strongest = next(cell for cell in cells if cell.attack == worst.attack)
    own = over_seeds(IMPLIED.name, strongest, looks=worst.looks)
    if own.ends is None:
        return worst
    reason = f"the interval is of {worst.attack} alone: {worst.reason}"
    return replace(worst, low=own.low, high=own.high, interval=own.interval, reason=reason)


def _knows_participation(cell: BoardCell) -> bool:
    known = any("participation_known" in record.flags for record in cell.records.values())
    return cell.kind == IMPLIED.kind and known


def _figure(
    name: str,
    title: str,
    points: Sequence[Point],
    x: Axis,
    y: Axis,
    style: Style,
    caption: Sequence[str],
    *,
    chance: float | None = None,
    equality: bool = False,
    dodge: bool = False,
    levels: Sequence[Level] = (),
) -> Figure:
    # Imported here because Altair takes a second to import, and pages without plots do without.
    from .specifications import scatter

    if not points:
        return Figure(name=name, title=title, caption=("Nothing to draw.", *caption))
    if dodge:
        caption = [*caption, "Methods at the same place are set side by side."]
    specification = scatter(points, x=x, y=y, style=style, chance=chance, equality=equality, dodge=dodge, levels=levels)
    return Figure(name=name, title=title, specification=specification, caption=tuple(caption))


def _point(
    row: Row,
    x: float,
    y: Estimate,
    *,
    x_ends: tuple[float, float] | None = None,
    label: str = "",
    path: str = "",
    hollow: bool | None = None,
) -> Point:
    leak = "" if row.auc.value is None else f", worst AUC {row.auc.words(2)} by {row.auc.attack}"
    # The caller left out rows without accuracy; 0.0 is for the type checker.
    return Point(
        x=x,
        y=y.value or 0.0,
        x_ends=x_ends,
        y_ends=y.ends,
        series=row.method,
        label=label,
        title=f"{row.label}: accuracy {y.words(ACCURACY.digits)}{leak}, claimed ε {epsilon_words(row)}",
        path=path,
        hollow=math.isinf(_claimed(row)) if hollow is None else hollow,
    )


def _label(row: Row, rows: Sequence[Row], *, with_epsilon: bool = True) -> str:
    """Label of a mark: a name if its method has a single row, the budget alone if a line joins several."""
    epsilon = f"ε {epsilon_words(row, 1)}"
    if sum(row_of_method.method == row.method for row_of_method in rows) == 1:
        # 28 letters take half of a narrow plot; the legend has the full names.
        name = row.method if len(row.method) <= 28 else row.defense.name
        return f"{name}, {epsilon}" if with_epsilon else name
    return epsilon if with_epsilon else ""


def _path(row: Row) -> str:
    """Key of the line that joins the budgets of a method."""
    return f"{row.method} {row.control}"


def _claimed(row: Row) -> float:
    return math.inf if row.claim is None or row.claim.epsilon is None else row.claim.epsilon


def _epsilon_axis(points: Sequence[Point]) -> Axis:
    infinite = any(math.isinf(point.x) for point in points)
    return axis_over("claimed ε", [point.x for point in points], log=True, infinity=infinite)


def _accuracy_axis(points: Sequence[Point], levels: Sequence[Level] = ()) -> Axis:
    values = [*(v for p in points for v in _y_values(p)), *(level.y for level in levels)]
    return axis_over("accuracy on held-out data", values, least=ACCURACY.least, most=ACCURACY.most)


def _y_values(point: Point) -> tuple[float, ...]:
    return (point.y, *(point.y_ends or ()))


def _ends(estimates: Iterable[Estimate]) -> list[float]:
    return [v for e in estimates for v in (e.value, e.low, e.high) if v is not None]


def _left_out(rows: Sequence[Row], kept: Sequence[Row], *, noise: bool = False) -> list[str]:
    """Sentences on why rows are not in a plot."""
    sentences = []
    for row in rows:
        # By identity: `==` would compare rows record by record.
        if any(row is kept_row for kept_row in kept):
            continue
        if row.accuracy.value is None:
            why = row.accuracy.reason
        elif noise:
            why = "no noise multiplier above 0, or not one number"
        elif row.claim is None:
            why = "no claim in these records"
        else:
            why = row.auc.reason
        sentences.append(f"Not shown: {row.label}, {why}.")
    return sentences
