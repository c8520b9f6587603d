"""Plots of cost against size, or dots without a size: PNG and SVG, with a colour and marker for each way."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import report

# Okabe & Ito's colours, which most people can distinguish, and grey; markers work without colour.
_COLOURS = ("#000000", "#999999", "#0072B2", "#56B4E9", "#009E73", "#E69F00", "#CC79A7", "#D55E00", "#7F3C8D")
_MARKS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "triangle-left", "triangle-right", "cross")


def curves(sweeps: Sequence[dict[str, Any]], folder: Path, name: str) -> list[str]:
    """Plots milliseconds per step against size, both axes logarithmic, one panel per sweep.

    Args:
        sweeps: with a title, an axis (a key of `about`) and comparisons.
        folder: of the files.
        name: of the files, without their ending.

    Returns:
        Names of the files written.
    """
    import altair as alt

    ways = list(dict.fromkeys(w["way"] for s in sweeps for c in s["comparisons"] for w in c["ways"]))
    panels = []
    for sweep in sweeps:
        # A way that failed at some size has no point there, and its line joins the others.
        rows = [
            {
                "size": c["about"][sweep["axis"]], "way": w["way"], "median": 1e3 * w["median_seconds"],
                "low": 1e3 * min(w["seconds"]), "high": 1e3 * max(w["seconds"]),
                "colour": _COLOURS[ways.index(w["way"]) % len(_COLOURS)],
            }
            for c in sweep["comparisons"]
            for w in c["ways"]
            if w["median_seconds"] is not None
        ]  # fmt: skip
        sizes = sorted({row["size"] for row in rows})
        x = alt.X("size:Q", title=sweep["axis"], axis=alt.Axis(values=sizes, format=",")).scale(type="log", nice=False)
        y = alt.Y("median:Q", title="milliseconds a step (median; band: all rounds)").scale(type="log")
        base = alt.Chart(alt.Data(values=rows), title=sweep["title"], width=330, height=300).encode(x=x)
        line = base.mark_line(strokeWidth=1.4).encode(y=y, color=_of_ways(alt.Color, ways, _COLOURS))
        band = base.mark_area(opacity=0.1).encode(alt.Y("low:Q"), alt.Y2("high:Q"), alt.Fill("colour:N", scale=None))
        points = line.mark_point(filled=True, size=45, opacity=1).encode(shape=_of_ways(alt.Shape, ways, _MARKS))
        panels.append(band + line + points)
    return _save(alt.hconcat(*panels), folder, name)


def dots(cases: Sequence[tuple[str, dict[str, float]]], folder: Path, name: str) -> list[str]:
    """Plots milliseconds of each way of each case, logarithmic, on a line each.

    Args:
        cases: (title, way -> median seconds).
        folder: of the files.
        name: of the files, without their ending.

    Returns:
        Names of the files written.
    """
    import altair as alt

    ways = list(dict.fromkeys(way for _, medians in cases for way in medians))
    panels = []
    for title, medians in cases:
        rows = [{"way": way, "ms": 1e3 * s, "words": report.milli(s)} for way, s in medians.items()]
        x = alt.X("ms:Q", title="milliseconds (median)").scale(type="log", padding=30)
        base = alt.Chart(alt.Data(values=rows), title=title, width=480).encode(x, alt.Y("way:N", title=None, sort=None))
        points = base.mark_point(filled=True, size=60, opacity=1).encode(
            _of_ways(alt.Color, ways, _COLOURS[2:], legend=None), _of_ways(alt.Shape, ways, _MARKS[2:], legend=None)
        )
        panels.append(points + base.mark_text(align="left", dx=9, fontSize=10).encode(text="words:N"))
    return _save(alt.vconcat(*panels).resolve_scale(x="shared"), folder, name)


def _of_ways(channel: Any, ways: Sequence[str], values: Sequence[str], **more: Any) -> Any:
    """Channel with a value for each way, the same in all panels."""
    scale = {"domain": list(ways), "range": [values[number % len(values)] for number in range(len(ways))]}
    return channel("way:N", title=None, scale=scale, **more)


def _save(chart: Any, folder: Path, name: str) -> list[str]:
    import vl_convert

    text = chart.configure_title(anchor="start").to_json()
    report.write(folder / f"{name}.svg", vl_convert.vegalite_to_svg(text))
    report.write(folder / f"{name}.png", lambda file: file.write(vl_convert.vegalite_to_png(text, scale=1.5)))
    return [f"{name}.png", f"{name}.svg"]
