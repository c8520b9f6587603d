"""Pages of attacks: their results on every defense, suite by suite, and never ranked across suites."""

from collections.abc import Mapping, Sequence
from itertools import groupby

from ..board.active_server import ABOUT, TITLE
from ..board.aggregate import BoardCell, over_seeds
from ..board.notes import needs_words
from ..board.rows import Row
from ..kinds import KINDS
from ..metrics import METRICS
from ..page import remarks
from ..page.tables import TONES
from ..records.labels import word
from . import links
from .method_table import Head, SuiteTable, TableEntry, epsilon_entry, number_entry, rendered, row_entry, suite_table
from .site import MethodWords, Site, SiteRow


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
    return rendered(
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
        number = number_entry(estimate, least=False)
        flags = dict.fromkeys(flag for record in cell.records.values() for flag in record.flags)
        several = len({compared.attack for compared in row.row.cells if compared.kind == cell.kind}) > 1
        label = f"{metric.label}{KINDS[cell.kind].noise_words(cell.noise)}"
        strongest = "strongest of its kind" if several and _is_strongest(row.row, cell) else ""
        lines.append(
            [
                row_entry(row, row.row.details, tuple((flag, TONES.get(flag, ""), "") for flag in flags)),
                epsilon_entry(row.row),
                TableEntry(
                    text=f"{label} {number.text}", order=number.order, hint=number.hint,
                    below=" ".join(filter(None, (number.below, strongest))),
                ),
                TableEntry(text=str(len(cell.records)), order=float(len(cell.records))),
                TableEntry(text=", ".join(f"{key}={word(item)}" for key, item in settings.items()) or "-"),
            ][: len(heads)]
        )  # fmt: skip
    return suite_table(cells[0][0].row.section, heads, lines)


def _is_strongest(row: Row, cell: BoardCell) -> bool:
    """Returns whether a cell's attack reaches the worst case of its kind, in the release that it attacks."""
    main = METRICS[KINDS[cell.kind].main]
    return any(
        row.estimates[column.key].attack == cell.attack
        for column in main.columns
        if column.variant in (None, cell.noise)
    )
