"""Placement of labels beside their marks, and horizontal shifts of marks that would cover one another."""

from collections.abc import Sequence

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
    centres, occupied = [], []
    for point, shift in zip(points, shifts, strict=True):
        across, down = width * x.share(point.x) + shift, height * (1 - y.share(point.y))
        low, high = (height * (1 - y.share(end)) for end in point.y_ends or (point.y, point.y))
        left, right = (width * x.share(end) for end in point.x_ends or (point.x, point.x))
        centres.append((across, down))
        occupied += [(across - 7, down - 7, across + 7, down + 7), (across - 1, high, across + 1, low)]
        occupied.append((left, down - 1, right, down + 1))
    places: list[LabelPlace | None] = []
    for point, shift, (across, down) in zip(points, shifts, centres, strict=True):
        places.append(None)
        # 6.3 pixels: upper estimate of a letter's width, because the reader's font is unknown.
        wide = 6.3 * len(point.label)
        for dx, dy, align in _SIDES if point.label else ():
            left = across + dx - wide * {"left": 0, "center": 0.5, "right": 1}[align]
            box = (left, down + dy - 7, left + wide, down + dy + 7)
            inside = box[0] >= 0 and box[2] <= width + 8 and box[1] >= 0 and box[3] <= height
            if inside and not any(a < box[2] and box[0] < c and b < box[3] and box[1] < d for a, b, c, d in occupied):
                occupied.append(box)
                places[-1] = (round(dx + shift, 2), dy, align)
                break
    return places
