"""Plots of cost against size, or dots without a size: PNG and SVG, with a colour and marker for each way."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

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

    panels, ways = [], [way["way"] for sweep in sweeps for point in sweep["comparisons"] for way in point["ways"]]
    colours, marks = _by_way(ways, _COLOURS), _by_way(ways, _MARKS)
    for sweep in sweeps:
        axis = sweep["axis"]
        rounds = pd.json_normalize(sweep["comparisons"], "ways", [["about", axis]]).explode("seconds")
        # A way that failed at some size has no point there, and its line joins the others.
        times = rounds.assign(
            ms=1e3 * rounds["seconds"].astype(float), size=rounds[f"about.{axis}"].astype(int)
        ).dropna(subset="ms")
        rows = times.groupby(["way", "size"])["ms"].agg(["min", "median", "max"]).reset_index()
        ticks = alt.Axis(values=sorted(set(rows["size"].tolist())), format=",")
        x = alt.X("size:Q", title=axis, axis=ticks).scale(type="log", nice=False)
        y = alt.Y("median:Q", title="milliseconds a step (median; band: all rounds)").scale(type="log")
        base = alt.Chart(rows, title=sweep["title"], width=330, height=300).encode(x=x)
        # Opaque in the legend, where the band's opacity would hold.
        colour = alt.Color("way:N", title=None, scale=colours, legend=alt.Legend(symbolOpacity=1))
        coloured = base.encode(colour)
        line = coloured.mark_line(strokeWidth=1.4).encode(y)
        band = coloured.mark_area(opacity=0.1).encode(alt.Y("min:Q"), alt.Y2("max:Q"))
        points = line.mark_point(filled=True, size=45, opacity=1).encode(alt.Shape("way:N", title=None, scale=marks))
        panels.append(band + line + points)
    return _save(alt.hconcat(*panels), folder, name)


def dots(document: dict[str, Any], folder: Path, name: str) -> list[str]:
    """Plots milliseconds of each way of each case, logarithmic, on a line each.

    Args:
        document: with comparisons or cases.
        folder: of the files.
        name: of the files, without their ending.

    Returns:
        Names of the files written; none without a case.
    """
    import altair as alt

    cases = [(c["name"], {w["way"]: w["median_seconds"] for w in c["ways"]}) for c in document["comparisons"]]
    cases += [
        (f"{c['case']}, d {c['d']:,}, m {c['m']}", {way: w["median_s"] for way, w in c["ways"].items()})
        for c in document.get("cases", ())
    ]
    ways, panels = [way for _, medians in cases for way in medians], []
    colours, marks = _by_way(ways, _COLOURS[2:]), _by_way(ways, _MARKS[2:])
    for title, medians in cases:
        rows = [{"way": way, "ms": 1e3 * s, "words": report.milli(s)} for way, s in medians.items() if s is not None]
        x = alt.X("ms:Q", title="milliseconds (median)").scale(type="log", padding=30)
        base = alt.Chart(alt.Data(values=rows), title=title, width=480).encode(x, alt.Y("way:N", title=None, sort=None))
        points = base.mark_point(filled=True, size=60, opacity=1).encode(
            alt.Color("way:N", scale=colours, legend=None), alt.Shape("way:N", scale=marks, legend=None)
        )
        panels.append(points + base.mark_text(align="left", dx=9, fontSize=10).encode(text="words:N"))
    return _save(alt.vconcat(*panels).resolve_scale(x="shared"), folder, name) if cases else []


def _by_way(ways: Sequence[str], values: Sequence[str]) -> dict[str, list[str]]:
    """Scale with a value for each way, the same in all panels."""
    names = list(dict.fromkeys(ways))
    return {"domain": names, "range": [values[number % len(values)] for number in range(len(names))]}


def _save(chart: Any, folder: Path, name: str) -> list[str]:
    import vl_convert

    text = chart.configure_title(anchor="start").to_json()
    report.write(folder / f"{name}.svg", vl_convert.vegalite_to_svg(text))
    report.write(folder / f"{name}.png", lambda file: file.write(vl_convert.vegalite_to_png(text, scale=1.5)))
    return [f"{name}.png", f"{name}.svg"]
