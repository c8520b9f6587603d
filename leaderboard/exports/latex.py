"""LaTeX: tables with the rules of `booktabs`, and two lines of notes; reasons and rows' ids are comments."""

import re
from collections.abc import Sequence

from ..board.content import SUPERSCRIPTS, content
from ..board.identity import board_version, row_id
from ..board.table import Board
from ..board.text_formats import LEFT, tex
from .publication import Publication
from .safe_text import in_one_line

_NOTES = (
    "Means over seeds with 95 % intervals. Worst: the strongest attack's, simultaneous over the attacks compared; "
    "≥: at least; ≤: the most that the claim allows; n/a: not measured."
)

_LONGEST = 22
"""Characters of a column of words that is not broken into lines."""


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
    lines = [f"% {board_version()}. Needs the package booktabs.", "{\\footnotesize\\setlength{\\tabcolsep}{3pt}"]
    lines += [f"\\noindent\\textbf{{{tex(in_one_line(alarm))}}}\\par\\medskip" for alarm in page.alarms]
    for title, rows in page.sections:
        cells = [{name: _plain(" ".join(words)) for name, words in row.items()} for row in rows]
        shown = [name for name in page.headers if any(row[name] not in ("", "-", "n/a") for row in cells)]
        lines.append(f"\\noindent\\textbf{{{tex(in_one_line(title))}}}\\par\\smallskip")
        broken = {name for name in shown if name in LEFT and max(len(row[name]) for row in cells) > _LONGEST}
        layout = "".join("p{2.5cm}" if name in broken else "l" if name in LEFT else "r" for name in shown)
        headers = [f"\\shortstack[{'l' if name in LEFT else 'r'}]{{{_lines(page.headers[name])}}}" for name in shown]
        lines += [f"\\noindent\\begin{{tabular}}{{{layout}}}", "\\toprule", _row(headers), "\\midrule"]
        for row in cells:
            lines += [f"% row {row_id(next(ids))}", _row([_cell(row[name], name in broken) for name in shown])]
        lines += ["\\bottomrule", "\\end{tabular}\\par\\medskip"]
    lines += [f"\\noindent {tex(note)}\\par" for note in (_NOTES, f"{board_version()}.")]
    lines += ["}", *(f"% {in_one_line(reason)}" for reason in (*page.footnotes, *page.unranked))]
    return {"board.tex": ("\n".join(lines) + "\n").encode()}


def _plain(words: str) -> str:
    return in_one_line(re.sub(f"[{SUPERSCRIPTS}]", "", words))


def _lines(words: Sequence[str]) -> str:
    return r"\\".join(map(tex, words))


def _cell(words: str, broken: bool) -> str:
    # LaTeX breaks no line at an underscore by itself.
    return "\\raggedright " + tex(words).replace("\\_", "\\_\\allowbreak{}") if broken else tex(words)


def _row(cells: list[str]) -> str:
    # A double backslash has another meaning behind `\raggedright`.
    return " & ".join(cells) + r" \tabularnewline"
