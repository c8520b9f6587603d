"""Marks and lines of plots, their styles, and the rendering of plots as SVG without a browser.

A plot is a Vega-Lite specification (`specifications.py`). Its colours are variables of the page's style sheet, so the
SVG follows the light, dark and print modes of the page.
"""

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

Style = Mapping[str, tuple[int, str]]
"""Series -> (number of its colour, name of its marker)."""

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

DASHES = ([1, 0], [10, 3], [5, 2], [12, 3, 3, 3])
"""Patterns of lines, by the number of their marker."""

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

COLOURS = 7
"""Number of distinct colours in the style sheet, `--c0` to `--c6`; every series has a marker too."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """Mark of a plot.

    Attributes:
        x: position; may be infinite if the axis has a strip for that.
        y: position.
        x_ends: ends of its interval in x; None without an interval.
        y_ends: ends of its interval in y; None without an interval.
        series: decides colour and marker.
        label: short words next to the mark; empty for none.
        title: its numbers in words, for tooltips and screen readers.
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
        title: text for tooltips and screen readers.
        label: short words beside the line; empty for none.
        bound: whether it is drawn dotted and without marks, as a bound and not a measurement.
    """

    places: Sequence[tuple[float, float]]
    series: str
    title: str
    label: str = ""
    bound: bool = False


@dataclass(frozen=True, kw_only=True)
class Band:
    """Line of a scatter plot, behind its marks, with a band around it.

    Attributes:
        x: positions, ascending.
        y: of the line.
        low: lower ends of the band.
        high: upper ends of the band; equal to `low` where there is no band.
        series: decides the colour.
        dashed: whether the line is dashed, as where another has its colour.
    """

    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    series: str
    dashed: bool = False


@dataclass(frozen=True, kw_only=True)
class Level:
    """Horizontal line across a plot, with words on it."""

    y: float
    words: str


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


def breakable(name: str) -> Markup:
    """Name with optional line breaks after its underscores."""
    return Markup("_<wbr>").join(name.split("_"))


def picture(specification: Mapping[str, Any]) -> Markup:
    """Draws a plot as an <svg> element without identifiers, with the title of each mark as its tooltip."""
    # A character that XML forbids, as in a name by a stranger, would end the whole process.
    return _drawn(json.dumps(_xml(specification)))


def _xml(value: Any) -> Any:
    """Replaces the characters in the strings of a JSON value that XML forbids."""
    if isinstance(value, str):
        return _NOT_XML.sub("\ufffd", value)
    if isinstance(value, Mapping):
        return {_xml(key): _xml(item) for key, item in value.items()}
    return [_xml(item) for item in value] if isinstance(value, list | tuple) else value


@functools.lru_cache(maxsize=64)
def _drawn(specification: str) -> Markup:
    """Draws a plot from its specification in JSON; pages of a site, and a page built anew, share most plots."""
    import vl_convert

    svg = vl_convert.vegalite_to_svg(specification)
    svg = re.sub(r"<[^>]*>", _shorter, svg)
    marks = r'(<path aria-label="([^"]*)" role="graphics-symbol"[^>]*?)(/>|></path>)'
    return Markup(re.sub(marks, r"\1><title>\2</title></path>", svg))  # noqa: S704 -- Vega escapes text


@functools.cache
def bundle() -> str:
    """Script of Vega, Vega-Lite and Vega-Embed from the installed vl-convert; defines `window.vegaEmbed`."""
    import vl_convert

    # Wrapped in a function, so that its hundreds of names do not become globals of the page.
    return f"(() => {{{vl_convert.javascript_bundle('window.vegaEmbed = vegaEmbed;')}}})();"


def _shorter(tag: re.Match[str]) -> str:
    """Shortens a tag: drops attributes that a page makes redundant, and rounds paths to hundredths of a pixel."""
    text = re.sub(r' (xmlns(:xlink)?|version|class)="[^"]*"', "", tag[0])
    return re.sub(r' (d|transform)="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), text)
