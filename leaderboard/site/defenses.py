"""Pages of defenses: their rows in all suites, beside one another and never ranked across suites."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from ..board.content import at_least, seeds_words, shown_columns, strongest_words
from ..board.rows import Row
from ..kinds import attacked
from ..page import remarks
from ..records.labels import word
from . import links
from .method_table import Head, SuiteTable, TableEntry, epsilon_entry, number_entry, rendered, row_entry, suite_table
from .site import OTHER, MethodWords, Site, SiteRow


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
    return rendered(
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


def by_defense(rows: Iterable[SiteRow]) -> Mapping[str, list[SiteRow]]:
    """Groups rows by the name of their defense.

    Args:
        rows: in the order of the board.
    """
    groups: dict[str, list[SiteRow]] = {}
    for row in rows:
        groups.setdefault(row.row.defense.name, []).append(row)
    return groups


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
                row_entry(row, _settings_words(row.row)),
                epsilon_entry(row.row),
                _rank(row.row),
                *(
                    number_entry(row.row.estimates[column.key], at_least(row.row, row.row.estimates[column.key]))
                    for _, column in columns
                ),
                TableEntry(text=strongest or "-", order=strongest or None, page=_page_of(row.row, strongest)),
                TableEntry(text=seeds_words(row.row), order=float(len(row.row.seeds))),
            ]
        )
    return suite_table(own[0].section, heads, lines)


def _settings_words(row: Row) -> str:
    budget = ", ".join(f"{key}={word(item)}" for key, item in row.budget.items() if item is not None)
    return row.details or budget


def _rank(row: Row) -> TableEntry:
    among = f"of {row.ranked_of}" if row.rank else ""
    return TableEntry(text=str(row.rank or "-"), order=row.rank, below=among, hint=row.unplaced)


def _page_of(row: Row, label: str) -> str:
    """Path of the page of an attack, by its label in a row; empty without an attack."""
    name = _attack_name(row, label)
    return links.attack_page(name) if name else ""


def _attack_name(row: Row, label: str | None) -> str:
    firsts = (next(iter(cell.records.values())) for cell in row.cells if cell.attack == label)
    return next((first.attack.name for first in firsts if first.attack is not None), "")


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
