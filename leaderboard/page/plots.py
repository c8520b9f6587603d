"""Scatter plots as inline SVG, which follow the page's colours, light and dark, and load nothing from outside.

A plotting library writes colours, fonts and sizes into the file, out of reach of a style sheet, so these are drawn by
hand. Plots do not depend on records: they take points with optional intervals on both axes. All text is escaped.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from .axes import Axis

Rectangle = tuple[float, float, float, float]

# Margins, in units of the drawing, for tick labels and axis names.
LEFT, RIGHT, TOP, BOTTOM = 62.0, 16.0, 14.0, 50.0
INFINITY_WIDTH = 46.0
"""Width of the strip at the right edge for infinite values."""
_WIDEST = 36.0  # width of the marks at one x, in units of the drawing; fits into INFINITY_WIDTH

CHARACTER, LINE = 6.3, 12.0
"""Upper estimates of a letter's size in a label, in units of the drawing; the browser's font is unknown here."""

MARKERS = ("circle", "square", "up", "diamond", "down", "cross", "pentagon", "bar")
COLOURS = 7
"""Number of distinct colours in the style sheet, `--c0` to `--c6`; every series has a marker too."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """Mark of a plot.

    Attributes:
        x: position; infinity if the axis has a place for it.
        y: position.
        x_ends: ends of its interval in x; None without an interval.
        y_ends: ends of its interval in y; None without an interval.
        series: decides colour and marker.
        label: short words next to the mark; empty for none.
        title: all its numbers in words, shown on hovering and read aloud.
        path: marks of the same path are joined by a line, from left to right; empty for none.
        hollow: whether only its outline is drawn.
    """

    x: float
    y: float
    x_ends: tuple[float, float] | None = None
    y_ends: tuple[float, float] | None = None
    series: str
    label: str = ""
    title: str
    path: str = ""
    hollow: bool = False


def styles(series: Mapping[str, str]) -> dict[str, tuple[int, str]]:
    """Assigns a colour number to each family of series and a marker to each series, a function of the names alone.

    Args:
        series: name of a series -> name of its family.
    """
    families = sorted(set(series.values()))
    return {
        name: (families.index(series[name]) % COLOURS, MARKERS[i % len(MARKERS)])
        for i, name in enumerate(sorted(series))
    }


def scatter(
    points: Sequence[Point],
    *,
    x: Axis,
    y: Axis,
    style: Mapping[str, tuple[int, str]],
    title: str,
    name: str,
    width: float,
    height: float,
    chance: float | None = None,
    equality: bool = False,
    dodge: bool = False,
) -> Markup:
    """Draws a scatter plot.

    Args:
        points: marks; later marks are drawn on top.
        x: horizontal axis.
        y: vertical axis.
        style: series -> (colour, marker), see `styles`.
        title: read aloud by screen readers.
        name: unique on the page.
        width: in units of the drawing.
        height: in units of the drawing.
        chance: x at which a vertical line labelled "chance" is drawn; None for no line.
        equality: whether to draw y = x and shade the region above it.
        dodge: whether marks of several series at the same x are set side by side.

    Returns:
        An <svg> element.
    """
    shifts = _shifts(points) if dodge else {}
    frame = _Frame(x=x, y=y, width=width, height=height, shifts=shifts)
    back = [_grid(frame)]
    if equality:
        back.append(_equality(frame, name))
    if chance is not None and x.low <= chance <= x.high:
        at = frame.across(chance)
        back.append(_f('<line class="chance" x1="{}" y1="{}" x2="{}" y2="{}"/>', at, TOP, at, frame.bottom))
        back.append(_f('<text class="note" x="{}" y="{}">chance</text>', at + 4, TOP + 10))
    marks = [_mark(frame, point, style[point.series]) for point in points]
    lines = _lines(frame, points, style)
    labels = _labels(frame, points, style, chance)
    opening = _f(
        '<svg class="plot" viewBox="0 0 {} {}" role="img" aria-labelledby="{}-t"><title id="{}-t">{}</title>',
        width, height, name, name, title,
    )  # fmt: skip
    return Markup("").join([opening, *back, lines, *marks, labels, Markup("</svg>")])


@dataclass(frozen=True, kw_only=True)
class PlotLine:
    """Line of a plot.

    Attributes:
        places: (x, y) from left to right.
        series: decides the colour.
        title: shown on hovering and read aloud.
        bound: whether it is drawn dashed, as a bound and not a measurement.
    """

    places: Sequence[tuple[float, float]]
    series: str
    title: str
    bound: bool = False


def curves(
    lines: Sequence[PlotLine],
    *,
    x: Axis,
    y: Axis,
    style: Mapping[str, tuple[int, str]],
    title: str,
    name: str,
    width: float,
    height: float,
) -> Markup:
    """Draws lines, and y = x, which is chance.

    Args:
        lines: in the order in which they are drawn.
        x: horizontal axis.
        y: vertical axis.
        style: series -> (colour, marker), see `styles`.
        title: read aloud by screen readers.
        name: unique on the page.
        width: in units of the drawing.
        height: in units of the drawing.

    Returns:
        An <svg> element.
    """
    frame = _Frame(x=x, y=y, width=width, height=height, shifts={})
    low, high = max(x.low, y.low), min(x.high, y.high)
    ends = [(frame.across(value), frame.down(value)) for value in (low, high)]
    chance = _f('<line class="chance" x1="{}" y1="{}" x2="{}" y2="{}"/>', *ends[0], *ends[1])
    drawn = []
    for line in lines:
        # Points below an axis are cut, not drawn along its edge.
        inside = [(a, b) for a, b in line.places if a >= x.low and b >= y.low]
        places = " ".join(f"{frame.across(a):.1f},{frame.down(b):.1f}" for a, b in inside)
        kind = "joined hollow" if line.bound else "joined"
        shape = '<polyline class="{} c{}" points="{}"><title>{}</title></polyline>'
        drawn.append(_f(shape, kind, style[line.series][0], places, line.title))
    opening = _f(
        '<svg class="plot" viewBox="0 0 {} {}" role="img" aria-labelledby="{}-t"><title id="{}-t">{}</title>',
        width, height, name, name, title,
    )  # fmt: skip
    return Markup("").join([opening, _grid(frame), chance, *drawn, Markup("</svg>")])


def marker(colour: int, shape: str, *, hollow: bool = False) -> Markup:
    """Draws a single mark, for legends and tables.

    Args:
        colour: number of the colour.
        shape: of `MARKERS`.
        hollow: whether only its outline is drawn.
    """
    return _f(
        '<svg class="key c{}" viewBox="-8 -8 16 16" width="14" height="14" aria-hidden="true">{}</svg>',
        colour, _shape(shape, 0, 0, hollow),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Frame:
    x: Axis
    y: Axis
    width: float
    height: float
    shifts: Mapping[tuple[float, str], float]

    @property
    def right(self) -> float:
        """Right end of the finite part of the x axis."""
        return self.width - RIGHT - (INFINITY_WIDTH if self.x.infinity else 0)

    @property
    def bottom(self) -> float:
        return self.height - BOTTOM

    def across(self, value: float) -> float:
        if math.isinf(value):
            return self.width - RIGHT - INFINITY_WIDTH / 2
        return LEFT + self.x.share(value) * (self.right - LEFT)

    def place(self, point: Point) -> tuple[float, float]:
        """Centre of a point's mark."""
        return self.across(point.x) + self.shifts.get((point.x, point.series), 0.0), self.down(point.y)

    def down(self, value: float) -> float:
        # SVG's y grows downwards.
        return self.bottom - self.y.share(value) * (self.bottom - TOP)


def _shifts(points: Sequence[Point]) -> dict[tuple[float, str], float]:
    """Offsets that move series at the same x apart, in units of the drawing."""
    at: dict[float, list[str]] = {}
    for point in points:
        if point.series not in at.setdefault(point.x, []):
            at[point.x].append(point.series)
    # 9 units: no mark is wider than 13, so neighbours overlap by their rims alone. With many series, staying near their
    # x matters more than seeing each.
    apart = {x: min(9.0, _WIDEST / max(1, len(here) - 1)) for x, here in at.items()}
    return {(x, s): apart[x] * (i - (len(here) - 1) / 2) for x, here in at.items() for i, s in enumerate(here)}


def _f(template: str, *values: object) -> Markup:
    """Fills a template; numbers are rounded to screen precision, everything else is escaped."""
    # Tenths of a unit, so that drawings do not depend on the last digits of a machine's floats.
    words = (f"{v:.1f}".removesuffix(".0") if isinstance(v, float) else v for v in values)
    return Markup(template).format(*words)  # noqa: S704 -- templates are ours, and what is filled in is escaped


def _grid(frame: _Frame) -> Markup:
    parts = []
    for value in frame.y.ticks(6):
        at = frame.down(value)
        parts.append(_f('<line class="grid" x1="{}" y1="{}" x2="{}" y2="{}"/>', LEFT, at, frame.right, at))
        parts.append(_f('<text class="tick end" x="{}" y="{}">{}</text>', LEFT - 8, at + 4, f"{value:g}"))
    for value in frame.x.ticks(max(3, int(frame.width / 90))):
        at = frame.across(value)
        parts.append(_f('<line class="grid" x1="{}" y1="{}" x2="{}" y2="{}"/>', at, TOP, at, frame.bottom))
        parts.append(_f('<text class="tick mid" x="{}" y="{}">{}</text>', at, frame.bottom + 17, f"{value:g}"))
    if frame.x.infinity:
        strip = (frame.right, TOP, INFINITY_WIDTH, frame.bottom - TOP)
        parts.append(_f('<rect class="beyond" x="{}" y="{}" width="{}" height="{}"/>', *strip))
        at = frame.across(math.inf)
        parts.append(_f('<text class="tick mid infinity" x="{}" y="{}">∞</text>', at, frame.bottom + 17))
    edge = frame.width - RIGHT
    parts.append(_f('<line class="axis" x1="{}" y1="{}" x2="{}" y2="{}"/>', LEFT, frame.bottom, edge, frame.bottom))
    middle, half = (LEFT + edge) / 2, (TOP + frame.bottom) / 2
    parts.append(_f('<text class="name mid" x="{}" y="{}">{}</text>', middle, frame.height - 10, frame.x.title))
    turned = '<text class="name mid" transform="translate(14 {}) rotate(-90)">{}</text>'
    parts.append(_f(turned, half, frame.y.title))
    return Markup("").join(parts)


def _equality(frame: _Frame, name: str) -> Markup:
    """Line y = x, curved if only one axis is logarithmic, and the region above it."""
    # The line is curved if x alone is logarithmic; 64 segments look smooth.
    steps = 64
    ratio = frame.x.high / frame.x.low if frame.x.log else 0.0
    values = [
        frame.x.low * ratio ** (i / steps) if frame.x.log else frame.x.low + (frame.x.high - frame.x.low) * i / steps
        for i in range(steps + 1)
    ]
    inside = [value for value in values if frame.y.low <= value <= frame.y.high]
    if not inside:
        return Markup("")
    places = [(frame.across(value), frame.down(value)) for value in inside]
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
    region = f"{places[0][0]:.1f},{TOP:.1f} {path} {places[-1][0]:.1f},{TOP:.1f}"
    shaded = _f('<polygon class="refuted" points="{}"/>', region)
    line = _f('<polyline class="equality" id="{}-eq" points="{}"/>', name, path)
    words = _f('<text class="note" x="{}" y="{}">implied above claimed</text>', places[0][0] + 6, TOP + 12)
    return shaded + line + words


def _mark(frame: _Frame, point: Point, style: tuple[int, str]) -> Markup:
    colour, shape = style
    x, y = frame.place(point)
    bars = Markup("")
    if point.x_ends is not None and math.isfinite(point.x):
        low, high = (frame.across(end) for end in point.x_ends)
        bars += _f('<path class="bar" d="M{} {}H{}M{} {}v6M{} {}v6"/>', low, y, high, low, y - 3, high, y - 3)
    if point.y_ends is not None:
        low, high = (frame.down(end) for end in point.y_ends)
        bars += _f('<path class="bar" d="M{} {}V{}M{} {}h6M{} {}h6"/>', x, low, high, x - 3, low, x - 3, high)
    return _f(
        '<g class="point c{}"><title>{}</title>{}{}</g>',
        colour, point.title, bars, _shape(shape, x, y, point.hollow),
    )  # fmt: skip


_OUTLINES: dict[str, list[tuple[float, float]]] = {
    "square": [(-4.6, -4.6), (4.6, -4.6), (4.6, 4.6), (-4.6, 4.6)],
    "up": [(0, -6), (5.6, 4.4), (-5.6, 4.4)],
    "down": [(0, 6), (5.6, -4.4), (-5.6, -4.4)],
    "diamond": [(0, -6.4), (6.4, 0), (0, 6.4), (-6.4, 0)],
    "cross": [
        (-2, -6), (2, -6), (2, -2), (6, -2), (6, 2), (2, 2), (2, 6), (-2, 6), (-2, 2), (-6, 2), (-6, -2), (-2, -2),
    ],
    "pentagon": [(0, -6), (5.7, -1.9), (3.5, 4.9), (-3.5, 4.9), (-5.7, -1.9)],
    "bar": [(-2.4, -6.5), (2.4, -6.5), (2.4, 6.5), (-2.4, 6.5)],
}  # fmt: skip


def _shape(shape: str, x: float, y: float, hollow: bool) -> Markup:
    kind = "mark hollow" if hollow else "mark"
    if shape == "circle":
        return _f('<circle class="{}" cx="{}" cy="{}" r="5.2"/>', kind, x, y)
    corners = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in _OUTLINES[shape])
    return _f('<polygon class="{}" points="{}"/>', kind, corners)


def _lines(frame: _Frame, points: Sequence[Point], style: Mapping[str, tuple[int, str]]) -> Markup:
    drawn = []
    for path in dict.fromkeys(point.path for point in points if point.path):
        # By x, so that the line follows the budget in any order of the rows.
        members = sorted((p for p in points if p.path == path), key=lambda p: (p.x, p.y))
        if len(members) > 1:
            places = " ".join("{:.1f},{:.1f}".format(*frame.place(p)) for p in members)
            kind = "joined hollow" if members[0].hollow else "joined"
            colour = style[members[0].series][0]
            drawn.append(_f('<polyline class="{} c{}" points="{}"/>', kind, colour, places))
    return Markup("").join(drawn)


def _labels(
    frame: _Frame, points: Sequence[Point], style: Mapping[str, tuple[int, str]], chance: float | None
) -> Markup:  # fmt: skip
    """Places each label clear of marks and other labels; a label without such a place is left to the legend."""
    # Marks, their bars and the line of chance are obstacles from the start; each placed label becomes an obstacle.
    taken: list[Rectangle] = []
    for point in points:
        x, y = frame.place(point)
        # Upper bound of a mark's size: the bar's corners are 6.5 above and below its centre.
        taken.append((x - 7, y - 7, x + 7, y + 7))
        if point.y_ends is not None:
            # The high end first: it has the smaller y.
            taken.append((x - 1, frame.down(point.y_ends[1]), x + 1, frame.down(point.y_ends[0])))
        if point.x_ends is not None and math.isfinite(point.x):
            taken.append((frame.across(point.x_ends[0]), y - 1, frame.across(point.x_ends[1]), y + 1))
    if chance is not None:
        taken.append((frame.across(chance) - 1, TOP, frame.across(chance) + 1, frame.bottom))
    drawn = []
    for point in points:
        if not point.label:
            continue
        (x, y), wide = frame.place(point), CHARACTER * len(point.label)
        # Nearest first: next to the mark, then above and below, then farther off.
        places = [
            (x + 10, y + 4), (x + 10, y - 8), (x + 10, y + 16), (x - 10 - wide, y + 4), (x - 10 - wide, y - 8),
            (x - 10 - wide, y + 16), (x - wide / 2, y - 12), (x - wide / 2, y + 20), (x + 10, y - 20), (x + 10, y + 28),
            (x - 10 - wide, y - 20), (x - 10 - wide, y + 28),
        ]  # fmt: skip
        for left, base in places:
            box = (left, base - LINE + 2, left + wide, base + 3)
            inside = box[0] >= LEFT and box[2] <= frame.width - 4 and box[1] >= TOP and box[3] <= frame.bottom
            if inside and not any(_overlap(box, other) for other in taken):
                taken.append(box)
                text = '<text class="label c{}" x="{}" y="{}">{}</text>'
                drawn.append(_f(text, style[point.series][0], left, base, point.label))
                break
    return Markup("").join(drawn)


def _overlap(a: Rectangle, b: Rectangle) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
