"""Small still plots as SVG: a log-log ROC, a histogram of scores, and epsilons on equal scales.

The cells of a matrix have hundreds of plots, for which a Vega-Lite specification would be too large and too slow. Their
axes are symbols that a page defines once (`roc_axes`); colours are classes of the style sheet.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from .axes import Axis
from .labels import label_places, shifts_of
from .plots import SHAPES, Point

SIDE = 200
"""Side of a plot's square between its axes; pixels."""

_LEFT, _TOP, _BELOW = 46, 8, 34
"""Margins of the square for the labels of its axes; pixels."""

RocCurve = Sequence[tuple[float, float]]
"""(false positive rate, true positive rate) from left to right."""


def decades_below(least: float) -> int:
    """Number of decades of both axes below 1 that hold a rate; at least 1."""
    # 1e-9: 0.001 must not need a fourth decade by rounding.
    return max(1, math.ceil(-math.log10(least) - 1e-9))


def roc_axes(decades: Iterable[int]) -> Markup:
    """Axes of ROC plots, with the diagonal of chance, as symbols that `roc` refers to; empty for none.

    Args:
        decades: numbers of decades in use.
    """
    symbols = []
    for number in sorted(set(decades)):
        parts = [f'<path class="rules" d="{_grid(number)}"/>']
        parts.append(f'<path class="diagonal" d="M{_LEFT},{_TOP + SIDE}L{_LEFT + SIDE},{_TOP}"/>')
        for i in range(number + 1):
            label = f"{10.0**-i * 100:g} %"
            along = SIDE * (1 - i / number)
            parts.append(
                f'<text class="tick" x="{_LEFT + along:g}" y="{_TOP + SIDE + 14}" text-anchor="middle">{label}</text>'
            )
            parts.append(
                f'<text class="tick" x="{_LEFT - 5}" y="{_TOP + SIDE - along + 4:g}" text-anchor="end">{label}</text>'
            )
        middle = _LEFT + SIDE / 2
        parts.append(
            f'<text class="tick" x="{middle:g}" y="{_TOP + SIDE + 30}" text-anchor="middle">false positive rate</text>'
        )
        symbols.append(f'<symbol id="roc-axes-{number}" viewBox="0 0 {_WIDTH} {_HEIGHT}">{"".join(parts)}</symbol>')
    if not symbols:
        return Markup("")
    # Not display: none, which would hide the symbols where they are used, too.
    return Markup('<svg class="symbols" width="0" height="0" aria-hidden="true">{}</svg>').format(
        Markup("".join(symbols))  # noqa: S704 -- numbers and our own words
    )


def roc(measured: Sequence[RocCurve], allowed: RocCurve, *, decades: int, words: str) -> Markup:
    """Draws measured ROC curves, one per seed, and the most that the claim allows, dashed.

    Args:
        measured: curves of the seeds.
        allowed: bound of the claim; empty where it allows everything.
        decades: of both axes; a symbol of `roc_axes` has the same number.
        words: content, for screen readers.
    """
    paths = [f'<path class="seed" d="{_line(curve, decades)}"/>' for curve in measured]
    if allowed:
        paths.append(f'<path class="allowed" d="{_line(allowed, decades)}"/>')
    content = f'<use href="#roc-axes-{decades}" width="{_WIDTH}" height="{_HEIGHT}"/>{"".join(paths)}'
    return _picture(content, words, "roc")


def histogram(members: Sequence[int], non_members: Sequence[int], *, ends: tuple[str, str], words: str) -> Markup:
    """Draws two histograms over the same bins, each as shares of its group: members filled, non-members outlined.

    Args:
        members: count of each bin.
        non_members: count of each bin.
        ends: labels of the first and the last bin.
        words: content, for screen readers.
    """
    totals = max(1, sum(members)), max(1, sum(non_members))
    top = max(*(count / totals[0] for count in members), *(count / totals[1] for count in non_members))
    steps = [
        _steps([count / total / top for count in counts])
        for counts, total in zip((members, non_members), totals, strict=True)
    ]
    counts = (",".join(map(str, members)), ",".join(map(str, non_members)))
    axis = (
        f'<path class="axis" d="M{_LEFT},{_TOP + SIDE}h{SIDE}"/>'
        f'<text class="tick" x="{_LEFT + SIDE / 2:g}" y="{_TOP + SIDE + 30}" text-anchor="middle">score</text>'
    )
    label = Markup('<text class="tick" x="{}" y="{}" text-anchor="{}">{}</text>')
    sides = zip((_LEFT, _LEFT + SIDE), ("start", "end"), ends, strict=True)
    labels = Markup("").join(label.format(x, _TOP + SIDE + 14, anchor, text) for x, anchor, text in sides)
    content = f'{axis}{labels}<path class="members" d="{steps[0]}Z"/><path class="non-members" d="{steps[1]}"/>'
    return _picture(content, words, "histogram", members=counts[0], non_members=counts[1])


@dataclass(frozen=True, kw_only=True)
class ProvedMark:
    """Proved lower bound on epsilon beside the claim; an infinite claim stands at the right edge.

    Attributes:
        point: place, words and series; filled unless hollow.
        colour: number of its colour.
        shape: of `SHAPES`.
    """

    point: Point
    colour: int
    shape: str


def equal_scales(marks: Sequence[ProvedMark], *, x: Axis, y: Axis, words: str) -> Markup:
    """Draws marks on axes of equal scale and length, with the diagonal, above which a claim is refuted.

    Args:
        marks: later ones on top.
        x: horizontal axis; its strip for infinity, if it has one, lies beyond the square.
        y: vertical axis of the same range.
        words: content, for screen readers.
    """
    side = 2 * SIDE - 40
    wide = side * (x.end - x.low) / (x.high - x.low)
    left, top = 46, 10
    ticks = _linear_ticks(x.high)
    parts = [f'<path class="above" d="M{left},{top + side}L{left + side},{top}H{left}Z"/>']
    for tick in ticks:
        along = side * (tick - x.low) / (x.high - x.low)
        parts.append(
            f'<path class="rules" d="M{left + along:.1f},{top}v{side}M{left},{top + side - along:.1f}h{wide:.1f}"/>'
        )
        parts.append(
            f'<text class="tick" x="{left + along:.1f}" y="{top + side + 16}" text-anchor="middle">{tick:g}</text>'
        )
        parts.append(
            f'<text class="tick" x="{left - 7}" y="{top + side - along + 4:.1f}" text-anchor="end">{tick:g}</text>'
        )
    if x.infinity:
        parts.append(f'<rect class="beyond" x="{left + side}" y="{top}" width="{wide - side:.1f}" height="{side}"/>')
        middle = left + (side + wide) / 2
        parts.append(f'<text class="tick" x="{middle:.1f}" y="{top + side + 16}" text-anchor="middle">∞</text>')
    parts.append(f'<path class="equal" d="M{left},{top + side}L{left + side},{top}"/>')
    parts.append(
        f'<text class="tick" x="{left + 8}" y="{top + 16}" text-anchor="start">proved above claimed: refuted</text>'
    )
    parts.append(
        f'<text class="tick" x="{left + wide / 2:.1f}" y="{top + side + 34}" text-anchor="middle">claimed ε</text>'
    )
    turned = f'transform="translate(12,{top + side / 2:.0f})rotate(-90)"'
    parts.append(f'<text class="tick" {turned} text-anchor="middle">proved ε, at least</text>')
    drawn = [Markup(part) for part in parts]  # noqa: S704 -- numbers and our own words
    points = [mark.point for mark in marks]
    shifts = shifts_of(points)
    places = label_places(points, x, y, shifts, wide, side)
    for mark, shift, place in zip(marks, shifts, places, strict=True):
        middle, down = left + wide * x.share(mark.point.x), top + side * (1 - y.share(mark.point.y))
        drawn.append(
            Markup(
                '<path class="mark c{}{}" role="img" aria-label="{}" transform="translate({:.1f},{:.1f})scale(6)" '
                'd="{}"><title>{}</title></path>'
            ).format(
                mark.colour, " hollow" if mark.point.hollow else "", mark.point.title, middle + shift, down,
                SHAPES[mark.shape], mark.point.title,
            )
        )  # fmt: skip
        if place is not None:
            dx, dy, align = place
            anchor = {"left": "start", "right": "end", "center": "middle"}[align]
            drawn.append(
                Markup('<text class="label" x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>').format(
                    middle + dx, down + dy + 4, anchor, mark.point.label
                )
            )
    size = round(left + wide + 12), top + side + 42
    return _picture(Markup("").join(drawn), words, "equal-scales", size=size)


_WIDTH, _HEIGHT = _LEFT + SIDE + 24, _TOP + SIDE + _BELOW


def _picture(content: str, words: str, kind: str, *, size: tuple[int, int] = (_WIDTH, _HEIGHT), **data: str) -> Markup:
    width, height = size
    attributes = Markup("").join(Markup(' data-{}="{}"').format(key.replace("_", "-"), data[key]) for key in data)
    return Markup(
        '<svg class="still {}" viewBox="0 0 {} {}" width="{}" height="{}" role="img" aria-label="{}"{}>{}</svg>'
    ).format(kind, width, height, width, height, words, attributes, Markup(content))  # noqa: S704 -- drawn above


def _line(curve: RocCurve, decades: int) -> str:
    """Path of a curve; points below an axis are cut."""
    least = 10.0**-decades * (1 - 1e-9)
    inside = [(x, y) for x, y in curve if x >= least and y >= least]
    places = [(_LEFT + _along(x, decades), _TOP + SIDE - _along(y, decades)) for x, y in inside]
    return "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in places) if places else ""


def _along(rate: float, decades: int) -> float:
    return SIDE * (1 + math.log10(rate) / decades)


def _grid(decades: int) -> str:
    places = [SIDE * i / decades for i in range(decades + 1)]
    return "".join(f"M{_LEFT + at:g},{_TOP}v{SIDE}M{_LEFT},{_TOP + at:g}h{SIDE}" for at in places)


def _steps(heights: Sequence[float]) -> str:
    """Path of a histogram's outline, from the axis to the axis."""
    wide, path = SIDE / len(heights), f"M{_LEFT},{_TOP + SIDE}"
    for height in heights:
        path += f"V{_TOP + SIDE * (1 - height):.1f}h{wide:.2f}"
    return f"{path}V{_TOP + SIDE}"


def _linear_ticks(high: float) -> list[float]:
    """Round values from 0 to `high`, about five."""
    step = 10.0 ** math.floor(math.log10(high))
    step = next(size for size in (step / 5, step / 2, step, 2 * step) if high / size <= 6)
    return [i * step for i in range(int(high / step + 1e-9) + 1)]
