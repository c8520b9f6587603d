"""Marks on the lines of a plot and places for their labels, by which lines are told apart without colour.

The marks of several lines are staggered, so that lines that coincide show all of their marks. A label belongs where its
line is farthest from the others.
"""

from collections.abc import Sequence

import numpy as np
from numpy import ndarray

from .axes import Axis
from .plots import PlotLine, Point


def marks_on(lines: Sequence[PlotLine], x: Axis, y: Axis, *, count: int) -> list[Point]:
    """Returns places of each line, evenly spread, those farthest from all other lines first.

    Args:
        lines: of the plot.
        x: horizontal axis.
        y: vertical axis.
        count: marks of a line, at most; lines of few points have fewer.
    """
    shares = [_shares(line, x, y) for line in lines]
    marks: list[tuple[float, Point]] = []
    for number, (line, (across, up)) in enumerate(zip(lines, shares, strict=True)):
        if not len(across):
            continue
        others = [pair for place, pair in enumerate(shares) if place != number and len(pair[0])]
        spread = across[0] + (across[-1] - across[0]) * (np.arange(count) + (number + 0.5) / len(lines)) / count
        for place in dict.fromkeys(int(np.abs(across - share).argmin()) for share in spread):
            apart = min((abs(up[place] - np.interp(across[place], *pair)) for pair in others), default=1.0)
            at_x, at_y = x.at(across[place]), y.at(up[place])
            point = Point(x=at_x, y=at_y, series=line.series, label=line.label, title=line.title)
            marks.append((float(apart), point))
    return [point for _, point in sorted(marks, key=lambda pair: -pair[0])]


def _shares(line: PlotLine, x: Axis, y: Axis) -> tuple[ndarray, ndarray]:
    """Places of a line inside of the axes, as fractions of the drawing."""
    inside = [(a, b) for a, b in line.places if a >= x.low and b >= y.low]
    return np.array([x.share(a) for a, _ in inside]), np.array([y.share(b) for _, b in inside])
