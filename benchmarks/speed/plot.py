"""Plots of cost against size, or dots without a size: PNG and SVG, with a colour and marker for each way."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogFormatter, NullFormatter

from . import report

# Okabe & Ito's colours, which most people can distinguish, and grey; markers work without colour.
_COLOURS = ("#000000", "#999999", "#0072B2", "#56B4E9", "#009E73", "#E69F00", "#CC79A7", "#D55E00", "#7F3C8D")
_MARKS = "osD^v<>PX"


def curves(sweeps: Sequence[dict[str, Any]], folder: Path, name: str) -> list[str]:
    """Plots milliseconds per step against size, both axes logarithmic, one panel per sweep.

    Args:
        sweeps: with a title, an axis (a key of `about`) and comparisons.
        folder: of the files.
        name: of the files, without their ending.

    Returns:
        Names of the files written.
    """
    ways = list(dict.fromkeys(w["way"] for s in sweeps for c in s["comparisons"] for w in c["ways"]))
    # Without pyplot, which keeps every figure and may need a display.
    figure = Figure(figsize=(5.2 * len(sweeps) + 2.2, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(sweeps), squeeze=False)[0]
    for panel, sweep in zip(panels, sweeps, strict=True):
        for number, way in enumerate(ways):
            # A way that failed at some size has no point there, and its line joins the others.
            points = [
                (c["about"][sweep["axis"]], 1e3 * w["median_seconds"], 1e3 * min(w["seconds"]), 1e3 * max(w["seconds"]))
                for c in sweep["comparisons"]
                for w in c["ways"]
                if w["way"] == way and w["median_seconds"] is not None
            ]
            if points:
                sizes, medians, lowest, highest = zip(*sorted(points), strict=True)
                colour, mark = _COLOURS[number % len(_COLOURS)], _MARKS[number % len(_MARKS)]
                panel.plot(sizes, medians, color=colour, marker=mark, markersize=4.5, linewidth=1.4, label=way)
                panel.fill_between(sizes, lowest, highest, color=colour, alpha=0.10, linewidth=0)
        panel.set(xscale="log", yscale="log", xlabel=sweep["axis"], title=sweep["title"])
        _plain_numbers(panel, sorted({c["about"][sweep["axis"]] for c in sweep["comparisons"]}))
        panel.grid(visible=True, which="major", linewidth=0.4, alpha=0.5)
    panels[0].set_ylabel("milliseconds a step (median; band: all rounds)")
    handles = {h.get_label(): h for panel in panels for h in panel.get_legend_handles_labels()[0]}
    if handles:
        figure.legend([*handles.values()], [str(label) for label in handles], loc="outside right center", frameon=False)
    return _save(figure, folder, name)


def dots(cases: Sequence[tuple[str, dict[str, float]]], folder: Path, name: str) -> list[str]:
    """Plots milliseconds of each way of each case, logarithmic, on a line each.

    Args:
        cases: (title, way -> median seconds).
        folder: of the files.
        name: of the files, without their ending.

    Returns:
        Names of the files written.
    """
    ways = list(dict.fromkeys(way for _, found in cases for way in found))
    rows = sum(len(found) + 1 for _, found in cases)
    figure = Figure(figsize=(8.0, 0.8 + 0.3 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    panel = figure.subplots()
    height, heights, labels = 0, [], []
    for title, found in cases:
        panel.text(0.0, height, f" {title}", transform=panel.get_yaxis_transform(), va="center", fontweight="bold")
        for way, seconds in found.items():
            height -= 1
            number = 2 + ways.index(way) % (len(_COLOURS) - 2)
            panel.plot(1e3 * seconds, height, color=_COLOURS[number], marker=_MARKS[number], markersize=7)
            panel.annotate(
                report.milli(seconds),
                (1e3 * seconds, height),
                (8, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
            )
            heights.append(height)
            labels.append(way)
        height -= 1
    panel.set(xscale="log", xlabel="milliseconds (median)", ylim=(height + 0.3, 0.7))
    panel.set_yticks(heights, labels)
    panel.margins(x=0.15)
    panel.grid(visible=True, which="major", linewidth=0.4, alpha=0.5)
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    return _save(figure, folder, name)


def _plain_numbers(panel: Any, sizes: Sequence[int]) -> None:
    """Labels the measured sizes, and writes 1, 10, 100 instead of powers of ten."""
    panel.set_xticks(sizes, [_short(size) for size in sizes])
    panel.xaxis.set_minor_formatter(NullFormatter())
    panel.yaxis.set_minor_formatter(LogFormatter())  # labels minor ticks only if the axis is too short for decades
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _short(size: int) -> str:
    if size < 10_000:
        return str(size)
    return f"{size / 1e3:.0f}K" if size < 1_000_000 else f"{size / 1e6:.1f}M"


def _save(figure: Figure, folder: Path, name: str) -> list[str]:
    # Text stays text in the SVG, without a date, so that the same figures give the same file.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        for ending, metadata in (("png", {}), ("svg", {"Date": None})):
            report.write(
                folder / f"{name}.{ending}",
                lambda file, ending=ending, metadata=metadata: figure.savefig(
                    file, format=ending, dpi=150, metadata=metadata
                ),
            )
    return [f"{name}.png", f"{name}.svg"]
