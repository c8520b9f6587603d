"""Pages of words: how the board is made, for readers who must judge it, and the table of pitfalls."""

from pathlib import Path

from markupsafe import Markup

from ..metrics import columns
from ..page.build import render_page
from ..page.tables import FLAGS
from . import links
from .site import Site

PITFALLS = Path(__file__).with_name("pitfalls.md")
"""Table that the page and readers of the repository share."""


def methods_page(site: Site) -> str:
    """Renders the page on how the board is made.

    Args:
        site: whose flags it explains.
    """
    flags = {flag for row in site.rows for flag in row.row.flags}
    shown = [(metric, column) for metric, column in columns() if column.header]
    context = {
        "root": links.root_of(links.METHODS),
        "facts": [],
        "columns": [
            (
                " ".join(filter(None, (column.title or " ".join(column.header), column.unit))),
                column.hint or f"{metric.title[:1].upper()}{metric.title[1:]}.",
                metric.better,
            )
            for metric, column in shown
        ],
        "flags": {name: meaning for name, meaning in FLAGS.items() if name in flags},
        "pitfalls": links.PITFALLS,
    }
    return render_page("methods.html", context)


def pitfalls_page(site: Site) -> str:
    """Renders the table of mistakes that look like results.

    Args:
        site: to which the page belongs.
    """
    del site  # the table is the same on every site
    title, about, entries = _pitfalls()
    context = {
        "root": links.root_of(links.PITFALLS), "facts": [], "heading": title, "sentence": about, "entries": entries
    }  # fmt: skip
    return render_page("pitfalls.html", context)


def _pitfalls() -> tuple[Markup, Markup, list[tuple[Markup, ...]]]:
    """Heading, first paragraph, and the cells of each line of the table, as HTML; of Markdown, the file has no more."""
    lines = [line for line in PITFALLS.read_text(encoding="utf-8").splitlines() if line]
    title, about, rows = lines[0].removeprefix("# "), lines[1], lines[4:]  # after the table's head and rule
    entries = [tuple(_with_code(cell) for cell in row.strip("| ").split(" | ")) for row in rows]
    return _with_code(title), _with_code(about), entries


def _with_code(text: str) -> Markup:
    """Text with its code spans; all of it is escaped."""
    parts = text.split("`")
    return Markup("").join(Markup("<code>{}</code>").format(part) if i % 2 else part for i, part in enumerate(parts))
