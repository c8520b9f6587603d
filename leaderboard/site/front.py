"""Front page of a site: the headline board, with filters by task, budget, threat model, family and tier.

The numbers of every threat model are computed when the site is built; the page's script shows and hides, and keeps its
state in the fragment of the address. Without it all rows are visible, with the worst cases of all attacks.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..board.content import Footnotes
from ..board.notes import alarms, and_words
from ..board.threat_models import NOT_ATTACKED, words
from ..page.build import render_page
from ..page.tables import FLAGS, Column, Value, flags_of, in_short
from ..submissions.rows import submitted_name
from . import links
from .headline import HeadlineEntry, HeadlineSection, headline, under_each
from .headline_cells import COLUMNS, UNDER_THREAT, cells_of, measured_columns
from .site import OTHER, Site, SiteRow

PAGE = 50
"""Rows that the script shows before it is asked for more."""

NONE_PROVED = "none proved"
"""Value of the epsilon filter for rows without a finite claim."""


@dataclass(frozen=True, kw_only=True)
class FrontRow:
    """Row of the front page.

    Attributes:
        entry: of the headline board.
        cells: column -> cell.
        family: of its defense.
        epsilon: as the filter names it.
        words: text that the text filter searches, in lower case.
        flags: (name, tone, meaning) each.
    """

    entry: HeadlineEntry
    cells: Mapping[str, Value]
    family: str
    epsilon: str
    words: str
    flags: tuple[tuple[str, str, str], ...]

    @property
    def page(self) -> str:
        """Path of its own page."""
        return links.row_page(self.entry.site_row.id)

    @property
    def defense_page(self) -> str:
        """Path of its defense's page."""
        return links.defense_page(self.entry.row.defense.name)

    @property
    def submission_page(self) -> str:
        """Path of its submission's page; empty without a submission."""
        submission = self.entry.site_row.submission
        return "" if submission is None else links.submission_page(submission.handle, submission.digest)


def front_page(site: Site) -> str:
    """Renders the front page.

    Args:
        site: content of the site.

    Returns:
        The document.
    """
    notes, reasons = Footnotes(), Footnotes()
    sections, under = headline(site.rows), under_each(site.rows)
    columns = measured_columns(_entries(sections))
    tables = [
        (section, [(group, [_row(site, entry, columns, notes) for entry in group.entries]) for group in section.groups])
        for section in sections
    ]
    rows = [row for _, groups in tables for _, of_group in groups for row in of_group]
    flags = {flag for site_row in site.rows for flag in site_row.row.flags}
    context: dict[str, Any] = {
        "root": links.root_of(links.FRONT),
        "methods": links.METHODS,
        "pitfalls": links.PITFALLS,
        "about": _about(site),
        "facts": _facts(site),
        "alarms": alarms(site.board.controls, site.board.violations),
        "gaps": site.board.gaps,
        "of_submissions": site.board.of_submissions,
        "refused": site.refused,
        "untrusted": {control.suite for control in site.board.controls if not control.ok},
        "of_others": any(site_row.submission is not None for site_row in site.rows),
        "columns": columns,
        "depending": UNDER_THREAT,
        "left_out": _left_out(sections, columns),
        "sections": [
            (section, links.suite_page(section.suite), site.guide.suites.get(section.suite, ""), groups)
            for section, groups in tables
        ],
        "filters": _filters(rows),
        "threats": {access: words(access) for access in under},
        "under": {access: _numbers(of_access, columns, reasons) for access, of_access in under.items()},
        "reasons": reasons,
        "page": PAGE,
        "flags": {name: meaning for name, meaning in FLAGS.items() if name in flags},
        "notes": notes,
        "active": bool(site.board.active),
    }
    return render_page("front.html", context, own_scripts=("front.js",))


def _left_out(sections: Iterable[HeadlineSection], columns: Sequence[Column]) -> list[tuple[str, str]]:
    """Titles of the columns that are n/a in every row, with the reasons; `picked` is for few suites, and not named."""
    absent = [column for column in COLUMNS if column not in columns and column.key != "picked"]
    cells = [cells_of(entry, absent, Footnotes()) for entry in _entries(sections)]
    return [(column.title, in_short(dict.fromkeys(of_row[column.key].reason for of_row in cells))) for column in absent]


def _entries(sections: Iterable[HeadlineSection]) -> list[HeadlineEntry]:
    return [entry for section in sections for group in section.groups for entry in group.entries]


def _row(site: Site, entry: HeadlineEntry, columns: Sequence[Column], notes: Footnotes) -> FrontRow:
    row, guide = entry.row, site.guide.defenses.get(_own_name(entry.site_row))
    cells = cells_of(entry, columns, notes)
    attack = cells["attack"].text if "attack" in cells else ""
    return FrontRow(
        entry=entry,
        cells=cells,
        family=guide.family if guide and guide.family else OTHER,
        epsilon=NONE_PROVED if math.isinf(row.guarantee[0]) else f"{row.guarantee[0]:g}",
        words=" ".join(filter(None, (row.label, *row.section, attack))).lower(),
        flags=flags_of(row),
    )


def _filters(rows: Sequence[FrontRow]) -> dict[str, list[str]]:
    """Values of each filter that occur, sorted."""
    epsilons = sorted({row.epsilon for row in rows if row.epsilon != NONE_PROVED}, key=float)
    return {
        "data": sorted({row.entry.row.task.data for row in rows}),
        "model": sorted({row.entry.row.task.model for row in rows}),
        "epsilon": epsilons + [NONE_PROVED] * any(row.epsilon == NONE_PROVED for row in rows),
        "family": sorted({row.family for row in rows}),
        "tier": sorted({row.entry.site_row.tier.tier for row in rows}),
    }


def _numbers(sections: Iterable[HeadlineSection], columns: Sequence[Column], reasons: Footnotes) -> list[Any]:
    """Rows of a threat model in order, for the page's script: id, whether on the front, and cells.

    A cell is [text, interval, bound, sort key, number of its reason, page], without empty ends; 0 if not attacked.
    """
    depending = [column for column in columns if column.key in UNDER_THREAT]
    return [
        [
            entry.site_row.id,
            int(entry.front),
            [_packed(key, cell, entry, reasons) for key, cell in cells_of(entry, depending, Footnotes()).items()],
        ]
        for entry in _entries(sections)
    ]


def _packed(key: str, cell: Value, entry: HeadlineEntry, reasons: Footnotes) -> Any:
    if cell.reason == NOT_ATTACKED:
        return 0
    order = "inf" if cell.order == math.inf else cell.order
    page = entry.strongest_page if key == "attack" else ""
    parts = [cell.text, cell.ends, cell.bound, order, reasons.number(cell.reason), page]
    while parts[-1] in (None, ""):
        parts.pop()
    return parts


def _about(site: Site) -> str:
    rows = [site_row.row for site_row in site.rows]
    data = dict.fromkeys(row.task.data for row in rows if row.task.data)
    words_of_data = f" on {and_words(list(data))}" if 0 < len(data) < 5 else f" on {len(data)} data sets"
    return (
        f"Defenses for private training{words_of_data}: how useful the model stays, which ε is claimed and which is "
        "proved to be spent at least, and what the strongest of the attacks still finds out."
    )


def _own_name(site_row: SiteRow) -> str:
    """Name of a row's defense, once for all who measured it; one by a file has the handle of its submission."""
    name, submission = site_row.row.defense.name, site_row.submission
    if submission is None:
        return name
    method, own = submission.declaration.method, submitted_name(name, submission.handle, submission.digest)
    return name if method is not None and own == f"{method.file}:{method.function}" else own


def _facts(site: Site) -> list[tuple[str, str, str]]:
    """Figures for a quick look: (number, unit, tone)."""
    rows, controls = [site_row.row for site_row in site.rows], site.board.controls
    # Rows of sweeps share records that failed, and a cell without any number is in no row.
    of_rows = [record for row in rows for record in row.records]
    records = {(r.defense.name, r.id): r for r in (*of_rows, *site.board.unranked)}.values()
    passed = sum(control.ok for control in controls)
    tone = "good" if site.board.trustworthy else "bad"
    return [
        (str(len({row.suite for row in rows})), "suites", ""),
        (str(len({_own_name(site_row) for site_row in site.rows if site_row.row.control is None})), "defenses", ""),
        (str(len({record.attack.name for record in records if record.attack})), "attacks", ""),
        (str(sum(row.control is None for row in rows)), "rows", ""),
        (str(len(records)), "records", ""),
        (f"{passed}/{len(controls)}" if controls else "no", "controls held" if controls else "controls", tone),
    ]
