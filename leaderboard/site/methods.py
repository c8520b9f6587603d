"""Pages of defenses and of attacks: their results in all suites, beside one another and never ranked across suites."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

from ..board.active_server import ABOUT, TITLE
from ..board.aggregate import BoardCell, Estimate, over_seeds
from ..board.content import Footnotes, at_least, seeds_words, shown_columns, strongest_words
from ..board.notes import needs_words
from ..board.rows import Row
from ..kinds import KINDS, attacked
from ..metrics import METRICS
from ..page import remarks
from ..page.build import render_page
from ..page.figures import epsilon_words
from ..page.tables import TONES, flags_of, value
from ..records.labels import word
from . import links
from .site import OTHER, MethodWords, Site, SiteRow


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


def defense_page(site: Site, name: str, rows: Sequence[SiteRow]) -> str:
    """Renders the page of a defense.

    Args:
        site: of the page.
        name: of the defense.
        rows: of the defense, in the order of the board.
    """
    words = site.guide.defenses.get(name, MethodWords(summary="", family=OTHER))
    suites = {row.row.suite for row in rows}
    epsilons = [row.row.claim.epsilon for row in rows if row.row.claim and row.row.claim.epsilon is not None]
    span = [f"{end:.2g}" for end in (min(epsilons), max(epsilons))] if epsilons else []
    facts = [(str(len(rows)), "rows", ""), (str(len(suites)), "suites", "")]
    if span:
        facts.append((" to ".join(dict.fromkeys(span)), "claimed ε, where proved", ""))
    return _render(
        links.defense_page(name),
        name=name,
        role=f"a defense, family: {words.family or OTHER}",
        words=words,
        facts=facts,
        pairs=[("source", words.source)] if words.source else [],
        heading="Its rows, suite by suite",
        lead="Suites differ in data, model and attacks: numbers of two tables are not comparable, and a rank is among "
        "the rows of one table of a suite with the same ε, δ and unit. A name leads to every number of its row.",
        tables=[_of_defense(list(group)) for _, group in groupby(rows, key=lambda row: row.row.section)],
        best=_best([row.row for row in rows]),
        unmeasured=remarks.unmeasured({r.id: r for row in rows for r in row.row.unranked}.values()),
    )


def attack_page(site: Site, name: str, cells: Sequence[tuple[SiteRow, BoardCell]]) -> str:
    """Renders the page of an attack.

    Args:
        site: of the page.
        name: of the attack.
        cells: measured with it, and their rows, in the order of the board.
    """
    words = site.guide.attacks.get(name, MethodWords(summary=""))
    records = [record for _, cell in cells for record in cell.records.values()]
    needs = needs_words(records).get(name, "").replace("_", " ")
    pairs = [("threat model", needs), ("source", words.source)]
    # Rows of sweeps share the records that failed.
    unmeasured = [r for r in site.board.unranked if r.attack is not None and r.attack.name == name]
    active = [result for result in site.board.active if result.attack == name]
    strongest = sum(_is_strongest(row.row, cell) for row, cell in cells)
    facts = [
        (str(len({row.id for row, _ in cells})), "rows attacked", ""),
        (str(len({row.row.suite for row, _ in cells} | {result.suite for result in active})), "suites", ""),
        (str(strongest), "times the strongest of its kind", ""),
    ]
    return _render(
        links.attack_page(name),
        name=name,
        role="an attack",
        words=words,
        facts=facts,
        pairs=[(term, text) for term, text in pairs if text],
        heading="On every defense, suite by suite",
        lead="Means over seeds on all candidates, with 95 % intervals of this attack alone; “≤” is the most that the "
        "claim allows any test. The strongest of several attacks is chosen on other candidates, so its number on the "
        "page of its row may differ.",
        tables=[_of_attack(list(group)) for _, group in groupby(cells, key=lambda pair: pair[0].row.section)],
        active=[(result.suite, links.suite_page(result.suite), result.words) for result in active],
        active_title=TITLE,
        active_about=ABOUT,
        unmeasured=remarks.unmeasured(unmeasured),
    )


def _render(path: str, **context: Any) -> str:
    return render_page("method.html", {"root": links.root_of(path), "best": (), "active": (), **context})


def _table(section: tuple[str, ...], heads: Sequence[Head], lines: Iterable[Sequence[TableEntry]]) -> SuiteTable:
    suite, *details = section
    return SuiteTable(
        title=suite,
        rest=" · ".join(filter(None, details)),
        page=links.suite_page(suite),
        heads=tuple(heads),
        lines=tuple(TableLine(cells=tuple(cells)) for cells in lines),
    )


def _of_defense(rows: Sequence[SiteRow]) -> SuiteTable:
    own = [row.row for row in rows]
    columns = [
        (metric, column)
        for metric, column in shown_columns(own)
        if any(row.estimates[column.key].value is not None for row in own)
    ]
    heads = [
        Head(title="settings and budget", number=False),
        Head(title="claimed ε"),
        Head(title="rank"),
        *(
            Head(
                title=column.title or " ".join(column.header),
                unit=column.unit,
                # The best of the defense first, as on the page of a run.
                best="descending" if metric.better == "higher" else "ascending",
            )
            for metric, column in columns
        ),
        Head(title="strongest attack", number=False),
        Head(title="seeds", best="descending"),
    ]
    lines = []
    for row in rows:
        strongest = strongest_words(row.row)[0]
        lines.append(
            [
                _who(row, _settings_words(row.row)),
                _epsilon(row.row),
                _rank(row.row),
                *(
                    _number(row.row.estimates[column.key], at_least(row.row, row.row.estimates[column.key]))
                    for _, column in columns
                ),
                TableEntry(text=strongest or "-", order=strongest or None, page=_page_of(row.row, strongest)),
                TableEntry(text=seeds_words(row.row), order=float(len(row.row.seeds))),
            ]
        )
    return _table(own[0].section, heads, lines)


def _of_attack(cells: Sequence[tuple[SiteRow, BoardCell]]) -> SuiteTable:
    heads = [
        Head(title="defense", number=False),
        Head(title="claimed ε"),
        Head(title="measured"),
        Head(title="seeds", best="descending"),
    ]
    if any(record.attack and record.attack.settings for _, cell in cells for record in cell.records.values()):
        heads.append(Head(title="settings of the attack", number=False))
    lines = []
    for row, cell in cells:
        metric, first = METRICS[KINDS[cell.kind].main], next(iter(cell.records.values()))
        estimate = over_seeds(metric.name, cell)
        settings = first.attack.settings if first.attack else {}
        number = _number(estimate, least=False)
        flags = dict.fromkeys(flag for record in cell.records.values() for flag in record.flags)
        several = len({compared.attack for compared in row.row.cells if compared.kind == cell.kind}) > 1
        label = f"{metric.label}{KINDS[cell.kind].noise_words(cell.noise)}"
        strongest = "strongest of its kind" if several and _is_strongest(row.row, cell) else ""
        lines.append(
            [
                _who(row, row.row.details, tuple((flag, TONES.get(flag, ""), "") for flag in flags)),
                _epsilon(row.row),
                TableEntry(
                    text=f"{label} {number.text}", order=number.order, hint=number.hint,
                    below=" ".join(filter(None, (number.below, strongest))),
                ),
                TableEntry(text=str(len(cell.records)), order=float(len(cell.records))),
                TableEntry(text=", ".join(f"{key}={word(item)}" for key, item in settings.items()) or "-"),
            ][: len(heads)]
        )  # fmt: skip
    return _table(cells[0][0].row.section, heads, lines)


def _who(row: SiteRow, details: str, flags: tuple[tuple[str, str, str], ...] | None = None) -> TableEntry:
    """Cell that names a row, and leads to it."""
    control = f"{row.row.control.replace('_', ' ')} control" if row.row.control else ""
    name = row.row.defense.name
    return TableEntry(
        text=name,
        below=", ".join(filter(None, (details, control))),
        page=links.row_page(row.id),
        order=f"{name} {details}".lower(),
        flags=flags_of(row.row) if flags is None else flags,
    )


def _settings_words(row: Row) -> str:
    budget = ", ".join(f"{key}={word(item)}" for key, item in row.budget.items() if item is not None)
    return row.details or budget


def _rank(row: Row) -> TableEntry:
    among = f"of {row.ranked_of}" if row.rank else ""
    return TableEntry(text=str(row.rank or "-"), order=row.rank, below=among, hint=row.unplaced)


def _epsilon(row: Row) -> TableEntry:
    claim = row.claim
    order = None if claim is None else math.inf if claim.epsilon is None else claim.epsilon
    hint = "no claim in these records" if claim is None else claim.reason or ""
    return TableEntry(text=epsilon_words(row), order=order, hint=hint)


def _number(estimate: Estimate, least: bool) -> TableEntry:
    cell = value(estimate, Footnotes(), lower_end=least and METRICS[estimate.metric].of_attack)
    return TableEntry(
        text=cell.text, below=" ".join(filter(None, (cell.ends, cell.bound))), order=cell.order, hint=cell.reason
    )


def _page_of(row: Row, label: str) -> str:
    """Path of the page of an attack, by its label in a row; empty without an attack."""
    name = _attack_name(row, label)
    return links.attack_page(name) if name else ""


def _attack_name(row: Row, label: str | None) -> str:
    firsts = (next(iter(cell.records.values())) for cell in row.cells if cell.attack == label)
    return next((first.attack.name for first in firsts if first.attack is not None), "")


def _is_strongest(row: Row, cell: BoardCell) -> bool:
    """Returns whether a cell's attack reaches the worst case of its kind, in the release that it attacks."""
    main = METRICS[KINDS[cell.kind].main]
    return any(
        row.estimates[column.key].attack == cell.attack
        for column in main.columns
        if column.variant in (None, cell.noise)
    )


def _best(rows: Sequence[Row]) -> list[tuple[str, str, str, int, int]]:
    """(kind, attack, path of its page, rows in which it is the strongest, rows attacked) by kind, most rows first."""
    best = []
    for kind in attacked():
        leads = [{_attack_name(row, estimate.attack) for estimate in row.main(kind) if estimate.attack} for row in rows]
        counts = Counter(name for names in leads for name in names if name)
        total = sum(bool(names) for names in leads)
        best += [
            (kind.name.replace("_", " "), name, links.attack_page(name), count, total)
            for name, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        ]
    return best


def by_defense(rows: Iterable[SiteRow]) -> Mapping[str, list[SiteRow]]:
    """Groups rows by the name of their defense.

    Args:
        rows: in the order of the board.
    """
    groups: dict[str, list[SiteRow]] = {}
    for row in rows:
        groups.setdefault(row.row.defense.name, []).append(row)
    return groups


def by_attack(site: Site) -> Mapping[str, list[tuple[SiteRow, BoardCell]]]:
    """Groups cells by the name of their attack; attacks that were only tried have no cells.

    Args:
        site: with rows, and with attacks of active servers, which are in no row.
    """
    groups: dict[str, list[tuple[SiteRow, BoardCell]]] = {}
    for row in site.rows:
        for cell in row.row.cells:
            attack = next(iter(cell.records.values())).attack
            if attack is not None:
                groups.setdefault(attack.name, []).append((row, cell))
    tried = [r.attack.name for r in site.board.unranked if r.attack is not None]
    for name in (*tried, *(result.attack for result in site.board.active)):
        groups.setdefault(name, [])
    return groups
