"""LaTeX: tables with the rules of `booktabs`, and two lines of notes; reasons and rows' ids are comments.

A row takes several lines: an interval stands below its value, a flag below the name. So a board is as wide as a page
with margins of 2 cm; columns beyond that, and rows beyond a page, follow in a further table.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from ..board.content import SUPERSCRIPTS, CellWords, content
from ..board.identity import board_version, row_id
from ..board.table import Board
from ..board.text_formats import LEFT, tex
from .publication import Publication
from .safe_text import in_one_line

_NOTES = (
    "Means over seeds with 95 % intervals. Worst: the strongest attack's, simultaneous over the attacks compared; "
    "≥: at least; ≤: the most that the claim allows; n/a: not measured. Ranks: by the high end of the worst AUC."
)

WIDTH = 484.0
"""Width of a table, at most: 17 cm, A4 with margins of 2 cm; points."""

LINES = 50
"""Lines of a table's rows, at most, which fit on a page of letter paper with the margins of `article`."""

_LETTERS = {"defense": 22, "attack": 16}
"""Characters of a line of words; longer words are broken."""

_GAP, _SIZE = 6.0, "\\fontsize{7}{8.5}\\selectfont"
"""Space between columns in points, and the size of the letters, which does not depend on the document's."""

_WIDTHS = (
    ("ijl.,:;'|![]", 2.3), (" f-_", 2.9), ("rst(){}", 3.2), ("cez", 3.6), ("ago0123456789/vεδ·\N{EN DASH}", 4.0),
    ("w", 5.8), ("ABCDEFGHIJKLNOPQRSTUVXYZ@=+<>~^≥≤\N{MULTIPLICATION SIGN}m%", 6.6), ("MW∞", 8.1),
)  # fmt: skip
"""Characters and their width in Computer Modern at 7 points, rounded up; no other ASCII character has over 4.5."""

_Lines = tuple[str, ...]
"""Lines of a cell."""


def latex(board: Board, publication: Publication) -> dict[str, bytes]:
    r"""Returns a fragment to `\input`, for documents with `\usepackage{booktabs}`.

    Columns without a number in any row of a table are left out. Alarms, such as failed controls, are above the tables.

    Args:
        board: of any records.
        publication: not used.
    """
    page = content(
        board.rows, controls=board.controls, violations=board.violations, unranked=board.unranked, gaps=board.gaps
    )
    ids = iter(board.rows)
    lines = [f"% {board_version()}. Needs the package booktabs, and a text width of 17 cm.", f"{{{_SIZE}\\raggedright"]
    lines.append(f"\\setlength{{\\tabcolsep}}{{{_GAP / 2:g}pt}}")
    lines += [f"\\noindent\\textbf{{{_flowing(alarm)}}}\\par\\medskip" for alarm in page.alarms]
    for title, rows in page.sections:
        names = [row_id(next(ids)) for _ in rows]
        cells = [{name: _lines(name, row) for name in page.headers if name != "flags"} for row in rows]
        shown = [
            name
            for name in cells[0]
            if any(row[name] not in (("",), ("-",), ("n/a",)) for row in cells) or name == "defense"
        ]
        headers = {name: tuple(map(_plain, page.headers[name])) for name in shown}
        for columns, further in _columns(shown, [headers, *cells]):
            for start, end in _pages(cells):
                words = ["further columns"] * further + ["continued"] * bool(start)
                lines.append(
                    f"\\noindent\\textbf{{{_flowing(', '.join([title, *words]))}}}\\par\\nopagebreak\\smallskip"
                )
                lines += _table(columns, headers, names[start:end], cells[start:end])
    lines += [f"\\noindent {_flowing(note)}\\par" for note in (_NOTES, f"{board_version()}.")]
    lines += ["}", *(f"% {in_one_line(reason)}" for reason in (*page.footnotes, *page.unranked))]
    return {"board.tex": ("\n".join(lines) + "\n").encode()}


def _lines(name: str, row: dict[str, CellWords]) -> _Lines:
    """Lines of a cell; flags are below the name of the defense."""
    parts = (*row[name], *row["flags"]) if name == "defense" else row[name]
    parts = [_plain(part) for part in parts]
    if name not in _LETTERS:
        return tuple(parts)
    return tuple(line for part in parts for line in _broken(part, _LETTERS[name])) or ("",)


def _plain(words: str) -> str:
    return in_one_line(re.sub(f"[{SUPERSCRIPTS}]", "", words))


def _broken(words: str, most: int) -> Iterator[str]:
    """Lines of at most so many characters, broken at spaces and underscores, or within a word that is too long."""
    line = ""
    for piece in re.findall(r"[^\s_]*_|[^\s_]+\s*|\s+", words):
        if line and len(line) + len(piece.rstrip()) > most:
            yield line.rstrip()
            line = ""
        line += piece
        while len(line.rstrip()) > most:
            yield line[:most]
            line = line[most:]
    if line.strip():
        yield line.rstrip()


def _columns(shown: Sequence[str], rows: Sequence[dict[str, _Lines]]) -> Iterator[tuple[list[str], bool]]:
    """Columns of each table of a section, which all begin with the defense; and whether it is not the first."""
    widths = {name: max(_width(line) for row in rows for line in row[name]) + _GAP for name in shown}
    columns, further = [shown[0]], False
    for name in shown[1:]:
        if len(columns) > 1 and sum(widths[column] for column in (*columns, name)) > WIDTH:
            yield columns, further
            columns, further = [shown[0]], True
        columns.append(name)
    yield columns, further


def _width(words: str) -> float:
    wide = {character: width for characters, width in _WIDTHS for character in characters}
    # A character that the font lacks is printed as its code.
    return sum(wide.get(character, 4.5 if character.isascii() else 30.0) for character in words)


def _pages(rows: Sequence[dict[str, _Lines]]) -> Iterator[tuple[int, int]]:
    """First row of each table of a section, and the row after its last."""
    start = used = 0
    for number, row in enumerate(rows):
        height = max(map(len, row.values()))
        if number > start and used + height > LINES:
            yield start, number
            start, used = number, 0
        used += height
    yield start, len(rows)


def _table(
    columns: Sequence[str], headers: dict[str, _Lines], names: Sequence[str], rows: Sequence[dict[str, _Lines]]
) -> list[str]:
    layout = "".join("l" if name in LEFT else "r" for name in columns)
    lines = [f"\\noindent\\begin{{tabular}}{{@{{}}{layout}@{{}}}}", "\\toprule"]
    high = max(len(headers[name]) for name in columns)
    lines += _row([("",) * (high - len(headers[name])) + headers[name] for name in columns])
    lines.append("\\midrule")
    for place, (name, row) in enumerate(zip(names, rows, strict=True)):
        lines += ["\\addlinespace[2pt]"] if place else []
        lines += [f"% row {name}", *_row([row[column] for column in columns])]
    return [*lines, "\\bottomrule", "\\end{tabular}\\par\\medskip"]


def _row(cells: Sequence[_Lines]) -> list[str]:
    return [" & ".join(map(tex, line)) + r" \tabularnewline" for line in zip_longest(*cells, fillvalue="")]


def _flowing(words: str) -> str:
    """Text of a paragraph, in which long words may be broken anywhere."""
    return " ".join(
        "\\allowbreak{}".join(tex(word[i : i + 12]) for i in range(0, len(word), 12)) if len(word) > 24 else tex(word)
        for word in in_one_line(words).split()
    )
