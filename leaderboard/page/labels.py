"""Placement of labels beside their marks, and horizontal shifts of marks that would cover one another."""

import math
from collections.abc import Sequence
from itertools import pairwise

from .axes import Axis
from .plots import Point

LabelPlace = tuple[float, float, str]
"""Offset from the mark in x and y, in pixels, and the alignment of the text."""

_SIDES = (
    *((8, -9, "left"), (-8, -9, "right"), (8, 10, "left"), (-8, 10, "right"), (10, 0, "left"), (-10, 0, "right")),
    *((0, -16, "center"), (0, 17, "center"), (8, -22, "left"), (8, 23, "left"), (-8, -22, "right"), (-8, 23, "right")),
    *((10, -36, "left"), (10, 37, "left"), (-10, -36, "right"), (-10, 37, "right")),
)
"""Candidate places of a label, the nearest first."""

_BESIDE = 8
"""Number of the candidate places so near that a label among several lines is read as that of its own."""

_Box = tuple[float, float, float, float]
"""Left, upper, right and lower end, in pixels."""


def shifts_of(points: Sequence[Point]) -> list[float]:
    """Offsets, in pixels, that move series at the same x apart."""
    at: dict[float, list[str]] = {}
    for point in points:
        if point.series not in at.setdefault(point.x, []):
            at[point.x].append(point.series)
    # 9 pixels apart, marks overlap only at their rims. Many series share 36 pixels, the strip for infinity.
    apart = {x: min(9.0, 36.0 / max(1, len(series) - 1)) for x, series in at.items()}
    return [round(apart[p.x] * (at[p.x].index(p.series) - (len(at[p.x]) - 1) / 2), 2) for p in points]


def label_places(
    points: Sequence[Point], x: Axis, y: Axis, shifts: Sequence[float], width: float, height: float
) -> list[LabelPlace | None]:
    """Places each label clear of marks, intervals and other labels; None where there is no such place."""
    centres, occupied = [], list[_Box]()
    for point, shift in zip(points, shifts, strict=True):
        across, down = width * x.share(point.x) + shift, height * (1 - y.share(point.y))
        low, high = (height * (1 - y.share(end)) for end in point.y_ends or (point.y, point.y))
        left, right = (width * x.share(end) for end in point.x_ends or (point.x, point.x))
        centres.append((across, down))
        occupied += [(across - 7, down - 7, across + 7, down + 7), (across - 1, high, across + 1, low)]
        occupied.append((left, down - 1, right, down + 1))
    places: list[LabelPlace | None] = []
    for point, shift, (across, down) in zip(points, shifts, centres, strict=True):
        place = _free_place(point.label, across, down, occupied, width, height) if point.label else None
        places.append(None if place is None else (round(place[0] + shift, 2), *place[1:]))
    return places


def line_label_places(
    candidates: Sequence[Point],
    marks: Sequence[Point],
    lines: Sequence[Sequence[tuple[float, float]]],
    x: Axis,
    y: Axis,
    width: float,
    height: float,
) -> list[LabelPlace | None]:
    """Places the label of each line beside one of its candidates, clear of marks, lines and other labels.

    Args:
        candidates: points of lines with the lines' labels, the best first.
        marks: of the lines.
        lines: places of each line, from left to right.
        x: horizontal axis.
        y: vertical axis.
        width: of the drawing; pixels.
        height: of the drawing; pixels.

    Returns:
        A place for the first candidate of each label that has one, None for all others.
    """
    occupied = [box for line in lines for box in _boxes(line, x, y, width, height)]
    for mark in marks:
        across, down = width * x.share(mark.x), height * (1 - y.share(mark.y))
        occupied.append((across - 6, down - 6, across + 6, down + 6))
    places: list[LabelPlace | None] = []
    placed: set[tuple[str, str]] = set()
    for point in candidates:
        key = point.series, point.label
        place = None
        if point.label and key not in placed:
            across, down = width * x.share(point.x), height * (1 - y.share(point.y))
            place = _free_place(point.label, across, down, occupied, width, height, sides=_BESIDE)
        if place is not None:
            placed.add(key)
        places.append(place)
    return places


def _free_place(
    label: str,
    across: float,
    down: float,
    occupied: list[_Box],
    width: float,
    height: float,
    *,
    sides: int = len(_SIDES),
) -> LabelPlace | None:
    """First of the candidate places that is inside of the drawing and free, which is then occupied."""
    # 6.3 pixels: upper estimate of a letter's width, because the reader's font is unknown.
    wide = 6.3 * len(label)
    for dx, dy, align in _SIDES[:sides]:
        left = across + dx - wide * {"left": 0, "center": 0.5, "right": 1}[align]
        box = (left, down + dy - 7, left + wide, down + dy + 7)
        inside = box[0] >= 0 and box[2] <= width + 8 and box[1] >= 0 and box[3] <= height
        if inside and not any(a < box[2] and box[0] < c and b < box[3] and box[1] < d for a, b, c, d in occupied):
            occupied.append(box)
            return round(dx, 2), dy, align
    return None


def _boxes(line: Sequence[tuple[float, float]], x: Axis, y: Axis, width: float, height: float) -> list[_Box]:
    """Boxes that cover a line, of at most 8 pixels across each."""
    corners = [(width * x.share(a), height * (1 - y.share(b))) for a, b in line]
    boxes = []
    for (left, first), (right, last) in pairwise(corners):
        pieces = max(1, math.ceil(max(abs(right - left), abs(last - first)) / 8))
        ends = [(left + (right - left) * i / pieces, first + (last - first) * i / pieces) for i in range(pieces + 1)]
        boxes += [(a, min(b, d) - 1, c, max(b, d) + 1) for (a, b), (c, d) in pairwise(ends)]
    return boxes
