"""Lines over seeds: means, the band from the least to the largest seed, and the plots that show several of them.

A plot holds as many lines as there are markers, so more methods are dealt to several plots with the same axes. Long
curves are thinned, and keep the extremes of every stretch.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from ..board.rows import Row
from ..records.arrays import read_table
from ..records.files import read_bytes
from ..records.folder import ArraysFolder, arrays_path
from ..records.left_out import FLAG, REASON
from ..records.record import Record, RecordError
from .axes import Axis
from .figures import Figure
from .plots import COLOURS, SHAPES, Band, Level, Point

MOST = len(SHAPES)
"""Largest number of lines in a plot, each with a marker of its own; the second of the same colour is dashed."""

POINTS = 120
"""Largest number of points of a line that are spread evenly, and again of those spread over the logarithm."""

STRETCHES = 30
"""Number of stretches of a thinned line of which the least and the largest value are kept, too."""

MARKS = 4
"""Number of marks on a line; they tell lines apart and hold the numbers of tooltips."""


T = TypeVar("T")


def readable_tables(rows: Iterable[Row], read: Callable[[Row], T | None]) -> tuple[list[T], list[str]]:
    """Returns the tables of rows that have arrays, and a sentence about each row whose arrays cannot be shown.

    Args:
        rows: of a section; negative controls are left out.
        read: returns a row's table, None without arrays; raises `RecordError` for bad ones.
    """
    tables: list[T] = []
    left_out: list[str] = []
    for row in rows:
        try:
            if row.control != "negative" and (table := read(row)) is not None:
                tables.append(table)
        except RecordError as error:
            left_out.append(f"Not shown: {row.label}, {error}.")
    return tables, left_out


@dataclass(frozen=True, kw_only=True)
class SeedLine:
    """Quantity of a row as a line over seeds.

    Attributes:
        series: name in the legend.
        style: number of its colour, name of its marker.
        x: ascending positions, as of rounds.
        y: of each seed.
        titles: words about each position, for tooltips; without the value.
        marked: positions that have a mark; None to choose `MARKS` of them.
        hollow: whether its marks are outlines.
        extra: further marks.
    """

    series: str
    style: tuple[int, str]
    x: Float[ndarray, " positions"]
    y: Float[ndarray, "seeds positions"]
    titles: Sequence[str]
    marked: Sequence[int] | None = None
    hollow: bool = False
    extra: tuple[Point, ...] = ()

    @property
    def mean(self) -> Float[ndarray, " positions"]:
        """Mean over seeds."""
        return self.y.mean(axis=0)

    @property
    def low(self) -> Float[ndarray, " positions"]:
        """Least seed."""
        return self.y.min(axis=0)

    @property
    def high(self) -> Float[ndarray, " positions"]:
        """Largest seed."""
        return self.y.max(axis=0)

    @property
    def values(self) -> list[float]:
        """Numbers that its vertical axis must hold."""
        return [*self.low.tolist(), *self.high.tolist(), *(point.y for point in self.extra)]


def read_columns(record: Record, folder: ArraysFolder, names: Sequence[str]) -> dict[str, Float[ndarray, " rows"]]:
    """Reads columns of numbers beside a record.

    Raises:
        RecordError: there are no arrays, or they lack a column or hold no numbers.
    """
    if record.arrays is None:
        raise RecordError("no arrays lie beside its record")
    if FLAG in record.flags:
        raise RecordError(REASON)
    try:
        table = read_table(read_bytes(arrays_path(record, folder), "arrays"), names)
        return {name: table[name].to_numpy().astype(np.float64) for name in names}
    except (OSError, TypeError, ValueError) as error:
        if isinstance(error, RecordError):
            raise
        raise RecordError("its arrays cannot be read") from None


LARGEST = 1e15
"""Largest number that is drawn: a float still counts bytes exactly, and no axis overflows."""


def refuse_outside(
    columns: Mapping[str, Float[ndarray, " rows"]],
    name: str,
    most: float = LARGEST,
    *,
    whole: bool = False,
    missing: bool = False,
    infinite: bool = False,
) -> None:
    """Refuses a column with numbers that its quantity cannot have.

    Args:
        columns: of a record's arrays.
        name: of the column.
        most: largest number; the least is 0.
        whole: whether its numbers are whole.
        missing: whether they may be NaN.
        infinite: whether they may be infinite.

    Raises:
        RecordError: a number is negative, too large or NaN, or not whole.
    """
    values = columns[name]
    absent = (np.isnan(values) & missing) | (np.isposinf(values) & infinite)
    inside = (values >= 0) & (values <= most) & ((values == np.floor(values)) | (not whole))
    if not (absent | inside).all():
        kind = "whole numbers" if whole else "numbers"
        raise RecordError(f"its arrays must hold {kind} from 0 to {most:g} as {name}")


def dealt(lines: Sequence[SeedLine]) -> list[Sequence[SeedLine]]:
    """Deals lines to as few plots as hold them, in order and evenly."""
    plots = -(-len(lines) // MOST)
    return [lines[i * len(lines) // plots : (i + 1) * len(lines) // plots] for i in range(plots)]


def band_figures(
    name: str,
    title: str,
    lines: Sequence[SeedLine],
    x: Axis,
    y: Axis,
    *,
    digits: int,
    caption: Sequence[str],
    levels: Sequence[Level] = (),
    numbered: tuple[Sequence[str], Sequence[Sequence[str]]] = ((), ()),
) -> list[Figure]:
    """Draws lines, in as many plots as they take.

    Args:
        name: unique on the page; a prefix of the plots' names.
        title: of the plots.
        lines: in the order of the board.
        x: horizontal axis, of all plots.
        y: vertical axis, of all plots.
        digits: decimals of values in tooltips.
        caption: sentences.
        levels: horizontal lines in every plot.
        numbered: headers and rows of a table, which stands with the last plot.
    """
    # Imported here because Altair takes a second to import, and pages without plots do without.
    from .specifications import scatter

    figures, parts = [], dealt(lines)
    for number, part in enumerate(parts):
        style = dict(zip([line.series for line in part], distinct([line.style for line in part]), strict=True))
        points = [point for i, line in enumerate(part) for point in _marks(line, x, i / len(part), digits)]
        colours = [style[line.series][0] for line in part]
        bands = [_band(line, dashed=colours[i] in colours[:i]) for i, line in enumerate(part)]
        sentences = list(caption) if not number else ["The further methods, on the same axes."]
        if any(style[line.series] != line.style for line in part):
            sentences.append("Methods that share a colour or a marker on the board have others here.")
        part_title = f"{title} ({number + 1} of {len(parts)})" if len(parts) > 1 else title
        headers, rows = numbered if number == len(parts) - 1 else ((), ())
        figures.append(
            Figure(
                name=f"{name}-{number + 1}" if number else name,
                title=part_title,
                specification=scatter(points, x=x, y=y, style=style, bands=bands, levels=levels),
                caption=tuple(sentences),
                headers=tuple(headers),
                numbers=tuple(map(tuple, rows)),
            )
        )
    return figures


def distinct(styles: Sequence[tuple[int, str]]) -> list[tuple[int, str]]:
    """Gives lines that share a colour or a marker another that is free, if any is; the first keeps its own.

    Args:
        styles: at most `MOST` pairs (colour, marker).
    """
    chosen: list[tuple[int, str]] = []
    for colour, shape in styles:
        colours, shapes = {c for c, _ in chosen}, {s for _, s in chosen}
        chosen.append(
            (
                next((c for c in (colour, *range(COLOURS)) if c not in colours), colour),
                next(s for s in (shape, *SHAPES) if s not in shapes),
            )
        )
    return chosen


def seeds_words(numbers: Iterable[int]) -> str:
    """Number of seeds behind lines, and the meaning of their bands."""
    counts = sorted(set(numbers))
    if counts == [1]:
        return "Lines are of one seed, so they have no band."
    words = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return (
        f"Lines are means over {words} seeds; a band reaches from the least to the largest of them, and is no "
        "confidence interval."
    )


def kept_positions(count: int) -> list[int]:
    """Positions of a thinned line: all of a short one, else evenly and logarithmically spread, ends included."""
    if count <= POINTS:
        return list(range(count))
    even = np.linspace(0, count - 1, POINTS)
    early = np.geomspace(1, count, POINTS) - 1
    return np.unique(np.concatenate([even, early]).round().astype(int)).tolist()


def _with_extremes(line: SeedLine, kept: Sequence[int]) -> list[int]:
    """Adds the least and the largest value of every stretch of a thinned line, so that no drop or peak is lost."""
    count = len(line.x)
    if len(kept) == count:
        return [*kept]
    edges = np.linspace(0, count, STRETCHES + 1).astype(int)
    further = [
        i + int(offset)
        for i, j in pairwise(edges.tolist())
        for offset in (line.low[i:j].argmin(), line.high[i:j].argmax())
    ]
    return sorted({*kept, *further})


def _band(line: SeedLine, *, dashed: bool) -> Band:
    kept = _with_extremes(line, kept_positions(len(line.x)))
    parts = {"x": line.x, "y": line.mean, "low": line.low, "high": line.high}
    return Band(series=line.series, dashed=dashed, **{key: values[kept].tolist() for key, values in parts.items()})


def _marks(line: SeedLine, x: Axis, offset: float, digits: int) -> list[Point]:
    """Marks of a line; those of other lines are shifted along, so that they do not cover one another."""
    places = np.array([x.share(value) for value in line.x])
    targets = places[0] + (places[-1] - places[0]) * (np.arange(MARKS) + offset) / MARKS
    nearest = {int(np.abs(places - share).argmin()) for share in targets}
    marked = sorted(nearest) if line.marked is None else line.marked
    points = [
        Point(
            x=float(line.x[i]),
            y=float(line.mean[i]),
            series=line.series,
            title=f"{line.series}, {line.titles[i]}: {_words(line, i, digits)}",
            hollow=line.hollow,
        )
        for i in marked
    ]
    return [*points, *line.extra]


def _words(line: SeedLine, i: int, digits: int) -> str:
    words = f"{line.mean[i]:.{digits}f}"
    if len(line.y) == 1:
        return words
    return f"{words} ({line.low[i]:.{digits}f} to {line.high[i]:.{digits}f} over {len(line.y)} seeds)"
