"""Vega-Lite specifications of plots, built with Altair in a single theme.

Text of records enters a specification as data, never as a Vega expression, which would be evaluated.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt

from .axes import Axis
from .labels import label_places, line_label_places, shifts_of
from .line_marks import marks_on
from .plots import DASHES, SHAPES, Band, Level, PlotLine, Point, Style

WIDTH, HEIGHT = 620, 340
"""Width of a still picture, with its axes, and height of all plots, without them; pixels."""

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
        "labelLimit": 320, "symbolSize": 120, "symbolStrokeWidth": 1, "columnPadding": 18, "rowPadding": 5,
        "offset": 12,
    },
    "text": {"color": _SOFT, "fontSize": 11.5},
}  # fmt: skip

_ROWS, _BANDED, _MARKS = "rows", "bands", "marks"
"""Names of a plot's data: of its marks or lines, of its lines with bands, of the marks on its lines."""

_WIDE, _NARROW = 540, 290
"""Widths, in pixels between the axes, for which labels are placed."""

_PLACE = "datum.places[narrow ? 1 : 0]"
"""Expression: (x offset, y offset, alignment) of a label; null without a place. The page's script sets `narrow`."""


def scatter(
    points: Sequence[Point],
    *,
    x: Axis,
    y: Axis,
    style: Style,
    chance: float | None = None,
    equality: bool = False,
    dodge: bool = False,
    bands: Sequence[Band] = (),
    levels: Sequence[Level] = (),
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
        bands: lines with bands, behind the marks; of the series of the points.
        levels: horizontal lines, behind the marks.
    """
    series = list(dict.fromkeys(point.series for point in points))
    picked = alt.selection_point(name="picked", fields=["series"], bind="legend")
    colours = {name: f"var(--c{style[name][0]})" for name in series}
    colour: dict[str, Any] = {"field": "colour", "type": "nominal", "scale": None}
    marks = alt.Chart(alt.NamedData(_ROWS)).encode(x=_channel(alt.X, "x", x), y=_channel(alt.Y, "y", y))
    shift: dict[str, Any] = {"xOffset": {"expr": "datum.shift"}}
    bars = marks.mark_rule(strokeWidth=1.5, aria=False, **shift).encode(
        stroke=alt.Stroke(**colour), opacity=_opacity(0.75)
    )
    layers = [
        *_background_layers(x, y, chance=chance, equality=equality),
        *_levels(levels, x, y),
        *_bands(bands, x, y),
        marks.transform_filter("datum.path")
        .mark_line(strokeWidth=1.5, aria=False, **shift)
        .encode(
            detail=alt.Detail("path:N"), stroke=alt.Stroke(**colour), strokeDash=_dashes("datum.hollow"),
            opacity=_opacity(0.8),
        ),
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
        _labels(marks),
    ]  # fmt: skip
    shifts = shifts_of(points) if dodge else [0.0] * len(points)
    places = zip(*(label_places(points, x, y, shifts, width, HEIGHT) for width in (_WIDE, _NARROW)), strict=True)
    rows = [
        _row(point, x, y) | {"colour": colours[point.series], "shift": shift, "places": place}
        for point, shift, place in zip(points, shifts, places, strict=True)
    ]
    banded = [_band_row(band, number, colours[band.series], x, y) for number, band in enumerate(bands)]
    return _specification(layers, rows, **({_BANDED: banded} if banded else {}))


def curves(lines: Sequence[PlotLine], *, x: Axis, y: Axis, style: Style) -> dict[str, Any]:
    """Specifies a plot of lines, and of y = x, which is chance.

    Args:
        lines: in the order in which they are drawn.
        x: horizontal axis.
        y: vertical axis.
        style: series -> (colour, marker), see `styles`.
    """
    measured = [line for line in lines if not line.bound]
    ends = [(value, value) for value in (max(x.low, y.low), min(x.high, y.high))]
    middle = [(at, at) for at in map(x.at, (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)) if ends[0][0] < at < ends[1][0]]
    chance = PlotLine(places=[ends[0], *middle, ends[1]], series="", title="", label="chance", bound=True)
    series = list(dict.fromkeys(line.series for line in measured))
    picked = alt.selection_point(name="picked", fields=["series"], bind="legend")
    colours = {name: f"var(--c{style[name][0]})" for name in series}
    dashes = {name: list(SHAPES).index(style[name][1]) % len(DASHES) for name in series}
    colour: dict[str, Any] = {"field": "colour", "type": "nominal", "scale": None}
    channels = {"x": _channel(alt.X, "x", x), "y": _channel(alt.Y, "y", y)}
    tooltip = {"tooltip": alt.Tooltip("title:N"), "description": alt.Description("title:N")}
    marks = alt.Chart(alt.NamedData(_MARKS)).encode(**channels)
    dashed = [{"test": f"datum.dash === {number}", "value": pattern} for number, pattern in enumerate(DASHES)]
    layers = [
        alt.Chart(alt.Data(values=[{"x": a, "y": b} for a, b in ends]))
        .mark_line(color=_SOFT, strokeWidth=1.2, strokeDash=[5, 4], aria=False)
        .encode(**channels),
        alt.Chart(alt.NamedData(_ROWS))
        .transform_flatten(["x", "y"])
        .mark_line(strokeWidth=1.8)
        .encode(
            **channels, **tooltip, stroke=alt.Stroke(**colour), detail=alt.Detail("path:N"),
            strokeDash=alt.StrokeDashValue([2, 3], condition=dashed), opacity=_opacity(0.85, always="datum.bound"),
        ),
        marks.transform_filter("datum.drawn")
        .mark_point(size=75, aria=False, strokeWidth=0.8)
        .encode(
            fill=_by_series(alt.Fill, colours),
            stroke=alt.StrokeValue(_EDGE),
            shape=_by_series(alt.Shape, {name: SHAPES[style[name][1]] for name in series}),
            opacity=_opacity(1),
            tooltip=tooltip["tooltip"],
        )
        .add_params(picked)
        .properties(name="marks"),
        _labels(marks, always="!datum.series"),
    ]  # fmt: skip
    points = marks_on(measured, x, y, count=4)
    # Bounds and chance first, because they are not in the legend.
    candidates = sorted(marks_on([*lines, chance], x, y, count=24), key=lambda point: point.series in colours)
    drawn = [line.places for line in (*lines, chance)]
    places = zip(
        *(line_label_places(candidates, points, drawn, x, y, width, HEIGHT) for width in (_WIDE, _NARROW)), strict=True
    )
    labelled = [(point, list(pair)) for point, pair in zip(candidates, places, strict=True) if any(pair)]
    marked = [
        _row(point, x, y) | {"places": pair, "drawn": not any(pair), "colour": colours.get(point.series, _INK)}
        for point, pair in [*((point, [None, None]) for point in points), *labelled]
    ]
    rows = []
    for number, line in enumerate(lines):
        # Points below an axis are cut, not drawn along its edge.
        inside = [(a, b) for a, b in line.places if a >= x.low and b >= y.low]
        sides = {"x": [_rounded(a) for a, _ in inside], "y": [_rounded(b) for _, b in inside]}
        words = {"path": number, "series": line.series, "title": line.title, "bound": line.bound}
        looks = (
            {"colour": _INK, "dash": -1}
            if line.bound
            else {"colour": colours[line.series], "dash": dashes[line.series]}
        )
        rows.append(sides | words | looks)
    return _specification(layers, rows, **{_MARKS: marked})


def _labels(marks: Any, *, always: str = "") -> Any:
    """Layer of the labels beside marks, where they have a place."""
    return marks.transform_filter(f"{_PLACE} != null").mark_text(
        text={"expr": "datum.label"}, color=_INK, aria=False, align={"expr": f"{_PLACE}[2]"},
        xOffset={"expr": f"{_PLACE}[0]"}, yOffset={"expr": f"{_PLACE}[1]"},
    ).encode(opacity=_opacity(1, always=always))  # fmt: skip


def _specification(layers: Sequence[Any], rows: Sequence[Mapping[str, Any]], **further: Any) -> dict[str, Any]:
    # Not validated by Altair, which takes longer than all other work: Vega-Lite refuses a bad specification anyway.
    specification = alt.layer(*layers).to_dict(validate=False)
    del specification["$schema"]  # a URL, and pages hold none
    size = {"width": WIDTH, "height": HEIGHT, "autosize": {"type": "fit-x", "contains": "padding"}}
    params = [{"name": "narrow", "value": False}, *specification["params"]]
    return specification | size | {"params": params, "datasets": {_ROWS: list(rows), **further}, "config": THEME}


def _channel(channel: Any, field: str, axis: Axis) -> Any:
    scale = {"type": "log"} if axis.log else {"type": "linear", "zero": False}
    ticks: dict[str, Any] = {"values": axis.ticks()} if axis.log else {"tickCount": 6}
    if axis.digits == "d":
        ticks["tickMinStep"] = 1  # between whole numbers, ticks would round to the same label
    return channel(
        field, type="quantitative", title=axis.title, axis={"format": axis.digits, **ticks},
        scale={**scale, "domain": [axis.low, axis.end], "nice": False},
    )  # fmt: skip


def _by_series(channel: Any, values: Mapping[str, str], **more: Any) -> Any:
    """Channel with a value for each series, and a legend of as many columns as the widest name leaves room for."""
    columns = {"expr": f"max(1, floor((narrow ? {_NARROW} : {_WIDE}) / {40 + 7.3 * min(44, max(map(len, values)))}))"}
    scale = alt.Scale(domain=list(values), range=list(values.values()))
    return channel("series", type="nominal", scale=scale, legend=alt.Legend(columns=columns), **more)


def _opacity(value: float, *, always: str = "") -> Any:
    """Opacity of a mark; marks of series that are not picked in the legend are faint, unless `always` holds."""
    test = {"test": {"or": [{"param": "picked"}, always]}} if always else {"param": "picked"}
    return alt.OpacityValue(0.08, condition={**test, "value": value})


def _dashes(test: str) -> Any:
    return alt.StrokeDashValue([1, 0], condition={"test": test, "value": [3, 4]})


def _background_layers(x: Axis, y: Axis, *, chance: float | None, equality: bool) -> list[Any]:
    """Layers behind the marks: strip for infinity, y = x with the region above it, chance."""

    def layer(*rows: Mapping[str, float]) -> Any:
        return alt.Chart(alt.Data(values=list(rows))).encode(x=_channel(alt.X, "x", x))

    layers = []
    if x.infinity:
        sign: dict[str, Any] = {"text": "∞", "fontSize": 17, "y": {"expr": "height + 14"}, "baseline": "middle"}
        layers.append(layer({"x": x.high, "end": x.end}).mark_rect(color=_FAINT, aria=False).encode(x2=alt.X2("end:Q")))
        layers.append(layer({"x": x.number(math.inf)}).mark_text(aria=False, **sign))
    if equality:
        # Curved if x alone is logarithmic; 64 segments look smooth.
        values = [_rounded(x.at(i / 64)) for i in range(65)]
        inside = [{"x": value, "y": value, "top": y.high} for value in values if y.low <= value <= y.high]
        height = _channel(alt.Y, "y", y).stack(None)
        layers.append(
            layer(*inside).mark_area(color=_BAD, opacity=0.1, aria=False).encode(y=height, y2=alt.Y2("top:Q"))
        )
        layers.append(layer(*inside).mark_line(color=_INK, strokeWidth=1.2, aria=False).encode(y=height))
        layers.append(_note(layer(*inside[:1]), "implied above claimed"))
    if chance is not None and x.low <= chance <= x.high:
        layers.append(layer({"x": chance}).mark_rule(color=_SOFT, strokeWidth=1.2, strokeDash=[5, 4], aria=False))
        layers.append(_note(layer({"x": chance}), "chance"))
    return layers


def _bands(bands: Sequence[Band], x: Axis, y: Axis) -> list[Any]:
    """Layers of lines with their bands, of which those of no height are left out."""
    if not bands:
        return []
    lines = (
        alt.Chart(alt.NamedData(_BANDED))
        .transform_flatten(["x", "y", "low", "high"])
        .encode(x=_channel(alt.X, "x", x), detail=alt.Detail("path:N"))
    )
    colour: dict[str, Any] = {"field": "colour", "type": "nominal", "scale": None}
    height = _channel(alt.Y, "low", y).stack(None)
    # The fill's own opacity, because a legend takes over that of a whole mark.
    faint = alt.FillOpacityValue(0.03, condition={"param": "picked", "value": 0.1})
    return [
        lines.transform_filter("datum.wide")
        .mark_area(aria=False)
        .encode(y=height, y2=alt.Y2("high:Q"), fill=alt.Fill(**colour), fillOpacity=faint),
        lines.mark_line(strokeWidth=1.8, aria=False).encode(
            y=_channel(alt.Y, "y", y),
            stroke=alt.Stroke(**colour),
            opacity=_opacity(0.9),
            strokeDash=alt.StrokeDashValue([1, 0], condition={"test": "datum.dashed", "value": [7, 3]}),
        ),
    ]


def _band_row(band: Band, number: int, colour: str, x: Axis, y: Axis) -> dict[str, Any]:
    """Data of a line with its band, inside of the axes."""
    heights = {key: [_rounded(y.number(v), 4) for v in getattr(band, key)] for key in ("y", "low", "high")}
    wide = any(low < high for low, high in zip(heights["low"], heights["high"], strict=True))
    places = {"x": [_rounded(x.number(value)) for value in band.x], **heights}
    return places | {"series": band.series, "path": number, "colour": colour, "wide": wide, "dashed": band.dashed}


def _levels(levels: Sequence[Level], x: Axis, y: Axis) -> list[Any]:
    layers = []
    for level in levels:
        layer = alt.Chart(alt.Data(values=[{"y": _rounded(y.number(level.y)), "x": _rounded(x.low)}]))
        layer = layer.encode(y=_channel(alt.Y, "y", y))
        layers.append(layer.mark_rule(color=_INK, strokeWidth=1.3, strokeDash=[5, 4], aria=False))
        words: dict[str, Any] = {"text": {"value": level.words}, "x": _channel(alt.X, "x", x)}
        layers.append(layer.mark_text(align="left", dx=5, dy=-7, color=_INK, aria=False).encode(**words))
    return layers


def _note(layer: Any, words: str) -> Any:
    return layer.mark_text(text=words, align="left", dx=5, y=8, aria=False)


def _rounded(value: float, digits: int = 6) -> float:
    """Few digits, so that specifications do not depend on the last digits of a machine's floats."""
    return float(f"{value:.{digits}g}")


def _row(point: Point, x: Axis, y: Axis) -> dict[str, Any]:
    """Data of a point, inside of the axes."""
    numbers = {"x": x.number(point.x), "y": y.number(point.y)}
    if point.y_ends is not None:
        numbers |= zip(("low", "high"), map(y.number, point.y_ends), strict=True)
    if point.x_ends is not None and math.isfinite(point.x):
        numbers |= zip(("left", "right"), map(x.number, point.x_ends), strict=True)
    words = {"series": point.series, "label": point.label, "title": point.title, "path": point.path}
    return {name: _rounded(number) for name, number in numbers.items()} | words | {"hollow": point.hollow}
