"""Plots as Vega-Lite specifications, made by Altair in a single theme, and their pictures without a browser.

Colours are variables of the page's style sheet, so that a picture in the page follows light, dark and print. A plot does
not depend on records: it takes points or lines. Text of records is data of a specification, never an expression.
"""

import functools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from .axes import Axis

Style = Mapping[str, tuple[int, str]]
"""Series -> (number of its colour, name of its marker)."""

WIDTH, HEIGHT = 620, 340
"""Of a picture without its script, axes included, and of all plots without axes; pixels."""

SHAPES = {
    "circle": "M-.8,0A.8,.8 0 1 1 .8,0A.8,.8 0 1 1 -.8,0Z",
    "square": "M-.7,-.7H.7V.7H-.7Z",
    "up": "M0,-.9L.9,.7H-.9Z",
    "diamond": "M0,-1L1,0L0,1L-1,0Z",
    "down": "M0,.9L.9,-.7H-.9Z",
    "cross": "M-.3,-.9H.3V-.3H.9V.3H.3V.9H-.3V.3H-.9V-.3H-.3Z",
    "pentagon": "M0,-.9L.9,-.3L.55,.75H-.55L-.9,-.3Z",
    "bar": "M-.4,-1H.4V1H-.4Z",
}
"""Name of a marker -> SVG path between -1 and 1."""

COLOURS = 7
"""Number of distinct colours in the style sheet, `--c0` to `--c6`; every series has a marker too."""

_INK, _SOFT, _FAINT, _CARD, _EDGE, _BAD = (
    f"var(--{name})" for name in ("ink", "soft", "faint", "card", "mark-edge", "bad")
)

THEME: dict[str, Any] = {
    "background": _CARD,
    "font": "sans-serif",
    "padding": 12,
    "view": {"stroke": None},
    "axis": {
        "gridColor": _FAINT, "domainColor": _INK, "domainWidth": 1.2, "ticks": False, "labelColor": _SOFT,
        "labelFontSize": 11.5, "labelPadding": 7, "titleColor": _INK, "titleFontSize": 12.5,
        "titleFontWeight": "normal", "titlePadding": 10,
    },
    "axisY": {"domain": False},
    "legend": {
        "orient": "bottom", "title": None, "labelColor": _INK, "labelFont": "monospace", "labelFontSize": 12,
        "labelLimit": 320, "symbolSize": 120, "symbolStrokeWidth": 1, "columnPadding": 18, "rowPadding": 5, "offset": 12,
    },
    "text": {"color": _SOFT, "fontSize": 11.5},
}  # fmt: skip


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


def styles(series: Mapping[str, str]) -> dict[str, tuple[int, str]]:
    """Assigns a colour number to each family of series and a marker to each series, a function of the names alone.

    Args:
        series: name of a series -> name of its family.
    """
    families, markers = sorted(set(series.values())), tuple(SHAPES)
    return {
        name: (families.index(series[name]) % COLOURS, markers[i % len(markers)])
        for i, name in enumerate(sorted(series))
    }


def marker(colour: int, shape: str, *, hollow: bool = False) -> Markup:
    """Draws a single mark, for tables.

    Args:
        colour: number of the colour.
        shape: of `SHAPES`.
        hollow: whether only its outline is drawn.
    """
    return Markup(
        '<svg class="key c{}" viewBox="-1.3 -1.3 2.6 2.6" width="14" height="14" aria-hidden="true">'
        '<path class="mark{}" d="{}"/></svg>'
    ).format(colour, " hollow" if hollow else "", SHAPES[shape])


def scatter(
    points: Sequence[Point],
    *,
    x: Axis,
    y: Axis,
    style: Style,
    chance: float | None = None,
    equality: bool = False,
    dodge: bool = False,
) -> dict[str, Any]:
    """Specifies a scatter plot.

    Args:
        points: marks; later marks are drawn on top.
        x: horizontal axis.
        y: vertical axis.
        style: series -> (colour, marker), see `styles`.
        chance: x at which a vertical line labelled "chance" is drawn; None for no line.
        equality: whether to draw y = x and shade the region above it.
        dodge: whether marks of several series at the same x are set side by side.
    """
    import altair as alt

    series = list(dict.fromkeys(point.series for point in points))
    picked = alt.selection_point(name="picked", fields=["series"], bind="legend")
    colours = {name: f"var(--c{style[name][0]})" for name in series}
    colour = {"field": "colour", "type": "nominal", "scale": None}
    marks = alt.Chart(alt.NamedData(_ROWS)).encode(x=_channel(alt.X, "x", x), y=_channel(alt.Y, "y", y))
    shift = {"xOffset": {"expr": "datum.shift"}}
    bars = marks.mark_rule(strokeWidth=1.5, aria=False, **shift).encode(stroke=alt.Stroke(**colour), opacity=_opacity(0.75))
    layers = [
        *_behind(x, y, chance=chance, equality=equality),
        marks.transform_filter("datum.path")
        .mark_line(strokeWidth=1.5, aria=False, **shift)
        .encode(detail=alt.Detail("path:N"), stroke=alt.Stroke(**colour), strokeDash=_dashes("datum.hollow"), opacity=_opacity(0.8)),
        bars.transform_filter("isValid(datum.low)").encode(y=_channel(alt.Y, "low", y), y2=alt.Y2("high:Q")),
        bars.transform_filter("isValid(datum.left)").encode(x=_channel(alt.X, "left", x), x2=alt.X2("right:Q")),
        marks.mark_point(size=130, **shift)
        .encode(
            fill=_by_series(alt.Fill, colours, condition={"test": "datum.hollow", "value": _CARD}),
            stroke=alt.StrokeValue(_EDGE, condition={"test": "datum.hollow", **colour}),
            strokeWidth=alt.StrokeWidthValue(0.8, condition={"test": "datum.hollow", "value": 2}),
            shape=_by_series(alt.Shape, {name: SHAPES[style[name][1]] for name in series}),
            opacity=_opacity(1),
            tooltip=alt.Tooltip("title:N"),
            description=alt.Description("title:N"),
        )
        .add_params(picked)
        .properties(name="marks"),
        marks.transform_filter(f"{_PLACE} != null").mark_text(
            text={"expr": "datum.label"}, color=_INK, aria=False, align={"expr": f"{_PLACE}[2]"},
            xOffset={"expr": f"{_PLACE}[0]"}, yOffset={"expr": f"{_PLACE}[1]"},
        ).encode(opacity=_opacity(1)),
    ]  # fmt: skip
    shifts = _shifts(points) if dodge else [0.0] * len(points)
    places = zip(*(_labels(points, x, y, shifts, width) for width in (_WIDE, _NARROW)), strict=True)
    rows = [
        _row(point, x, y) | {"colour": colours[point.series], "shift": shift, "places": place}
        for point, shift, place in zip(points, shifts, places, strict=True)
    ]
    return _specification(layers, rows)


def curves(lines: Sequence[PlotLine], *, x: Axis, y: Axis, style: Style) -> dict[str, Any]:
    """Specifies a plot of lines, and of y = x, which is chance.

    Args:
        lines: in the order in which they are drawn.
        x: horizontal axis.
        y: vertical axis.
        style: series -> (colour, marker), see `styles`.
    """
    import altair as alt

    series = list(dict.fromkeys(line.series for line in lines))
    picked = alt.selection_point(name="picked", fields=["series"], bind="legend")
    ends = [{"x": value, "y": value} for value in (max(x.low, y.low), min(x.high, y.high))]
    chance = alt.Chart(alt.Data(values=ends)).mark_line(color=_SOFT, strokeWidth=1.2, strokeDash=[5, 4], aria=False)
    measured = (
        alt.Chart(alt.NamedData(_ROWS))
        .transform_flatten(["x", "y"])
        .mark_line(strokeWidth=1.8)
        .encode(
            stroke=_by_series(alt.Stroke, {name: f"var(--c{style[name][0]})" for name in series}),
            strokeDash=_dashes("datum.bound"),
            opacity=_opacity(0.85),
            detail=alt.Detail("title:N"),
            tooltip=alt.Tooltip("title:N"),
            description=alt.Description("title:N"),
        )
        .add_params(picked)
        .properties(name="marks")
    )
    channels = {"x": _channel(alt.X, "x", x), "y": _channel(alt.Y, "y", y)}
    rows = []
    for line in lines:
        # Points below an axis are cut, not drawn along its edge.
        inside = [(a, b) for a, b in line.places if a >= x.low and b >= y.low]
        sides = {"x": [_rounded(a) for a, _ in inside], "y": [_rounded(b) for _, b in inside]}
        rows.append({**sides, "series": line.series, "title": line.title, "bound": line.bound})
    return _specification([chance.encode(**channels), measured.encode(**channels)], rows)


def picture(specification: Mapping[str, Any]) -> Markup:
    """Draws a plot as an <svg> element without identifiers; a mark's words are its tooltip, too."""
    import vl_convert

    svg = vl_convert.vegalite_to_svg(json.dumps(specification))
    svg = re.sub(r' (xmlns(:xlink)?|version|class)="[^"]*"', "", svg)
    svg = re.sub(r' (d|transform)="[^"]*"', lambda text: re.sub(r"(\.\d\d)\d+", r"\1", text[0]), svg)
    marks = r'(<path aria-label="([^"]*)" role="graphics-symbol"[^>]*?)(/>|></path>)'
    return Markup(re.sub(marks, r"\1><title>\2</title></path>", svg))  # noqa: S704 -- Vega escapes text


@functools.cache
def bundle() -> str:
    """Script of Vega, Vega-Lite and Vega-Embed, as the installed vl-convert brings it; sets `vegaEmbed`."""
    import vl_convert

    # In a function, because its hundreds of names are none of the page's.
    return f"(() => {{{vl_convert.javascript_bundle('window.vegaEmbed = vegaEmbed;')}}})();"


_ROWS = "rows"
"""Name of a plot's data in its specification."""

_WIDE, _NARROW = 540, 290
"""Widths, in pixels between the axes, for which labels are placed."""

_PLACE = "datum.places[narrow ? 1 : 0]"
"""Expression: (x offset, y offset, alignment) of a label; null without a place. The page's script sets `narrow`."""


def _specification(layers: Sequence[Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    import altair as alt

    # Not validated, which takes longer than everything else: Vega-Lite would not compile a bad specification.
    specification = alt.layer(*layers).to_dict(validate=False)
    del specification["$schema"]  # an address, which a page does not have
    size = {"width": WIDTH, "height": HEIGHT, "autosize": {"type": "fit-x", "contains": "padding"}}
    params = [{"name": "narrow", "value": False}, *specification["params"]]
    return specification | size | {"params": params, "datasets": {_ROWS: list(rows)}, "config": THEME}


def _channel(channel: Any, field: str, axis: Axis) -> Any:
    scale = {"type": "log"} if axis.log else {"type": "linear", "zero": False}
    ticks = {"values": axis.ticks()} if axis.log else {"tickCount": 6}
    return channel(
        field, type="quantitative", title=axis.title, axis={"format": "~g", **ticks},
        scale={**scale, "domain": [axis.low, axis.end], "nice": False},
    )  # fmt: skip


def _by_series(channel: Any, values: Mapping[str, str], **more: Any) -> Any:
    """Channel with a value for each series, and a legend of as many columns as the widest name leaves room for."""
    import altair as alt

    columns = {"expr": f"max(1, floor((narrow ? {_NARROW} : {_WIDE}) / {40 + 7.3 * min(44, max(map(len, values)))}))"}
    scale = alt.Scale(domain=list(values), range=list(values.values()))
    return channel("series", type="nominal", scale=scale, legend=alt.Legend(columns=columns), **more)


def _opacity(value: float) -> Any:
    """Opacity of a mark; marks of series that are not picked in the legend are faint."""
    import altair as alt

    return alt.OpacityValue(0.08, condition={"param": "picked", "value": value})


def _dashes(test: str) -> Any:
    import altair as alt

    return alt.StrokeDashValue([1, 0], condition={"test": test, "value": [3, 4]})


def _behind(x: Axis, y: Axis, *, chance: float | None, equality: bool) -> list[Any]:
    """Layers behind the marks: strip for infinity, y = x with the region above it, chance."""
    import altair as alt

    def layer(*rows: Mapping[str, float]) -> Any:
        return alt.Chart(alt.Data(values=list(rows))).encode(x=_channel(alt.X, "x", x))

    layers = []
    if x.infinity:
        sign = {"text": "∞", "fontSize": 17, "y": {"expr": "height + 14"}, "baseline": "middle"}
        layers.append(layer({"x": x.high, "end": x.end}).mark_rect(color=_FAINT, aria=False).encode(x2=alt.X2("end:Q")))
        layers.append(layer({"x": x.number(math.inf)}).mark_text(aria=False, **sign))
    if equality:
        # Curved if x alone is logarithmic; 64 segments look smooth.
        values = [_rounded(x.at(i / 64)) for i in range(65)]
        inside = [{"x": value, "y": value, "top": y.high} for value in values if y.low <= value <= y.high]
        height = _channel(alt.Y, "y", y).stack(None)
        layers.append(layer(*inside).mark_area(color=_BAD, opacity=0.1, aria=False).encode(y=height, y2=alt.Y2("top:Q")))
        layers.append(layer(*inside).mark_line(color=_INK, strokeWidth=1.2, aria=False).encode(y=height))
        layers.append(_note(layer(*inside[:1]), "implied above claimed"))
    if chance is not None and x.low <= chance <= x.high:
        layers.append(layer({"x": chance}).mark_rule(color=_SOFT, strokeWidth=1.2, strokeDash=[5, 4], aria=False))
        layers.append(_note(layer({"x": chance}), "chance"))
    return layers


def _note(layer: Any, words: str) -> Any:
    return layer.mark_text(text=words, align="left", dx=5, y=8, aria=False)


def _rounded(value: float) -> float:
    """Six digits, so that specifications do not depend on the last digits of a machine's floats."""
    return float(f"{value:.6g}")


def _shifts(points: Sequence[Point]) -> list[float]:
    """Offsets, in pixels, that move series at the same x apart."""
    at: dict[float, list[str]] = {}
    for point in points:
        if point.series not in at.setdefault(point.x, []):
            at[point.x].append(point.series)
    # 9 pixels: neighbours overlap by their rims alone. With many series, staying near their x matters more than seeing
    # each: all fit into the strip for infinity.
    apart = {x: min(9.0, 36.0 / max(1, len(series) - 1)) for x, series in at.items()}
    return [round(apart[p.x] * (at[p.x].index(p.series) - (len(at[p.x]) - 1) / 2), 2) for p in points]


def _row(point: Point, x: Axis, y: Axis) -> dict[str, Any]:
    """Data of a point, inside of the axes."""
    numbers = {"x": x.number(point.x), "y": y.number(point.y)}
    if point.y_ends is not None:
        numbers |= zip(("low", "high"), map(y.number, point.y_ends), strict=True)
    if point.x_ends is not None and math.isfinite(point.x):
        numbers |= zip(("left", "right"), map(x.number, point.x_ends), strict=True)
    words = {"series": point.series, "label": point.label, "title": point.title, "path": point.path}
    return {name: _rounded(number) for name, number in numbers.items()} | words | {"hollow": point.hollow}


_SIDES = (
    *((8, -9, "left"), (-8, -9, "right"), (8, 10, "left"), (-8, 10, "right"), (10, 0, "left"), (-10, 0, "right")),
    *((0, -16, "center"), (0, 17, "center"), (8, -22, "left"), (8, 23, "left"), (-8, -22, "right"), (-8, 23, "right")),
    *((10, -36, "left"), (10, 37, "left"), (-10, -36, "right"), (-10, 37, "right")),
)
"""Places of a label beside its mark, in pixels, the nearest first."""


def _labels(
    points: Sequence[Point], x: Axis, y: Axis, shifts: Sequence[float], width: float
) -> list[tuple[float, float, str] | None]:
    """Places each label clear of marks, intervals and other labels; None where there is no such place."""
    centres = [
        (width * x.share(p.x) + shift, HEIGHT * (1 - y.share(p.y))) for p, shift in zip(points, shifts, strict=True)
    ]
    # Marks and intervals are obstacles from the start; each placed label becomes one.
    taken = [(across - 7, down - 7, across + 7, down + 7) for across, down in centres]
    for point, (across, down) in zip(points, centres, strict=True):
        if point.y_ends is not None:
            low, high = (HEIGHT * (1 - y.share(end)) for end in point.y_ends)
            taken.append((across - 1, high, across + 1, low))
        if point.x_ends is not None:
            left, right = (width * x.share(end) for end in point.x_ends)
            taken.append((left, down - 1, right, down + 1))
    placed: list[tuple[float, float, str] | None] = []
    for point, shift, (across, down) in zip(points, shifts, centres, strict=True):
        place = None
        # 6.3 pixels: upper estimate of a letter's width, because the reader's font is unknown.
        wide = 6.3 * len(point.label)
        for dx, dy, align in _SIDES if point.label else ():
            left = across + dx - wide * {"left": 0, "center": 0.5, "right": 1}[align]
            box = (left, down + dy - 7, left + wide, down + dy + 7)
            inside = box[0] >= 0 and box[2] <= width + 8 and box[1] >= 0 and box[3] <= HEIGHT
            if inside and not any(
                box[0] < other[2] and other[0] < box[2] and box[1] < other[3] and other[1] < box[3] for other in taken
            ):
                taken.append(box)
                place = (_rounded(dx + shift), dy, align)
                break
        placed.append(place)
    return placed
