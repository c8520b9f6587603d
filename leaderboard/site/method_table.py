"""Tables on the pages of defenses and of attacks: their cells, and the results of one suite in a table."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..board.aggregate import Estimate
from ..board.content import Footnotes
from ..board.rows import Row
from ..metrics import METRICS
from ..page.build import render_page
from ..page.figures import epsilon_words
from ..page.tables import flags_of, value
from . import links
from .site import SiteRow


@dataclass(frozen=True, kw_only=True)
class Head:
    """Column of a table; `best` is the direction in which it is sorted first."""

    title: str
    unit: str = ""
    number: bool = True
    best: Literal["ascending", "descending"] = "ascending"


@dataclass(frozen=True, kw_only=True)
class TableEntry:
    """Cell of a table.

    Attributes:
        text: its content.
        below: interval, or details, under it.
        page: path of what it links to; empty for no link.
        order: sort key; None is last in either direction.
        hint: tooltip.
        flags: (name, tone, meaning) each.
    """

    text: str
    below: str = ""
    page: str = ""
    order: float | str | None = None
    hint: str = ""
    flags: tuple[tuple[str, str, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class TableLine:
    """Line of a table; its first cell names it."""

    cells: tuple[TableEntry, ...]


@dataclass(frozen=True, kw_only=True)
class SuiteTable:
    """Results of a method in one suite, on one data set and model.

    Attributes:
        title: of the suite.
        rest: data set, model and unit.
        page: path of the suite's page.
        heads: columns.
        lines: in the order of the board.
    """

    title: str
    rest: str
    page: str
    heads: tuple[Head, ...]
    lines: tuple[TableLine, ...]


def rendered(path: str, **context: Any) -> str:
    """Renders the page of a method.

    Args:
        path: of the page.
        context: of its template; `best` and `active` may be absent.
    """
    return render_page("method.html", {"root": links.root_of(path), "best": (), "active": (), **context})


def suite_table(section: tuple[str, ...], heads: Sequence[Head], lines: Iterable[Sequence[TableEntry]]) -> SuiteTable:
    """Returns a table of one section of the board.

    Args:
        section: suite, data set, model and unit.
        heads: columns.
        lines: cells of each line.
    """
    suite, *details = section
    return SuiteTable(
        title=suite,
        rest=" · ".join(filter(None, details)),
        page=links.suite_page(suite),
        heads=tuple(heads),
        lines=tuple(TableLine(cells=tuple(cells)) for cells in lines),
    )


def row_entry(row: SiteRow, details: str, flags: tuple[tuple[str, str, str], ...] | None = None) -> TableEntry:
    """Returns the cell that names a row, and leads to it.

    Args:
        row: of the board.
        details: below its name.
        flags: (name, tone, meaning) each; None for those of the row.
    """
    control = f"{row.row.control.replace('_', ' ')} control" if row.row.control else ""
    name = row.row.defense.name
    return TableEntry(
        text=name,
        below=", ".join(filter(None, (details, control))),
        page=links.row_page(row.id),
        order=f"{name} {details}".lower(),
        flags=flags_of(row.row) if flags is None else flags,
    )


def epsilon_entry(row: Row) -> TableEntry:
    """Returns the cell of the claimed epsilon; rows without a claim are sorted last."""
    claim = row.claim
    order = None if claim is None else math.inf if claim.epsilon is None else claim.epsilon
    hint = "no claim in these records" if claim is None else claim.reason or ""
    return TableEntry(text=epsilon_words(row), order=order, hint=hint)


def number_entry(estimate: Estimate, least: bool) -> TableEntry:
    """Returns the cell of an estimate with its interval.

    Args:
        estimate: over the seeds.
        least: whether it is at least so large.
    """
    cell = value(estimate, Footnotes(), lower_end=least and METRICS[estimate.metric].of_attack)
    return TableEntry(
        text=cell.text, below=" ".join(filter(None, (cell.ends, cell.bound))), order=cell.order, hint=cell.reason
    )
