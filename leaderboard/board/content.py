"""Content of the board independent of its text format (terminal, Markdown, LaTeX): headers, cells, footnotes.

A cell is a tuple of parts (value, interval), which a format joins with a space, or with a line break in narrow columns.
Reasons become numbered footnotes; equal reasons share a number.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

from ..kinds import KINDS, attacked
from ..metrics import METRICS, BoardColumn, KnownMetric, columns
from ..records.fields import RecordedClaim
from ..records.record import Record
from .active_server import ABOUT, TITLE, ActiveResult
from .aggregate import Estimate
from .controls import ControlResult, Violation
from .notes import alarms, listed, notes, unranked_words
from .rows import Row, several_guarantees

SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹"

CellWords = tuple[str, ...]


class Footnotes(list[str]):
    """Sentences numbered from 1; equal sentences share a number."""

    def number(self, reason: str | None) -> int | None:
        """Number of a sentence, which is added at its first use; None for no sentence."""
        if not reason:
            return None
        if reason not in self:
            self.append(reason)
        return self.index(reason) + 1


@dataclass
class Content:
    """Board in words.

    Attributes:
        alarms: sentences to read first: failed controls, violated claims, absent controls.
        headers: column -> parts of its header, in the order of the columns.
        halves: columns of the two tables into which narrow terminals split the board; the first names the row.
        sections: title and rows of each group of comparable rows; a row is column -> parts.
        footnotes: texts of the superscripts in the cells, from 1.
        notes: how to read the numbers.
        unranked: failed and skipped cells, with their reasons.
    """

    alarms: list[str]
    headers: dict[str, CellWords] = field(default_factory=dict)
    halves: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    sections: list[tuple[str, list[dict[str, CellWords]]]] = field(default_factory=list)
    footnotes: Footnotes = field(default_factory=Footnotes)
    notes: list[str] = field(default_factory=list)
    unranked: list[str] = field(default_factory=list)

    def mark(self, cell: CellWords, reason: str | None) -> CellWords:
        """Adds a footnote's number to a cell; equal reasons share a number."""
        number = self.footnotes.number(reason)
        return cell if number is None else (*cell[:-1], cell[-1] + superscript(number))


def superscript(number: int) -> str:
    """Formats a footnote's number as a superscript."""
    return "".join(SUPERSCRIPTS[int(digit)] for digit in str(number))


def content(
    rows: Sequence[Row],
    *,
    controls: Sequence[ControlResult],
    violations: Sequence[Violation],
    unranked: Sequence[Record],
    gaps: Sequence[str] = (),
) -> Content:
    """Puts the whole board into words.

    Args:
        rows: in the order of the board.
        controls: all results of controls.
        violations: all refuted claims.
        unranked: records that failed or were skipped.
        gaps: sentences of `notes.gaps`.

    Returns:
        The content, ready for any format.
    """
    page = Content(alarms=alarms(controls, violations, gaps))
    deltas = {row.claim.delta for row in rows if row.claim and row.claim.epsilon is not None}
    page.halves = halves(rows)
    headers: dict[str, CellWords] = {
        # From a copy, because `deltas` is used again below: with several, each row states its own.
        "epsilon": ("claimed", f"ε, δ={_short(deltas.copy().pop())}") if len(deltas) == 1 else ("claimed", "ε"),
        "attack": ("strongest", "attack"),
        **{column.key: column.header for _, column in shown_columns(rows)},
    }
    page.headers = {key: headers.get(key, (key,)) for half in page.halves for key in half}
    # groupby joins neighbours alone; rows are sorted by section first (`Row.order`).
    for section, group in groupby(rows, key=lambda row: row.section):
        title = " · ".join(filter(None, section))
        rows_of_section = list(group)
        budgets = several_guarantees(rows_of_section)
        words = [_words(page, row, several=len(deltas) > 1, budgets=budgets) for row in rows_of_section]
        page.sections.append((title, words))
    page.notes = notes(rows, controls)
    page.unranked = unranked_words(unranked)
    return page


def active_content(results: Sequence[ActiveResult]) -> Content:
    """Puts the table of active servers into words.

    Args:
        results: not empty.
    """
    page = Content(alarms=[])
    headers = {"messages": ("messages",), "epsilon": ("claimed", "ε"), "measured": ("measured",), "seeds": ("seeds",)}
    page.headers = {"defense": ("defense",), "attack": ("attack",), **headers, "flags": ("remarks",)}
    page.halves = (tuple(page.headers)[:-1], ("defense", "attack", "flags"))
    for suite, group in groupby(results, key=lambda result: result.suite):
        lines = []
        for result in group:
            words = result.words
            line: dict[str, CellWords] = {key: (words[key],) for key in page.headers if key != "flags"}
            # A long reason takes a line under the table, where no column is narrow.
            remarks = ", ".join("CLAIM VIOLATED" if flag == "claim_violated" else flag for flag in result.flags)
            line["flags"] = (remarks,)
            if result.reasons:
                line["measured"] = page.mark(line["measured"], "; ".join(result.reasons))
            lines.append(line)
        page.sections.append((f"{TITLE} · {suite}", lines))
    page.notes = [ABOUT]
    return page


def shown_columns(rows: Sequence[Row]) -> list[tuple[KnownMetric, BoardColumn]]:
    """Returns the metrics' columns to show, in order: the usual ones, and optional ones with a value in some row."""
    usual = [column.key for _, column in columns(written=True)]
    measured = {key for row in rows for key, estimate in row.estimates.items() if estimate.value is not None}
    return [
        (metric, column)
        for metric, column in columns()
        if column.key in usual or (column.optional and column.header and column.key in measured)
    ]


def halves(rows: Sequence[Row]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Columns of the board, in two halves that each begin with the defense.

    The first half ends with the strongest attack, which follows the first kind that has attacks.

    Args:
        rows: of the board.
    """
    names = list(KINDS)
    before = names[: names.index(attacked()[0].name) + 1] if attacked() else names
    first = [column.key for metric, column in shown_columns(rows) if metric.kind in before]
    second = [column.key for metric, column in shown_columns(rows) if metric.kind not in before]
    return ("defense", "epsilon", *first, "attack"), ("defense", *second, "rank", "seeds", "flags")


def rank_words(row: Row, *, budgets: bool) -> CellWords:
    """Rank of a row, as ("1",), or ("1", "of 3") if the rows of its section have several budgets; "-" for controls.

    Args:
        row: of the board; an unplaced row has its reason in a footnote.
        budgets: whether the section has several.
    """
    if row.unplaced:
        return ("n/a",)
    return (str(row.rank or "-"), *((f"of {row.ranked_of}",) if budgets and row.rank else ()))


def _words(page: Content, row: Row, *, several: bool, budgets: bool) -> dict[str, CellWords]:
    details = (f"({row.details})",) if row.details else ()
    control = (f"({row.control} control)",) if row.control else ()
    flags = tuple("CLAIM VIOLATED" if flag == "claim_violated" else flag for flag in row.flags)
    strongest, reason = strongest_words(row)
    # Footnotes are numbered in this order: the rank's before the numbers', although its column is behind theirs.
    cells: dict[str, CellWords] = {
        "defense": (row.defense.name, *details, *control),
        "rank": page.mark(rank_words(row, budgets=budgets), row.unplaced),
        "epsilon": _epsilon(page, row, several=several),
    }
    shown = {column.key: (metric, column) for metric, column in columns()}
    for key in page.headers:
        if key in shown:
            cells[key] = _number(page, row, *shown[key])
        elif key == "attack":
            cells[key] = (*page.mark((strongest,), reason), *looks_words(row)) if strongest else ("-",)
    return cells | {"seeds": page.mark((seeds_words(row),), uneven_words(row)), "flags": (", ".join(flags),)}


def strongest_words(row: Row) -> tuple[str, str]:
    """Returns the strongest attack on a row (empty if none), and a remark on metrics by which another is strongest."""
    leads = {kind.name: next((e.attack for e in row.main(kind) if e.attack), "") for kind in attacked()}
    others = [
        f"by {column.header[-1]} the strongest is {by_it}"
        for metric, column in columns(written=True)
        if metric.name != KINDS[metric.kind].main and (by_it := row.estimates[column.key].attack)
        if metric.of_attack and by_it != leads[metric.kind]
        if leads[metric.kind] not in row.estimates[column.key].unmeasured
    ]
    return next(filter(None, leads.values()), "") or "", "; ".join(others)


def looks_words(row: Row) -> tuple[str, ...]:
    """Number of attacks among which the strongest was chosen, as ("of 4",); empty without a choice."""
    lead = next((e for kind in attacked() for e in row.main(kind) if e.attack), None)
    return (f"of {lead.looks}",) if lead is not None and lead.looks > 1 else ()


def seeds_words(row: Row) -> str:
    """Number of seeds of a row, as "3" or "2-3"."""
    counts = sorted({len(cell.records) for cell in row.cells})
    return "-".join(str(count) for count in dict.fromkeys((counts[0], counts[-1])))


def uneven_words(row: Row) -> str:
    """Lists the seeds of each number of a row if they differ; else empty."""
    if "uneven_seeds" not in row.flags:
        return ""
    return "seeds measured: " + "; ".join(
        f"{cell.attack or cell.kind}{KINDS[cell.kind].noise_words(cell.noise)}: {listed(cell.records)}"
        for cell in row.cells
    )


def _epsilon(page: Content, row: Row, *, several: bool) -> CellWords:
    claim = row.claim
    if claim is None:
        return page.mark(("n/a",), "no claim in these records")
    if claim.epsilon is None:
        # Infinite, not n/a: the accounting ran, and proved nothing.
        return page.mark(("∞",), claim.reason)
    words = page.mark((f"{claim.epsilon:.2f}",), claim_remark(claim))
    words += (f"δ={_short(claim.delta)}",) if several else ()
    words += ("unverified",) if claim.unverified else ()
    return (*words, "VIOLATED") if "claim_violated" in row.flags else words


def claim_remark(claim: RecordedClaim) -> str:
    """Remark on a finite epsilon: its value under Poisson sampling, as papers print it, and unverified parts."""
    clauses = []
    if claim.as_if_poisson is not None:
        clauses.append(f"sampling is {claim.sampling}; were it Poisson, epsilon would be {claim.as_if_poisson:.2f}")
    return "; ".join([*clauses, *(f"unverified: {sentence}" for sentence in claim.unverified)])


def at_least(row: Row, estimate: Estimate) -> bool:
    """True if the worst case is only a lower limit: attacks of its kind failed, are missing, or have no such number."""
    return METRICS[estimate.metric].kind in row.lacks or bool(estimate.unmeasured)


def _number(page: Content, row: Row, metric: KnownMetric, column: BoardColumn) -> CellWords:
    """Formats a number with its interval, marked ≥ if it is only a lower limit (`at_least`)."""
    estimate, digits = row.estimates[column.key], column.digits
    if estimate.value is None:
        return page.mark(("n/a",), estimate.reason)
    value = metric.number(estimate.value, digits)
    if metric.of_attack and at_least(row, estimate):
        value = f"≥{value.removeprefix('≥')}"
    bound = largest_words(estimate, digits)
    words = (value,)
    if estimate.low is not None and estimate.high is not None:
        words = (value, f"[{estimate.low:.{digits}f}, {estimate.high:.{digits}f}]")
    return (*page.mark(words, estimate.reason), *(page.mark((bound,), estimate.largest_note) if bound else ()))


def largest_words(estimate: Estimate, digits: int) -> str:
    """Bound of the claim, as "≤0.68"; empty if no record has it, or if everything is allowed."""
    if estimate.value is None or estimate.largest is None or estimate.largest >= 1:
        return ""
    # Rounded up: a bound must not be shown as less than it is.
    return f"≤{math.ceil(estimate.largest * 10**digits - 1e-9) / 10**digits:.{digits}f}"


def _short(value: float) -> str:
    # Python pads exponents to two digits, 1e-05.
    return f"{value:g}".replace("e-0", "e-")
