"""Static site of a board: pages of suites, defenses, attacks and rows, with downloads; no server and no network.

Equal records give equal bytes, except for the statements of the publisher. Text of records comes from strangers: it is
escaped, it is in no path and no script, and paths of the machine are shortened to file names.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..board.identity import board_version, row_id
from ..board.table import Board
from ..exports.formats import FORMATS
from ..exports.publication import Publication
from ..page.papers import refuse_unused
from ..page.plots import bundle
from ..records.folder import ScoreCheck
from ..submissions.check import Rules
from ..submissions.tiers import tier_of
from . import links
from .attacks import attack_page, by_attack
from .cite import bibtex
from .defenses import by_defense, defense_page
from .files import refuse_occupied, write_site
from .front import front_page
from .portable_board import PortableCopies
from .row import JSON, row_page
from .site import Guide, Site, SiteRow
from .sources import read_sources
from .submissions import SubmissionsRead, read_submissions, submission_page
from .suites import VEGA, SuiteOnSite, json_bytes, suite_files, suites_of
from .texts import methods_page, pitfalls_page


def build_site(
    results: Sequence[Path],
    out: Path,
    *,
    guide: Guide,
    publication: Publication,
    submissions: Path | None = None,
    rules: Rules | None = None,
    verify: ScoreCheck | None = None,
) -> Site:
    """Builds the site of some results.

    Args:
        results: outputs of runs, or folders with `records/` at any depth; no record may be in two of them.
        out: root of the site: absent, empty, or of a former build, of which stale pages are removed.
        guide: descriptions of methods and suites.
        publication: statements of the publisher.
        submissions: folder of others' submissions, which are checked; None for none.
        rules: of that check; needed with `submissions`.
        verify: compares a record's numbers with those recomputed from its scores; None to skip that.

    Returns:
        The content of the site; its front page is `index.html` in `out`.

    Raises:
        RecordError: no records, a bad record, an explanation of no difference, or an `out` with other files.
        BoardError: the records do not form a board.
        ValueError: submissions without the rules of their check.
    """
    refuse_occupied(out)
    sources, read = read_sources(results, verify), None
    if submissions is not None:
        if rules is None:
            raise ValueError("rules must be those of the check of submissions, got None")
        read = read_submissions(submissions, rules, sources.records)
        sources = sources.with_submissions(read.named, read.folders)
    board = sources.board
    refuse_unused(board.rows, explanations := sources.explanations())
    copies = PortableCopies()
    suites = suites_of(sources, board, copies)
    site = Site(
        board=(shown := copies.of(board)),
        rows=tuple(_rows(board, shown, read)),
        folders=sources.folders,
        guide=guide,
        publication=publication,
        explanations=explanations,
        submissions=read.submissions if read else (),
        refused=copies.of(read.refused) if read else {},
    )
    write_site(_files(site, board, suites), out)
    return site


def _rows(board: Board, shown: Board, read: SubmissionsRead | None) -> Iterator[SiteRow]:
    # Ids from the rows as recorded: a shortened path must not change them.
    for recorded, row in zip(board.rows, shown.rows, strict=True):
        submission = read.owner(recorded) if read else None
        tier = tier_of(row.flags, by="the publisher of this board") if submission is None else submission.tier
        yield SiteRow(id=row_id(recorded), row=row, tier=tier, submission=submission)


def _files(site: Site, board: Board, suites: Sequence[SuiteOnSite]) -> dict[str, bytes]:
    """Files of a site by path; the front page is last, so that its links lead to pages."""
    content = site.board.to_dict()
    trees: dict[str, dict[str, Any]] = {}
    for row, tree in zip(site.rows, content["rows"], strict=True):
        trees[row.id] = tree
        tree |= {"id": row.id, "page": links.row_page(row.id)}
    files = _downloads(site, board) | {"board.json": json_bytes(content)}
    for suite in suites:
        files |= suite_files(suite, trees, site.explanations)
    if any(f'<script src="{links.root_of(name)}{VEGA}">'.encode() in text for name, text in files.items()):
        files[VEGA] = bundle().encode()
    for name, rows in by_defense(site.rows).items():
        files[links.defense_page(name)] = defense_page(site, name, rows).encode()
    for name, cells in by_attack(site).items():
        files[links.attack_page(name)] = attack_page(site, name, cells).encode()
    for row, recorded in zip(site.rows, board.rows, strict=True):
        page, tree = links.row_page(row.id), trees[row.id]
        files[page.replace("index.html", JSON)] = json_bytes({"version": board_version(), **tree})
        cite = bibtex(row, site.publication, [*recorded.records, *recorded.unranked])
        files[page] = row_page(site, row, tree, cite).encode()
    for submission in site.submissions:
        page = links.submission_page(submission.handle, submission.digest)
        files[page] = submission_page(site, submission).encode()
    files |= {links.METHODS: methods_page(site).encode(), links.PITFALLS: pitfalls_page(site).encode()}
    return files | {links.FRONT: front_page(site).encode()}


def _downloads(site: Site, board: Board) -> dict[str, bytes]:
    """Tables of the whole board; rows whose privacy unit is a client are in a Parquet file of their own."""
    tables = FORMATS["csv"](board, site.publication)
    # A board without rows has no table.
    parquet = FORMATS["parquet"](board, site.publication) if board.rows else {}
    names = {"record.parquet": "board.parquet", "client.parquet": "board_clients.parquet"}
    return tables | {names[name]: content for name, content in parquet.items()}
