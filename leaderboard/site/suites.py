"""Page of a suite: the page of a run for its records, within the site, with a link from each row to the row's page."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..board.identity import board_version, row_id
from ..board.table import Board, BoardError
from ..exports.safe_text import portable
from ..page.build import Surroundings, render
from ..page.papers import PaperExplanation
from . import links
from .portable_board import PortableCopies
from .sources import Sources

VEGA = "vega.js"
"""Script that draws plots, for the pages of all suites."""

CSV, JSON = "suite.csv", "suite.json"

MOST_ROWS, MOST_RECORDS = 100, 1500
"""Size of a suite above which its page is the table alone: plots take ten milliseconds a record, and a page of many
megabytes."""

MOST_DRAWN = 3000
"""Records of all suites with plots, the smallest suites first; further suites have their tables alone."""


@dataclass(frozen=True, kw_only=True)
class SuiteOnSite:
    """Board of one suite, without paths of this machine.

    Attributes:
        name: of the suite.
        board: of its records.
        ids: of the rows of the board, in order.
        csv: the board as CSV.
        sources: its records and their folders.
        copies: that made the board.
        drawn: whether its page has plots, pictures and the matrix of attacks.
    """

    name: str
    board: Board
    ids: tuple[str, ...]
    csv: str
    sources: Sources
    copies: PortableCopies
    drawn: bool = True


def suites_of(sources: Sources, board: Board, copies: PortableCopies) -> list[SuiteOnSite]:
    """Returns the suites of a site by name.

    Args:
        sources: of all suites.
        board: of all records.
        copies: makes them portable.

    Raises:
        BoardError: two suites have the same name but for the path before it.
    """
    names = sorted({record.suite for record in sources.everything})
    shown: dict[str, str] = {}
    for name in names:
        # The page of one would replace the page of the other.
        if (same_page := shown.setdefault(portable(name), name)) != name:
            raise BoardError(f"suites must differ without their paths, got {same_page!r} and {name!r}; rename one")
    suites = []
    for name in names:
        own = sources.of_suite(name)
        of_suite = board if len(names) == 1 else own.board
        suites.append(
            SuiteOnSite(
                name=portable(name),
                board=copies.of(of_suite),
                ids=tuple(map(row_id, of_suite.rows)),
                csv=portable(of_suite.to_csv()),
                sources=own,
                copies=copies,
            )
        )
    drawn = _drawn(suites)
    return [replace(suite, drawn=suite.name in drawn) for suite in suites]


def _drawn(suites: Sequence[SuiteOnSite]) -> set[str]:
    """Returns the names of the suites that get plots."""
    drawn, remaining = set(), MOST_DRAWN
    for suite in sorted(suites, key=lambda suite: (len(suite.sources.everything), suite.name)):
        records = len(suite.sources.everything)
        if len(suite.board.rows) <= MOST_ROWS and records <= min(MOST_RECORDS, remaining):
            drawn.add(suite.name)
            remaining -= records
    return drawn


def suite_files(
    suite: SuiteOnSite, trees: Mapping[str, Mapping[str, Any]], explanations: Sequence[PaperExplanation] = ()
) -> dict[str, bytes]:
    """Returns the page of a suite with its tables beside it.

    Args:
        suite: to show.
        trees: id of a row -> the row in `Board.to_dict`.
        explanations: of differences from papers' figures.
    """
    page = links.suite_page(suite.name)
    folder = page.rpartition("/")[0]
    # By identity, because the text of a row may have lost a path that its id is made from.
    of_row = {id(row): identifier for row, identifier in zip(suite.board.rows, suite.ids, strict=True)}
    surroundings = Surroundings(
        root=links.root_of(page),
        row_page=lambda row: (of_row[id(row)], links.row_page(of_row[id(row)])),
        files=(CSV, JSON),
        script=VEGA,
        brief=_brief(suite),
    )
    text = render(
        suite.board,
        suite.copies.of(suite.sources.everything),
        suite.sources.folders,
        suite.copies.of(tuple(suite.sources.tunings())),
        suite.sources.selftest(),
        surroundings,
        explanations=explanations,
    )
    return {
        f"{folder}/{CSV}": suite.csv.encode(),
        f"{folder}/{JSON}": json_bytes(_numbers(suite, trees)),
        page: text.encode(),
    }


def json_bytes(content: Any) -> bytes:
    """Returns a JSON document in a file.

    Args:
        content: without NaN or infinity.
    """
    return (json.dumps(content, allow_nan=False, separators=(",", ":")) + "\n").encode()


def _brief(suite: SuiteOnSite) -> str:
    """Sentence on the parts that the page of a suite leaves out, or of one of many; empty for others."""
    if suite.drawn:
        return ""
    rows, records = len(suite.board.rows), len(suite.sources.everything)
    large = rows > MOST_ROWS or records > MOST_RECORDS
    reason = (
        f"This suite has {rows} rows of {records} records, so its" if large
        else f"All suites of this site have more than {MOST_DRAWN} records, and this is none of the smallest, so its"
    )  # fmt: skip
    return (
        f"{reason} plots, pictures and the matrix of its attacks are left out: the page of each row has every number "
        "of its attacks, and leakbench leaderboard page makes the whole page of a run from its records."
    )


def _numbers(suite: SuiteOnSite, trees: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Numbers of the board of a suite, without the attacks of each row, which are beside the row's page."""
    rows: Sequence[dict[str, Any]] = [
        {"id": identifier, "page": links.row_page(identifier)}
        | {key: item for key, item in trees[identifier].items() if key != "attacks"}
        for identifier in suite.ids
    ]
    board = suite.board
    return {
        "version": board_version(),
        "suite": suite.name,
        "trustworthy": board.trustworthy,
        "gaps": list(board.gaps),
        "rows": rows,
    }
