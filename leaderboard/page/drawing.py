"""Small still plots as SVG: a log-log ROC, and a histogram of scores.

The cells of a matrix have hundreds of plots, for which a Vega-Lite specification would be too large and too slow. Their
axes are symbols that a page defines once (`roc_axes`); colours are classes of the style sheet.
"""

import math
from collections.abc import Iterable, Sequence

from markupsafe import Markup

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


_WIDTH, _HEIGHT = _LEFT + SIDE + 24, _TOP + SIDE + _BELOW


def _picture(content: str, words: str, kind: str, **data: str) -> Markup:
    attributes = Markup("").join(Markup(' data-{}="{}"').format(key.replace("_", "-"), data[key]) for key in data)
    return Markup(
        '<svg class="still {}" viewBox="0 0 {} {}" width="{}" height="{}" role="img" aria-label="{}"{}>{}</svg>'
    ).format(kind, _WIDTH, _HEIGHT, _WIDTH, _HEIGHT, words, attributes, Markup(content))  # noqa: S704 -- drawn above


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
