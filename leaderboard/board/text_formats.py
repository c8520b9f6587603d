"""Text formats of a board: plain text for terminals, Markdown, LaTeX without packages."""

import io
import re

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from .content import SUPERSCRIPTS, CellWords, Content, superscript

# Columns of words, which may wrap. All other columns hold numbers, which must not.
LEFT = ("defense", "attack", "flags")


def text(page: Content, *, width: int, color: bool = False) -> str:
    """Lays the board out for a terminal: as one table if it fits, else as two, else as two with two-line cells.

    Args:
        page: board in words.
        width: of the terminal, characters; exceeded if a number would be cut otherwise.
        color: whether to write ANSI codes.

    Returns:
        Lines, each with its line break.
    """
    layouts = [((tuple(page.headers),), " "), (page.halves, " "), (page.halves, "\n")]
    # Wide enough that nothing wraps while minimum widths are measured.
    ruler = Console(width=1000, file=io.StringIO())
    tables: list[tuple[str, list[Table]]] = []
    need = width
    for halves, joint in layouts:
        tables = [
            (title, [_table(page, rows, columns, joint) for columns in halves if _says(rows, columns)])
            for title, rows in page.sections
        ]
        need = max([1, *(Measurement.get(ruler, ruler.options, t).minimum for _, ts in tables for t in ts)])
        if need <= width:
            break
    console = Console(
        width=max(width, need),
        file=io.StringIO(),
        force_terminal=color,
        color_system="standard" if color else None,
        # All three off: names in third parties' records may hold [brackets] and :colons:, which rich interprets.
        highlight=False,
        markup=False,
        emoji=False,
    )
    for alarm in page.alarms:
        console.print(Text(f"!! {alarm}", style="bold red"))
    for title, parts in tables:
        console.print(Text(title, style="bold"))
        for part in parts:
            # Rich may lay a table out wider than measured; overrunning the terminal is better than losing a column.
            console.print(part, crop=False)
            console.print()
    for line in _under(page):
        console.print(Text(line))
    written = console.file.getvalue() if isinstance(console.file, io.StringIO) else ""
    return "\n".join(line.rstrip() for line in written.splitlines()) + "\n"


def markdown(page: Content) -> str:
    """Writes the board as GitHub-flavoured Markdown.

    Args:
        page: board in words.

    Returns:
        The document.
    """
    lines = [line for alarm in page.alarms for line in (f"> **{md(alarm)}**", "")]
    for title, rows in page.sections:
        columns = _used(page, rows)
        lines += [f"### {md(title)}", ""]
        lines.append("| " + " | ".join(md(" ".join(page.headers[c])) for c in columns) + " |")
        lines.append("|" + "|".join(" :-- " if c in LEFT else " --: " for c in columns) + "|")
        lines += ["| " + " | ".join(md(" ".join(row[c])) for c in columns) + " |" for row in rows]
        lines.append("")
    lines += [f"- {md(line)}" for line in _under(page)]
    return "\n".join(lines) + "\n"


def latex(page: Content) -> str:
    r"""Writes the board as `tabular`s and paragraphs that need no package.

    Args:
        page: board in words.

    Returns:
        A fragment to `\input`.
    """
    lines = ["{\\footnotesize"]
    lines += [f"\\noindent\\textbf{{{tex(alarm)}}}\\par\\medskip" for alarm in page.alarms]
    for title, rows in page.sections:
        columns = _used(page, rows)
        lines.append(f"\\noindent\\textbf{{{tex(title)}}}\\par\\smallskip")
        lines.append(f"\\noindent\\begin{{tabular}}{{{''.join('l' if c in LEFT else 'r' for c in columns)}}}")
        lines.append("\\hline")
        lines += [" & ".join(tex(" ".join(page.headers[c])) for c in columns) + r" \\", "\\hline"]
        lines += [" & ".join(tex(" ".join(row[c])) for c in columns) + r" \\" for row in rows]
        lines += ["\\hline", "\\end{tabular}\\par\\medskip"]
    lines += [f"\\noindent {tex(line)}\\par" for line in _under(page)]
    return "\n".join([*lines, "}"]) + "\n"


def _under(page: Content) -> list[str]:
    notes = [f"{superscript(i)} {reason}" for i, reason in enumerate(page.footnotes, start=1)]
    return [*notes, *page.notes, *(["Cells without a number:"] if page.unranked else []), *page.unranked]


def _says(rows: list[dict[str, CellWords]], columns: tuple[str, ...]) -> bool:
    """Returns whether any column but the first, which names the rows, has a word in any row."""
    return any(row[column] != ("",) for row in rows for column in columns[1:])


def _used(page: Content, rows: list[dict[str, CellWords]]) -> list[str]:
    return [column for column in page.headers if column != "flags" or _says(rows, ("defense", "flags"))]


def _table(page: Content, rows: list[dict[str, CellWords]], columns: tuple[str, ...], joint: str) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 0), header_style="bold")
    used = [column for column in columns if column in _used(page, rows)]
    texts = [[_joined(row[column], joint, column) for column in used] for row in rows]
    for i, column in enumerate(used):
        header = Text("\n".join(page.headers[column]))
        lines = [line for cell in (header, *(row[i] for row in texts)) for line in cell.plain.split("\n")]
        words = [word for line in lines for word in line.split()] if column in LEFT else lines
        longest = max(map(cell_len, words))
        table.add_column(
            header,
            justify="left" if column in LEFT else "right",
            # Rich would cut the cell to fit the terminal; a number must stay whole.
            min_width=min(longest, 24 if joint == " " else 16) if column in LEFT else longest,
            overflow="fold",
        )
    for row, cells in zip(rows, texts, strict=True):
        violated = any("CLAIM VIOLATED" in part for part in row["flags"])
        table.add_row(*cells, style="bold red" if violated else "")
    return table


def _joined(cell: CellWords, joint: str, column: str) -> Text:
    words = list(cell)
    if joint == "\n" and column in LEFT and len(words[0]) > 14:
        # Names are single words; they break at the underscore nearest the middle.
        middle = len(words[0]) / 2
        if places := [m.end() for m in re.finditer("_", words[0])]:
            at = min(places, key=lambda place: abs(place - middle))
            words[0] = f"{words[0][:at]}\n{words[0][at:]}"
    return Text(joint.join(words))


def md(words: str) -> str:
    """Returns the words with every character escaped that Markdown or its HTML reads as markup.

    Args:
        words: plain text.
    """
    # Escapes < and > as well: Markdown passes HTML through, and names may come from third parties. A bracket is escaped
    # only at the middle of a link, because intervals have brackets.
    return re.sub(r"([\\|`*<>]|\](?=[(\[:]))", r"\\\1", " ".join(words.split()))


_TEX = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}",
    ">": r"\textgreater{}", "|": r"\textbar{}", "ε": r"$\varepsilon$", "δ": r"$\delta$",
    "\N{GREEK SMALL LETTER SIGMA}": r"$\sigma$",
    "∞": r"$\infty$", "≥": r"$\ge$", "≤": r"$\le$",
    "\N{MULTIPLICATION SIGN}": r"$\times$", "·": r"$\cdot$", "\N{EN DASH}": "--",
    # Directly after the end of a row, LaTeX would read these two as arguments of its line break.
    "[": "{[}", "*": "{*}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
    **{character: f"\\textsuperscript{{{i}}}" for i, character in enumerate(SUPERSCRIPTS)},
}  # fmt: skip


def tex(words: str) -> str:
    """Returns the words with every character escaped that LaTeX reads as a command, or that no font of it has.

    Args:
        words: plain text.
    """
    return "".join(_TEX.get(character) or _typeset(character) for character in " ".join(words.split()))


def _typeset(character: str) -> str:
    # pdflatex stops at most characters beyond Latin-1, and at control characters.
    printable = " " <= character <= "~" or "\N{LATIN CAPITAL LETTER A WITH GRAVE}" <= character <= "ÿ"
    return character if printable else f"U+{ord(character):04X}"
