"""Static site of a board: pages of suites, defenses, attacks and rows, with downloads; no server and no network.

Equal records give equal bytes, except for the statements of the publisher. Text of records comes from strangers: it is
escaped, it is in no path and no script, and paths of the machine are shortened to file names.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..board.identity import board_version, row_id
from ..board.table import Board
from ..exports.formats import FORMATS
from ..exports.publication import Publication
from ..page.build import render_page
from ..page.plots import bundle
from ..records.folder import ScoreCheck
from ..submissions.tiers import tier_of
from . import links
from .files import refuse_occupied, write_site
from .methods import attack_page, by_attack, by_defense, defense_page
from .portable_board import PortableCopies
from .row import JSON, row_page
from .site import Guide, Site, SiteRow
from .sources import Sources, read_sources
from .suites import VEGA, SuiteOnSite, json_bytes, suite_files, suites_of


def build_site(
    results: Sequence[Path], out: Path, *, guide: Guide, publication: Publication, verify: ScoreCheck | None = None
) -> Site:
    """Builds the site of some results.

    Args:
        results: outputs of runs, or folders with `records/` at any depth; no record may be in two of them.
        out: root of the site: absent, empty, or of a former build, of which stale pages are removed.
        guide: descriptions of methods and suites.
        publication: statements of the publisher.
        verify: compares a record's numbers with those recomputed from its scores; None to skip that.

    Returns:
        The content of the site; its front page is `index.html` in `out`.

    Raises:
        RecordError: no records, a bad record, or an `out` with other files.
        BoardError: the records do not form a board.
    """
    refuse_occupied(out)
    sources = read_sources(results, verify)
    board = Board.from_records(sources.records, sources.complete)
    copies = PortableCopies()
    suites = suites_of(sources, board, copies)
    site = _site(board, copies.of(board), sources, guide, publication)
    write_site(_files(site, board, suites), out)
    return site


def _site(board: Board, shown: Board, sources: Sources, guide: Guide, publication: Publication) -> Site:
    # Ids from the rows as recorded: a shortened path must not change them.
    rows = [
        SiteRow(id=row_id(recorded), row=row, tier=tier_of(row.flags))
        for recorded, row in zip(board.rows, shown.rows, strict=True)
    ]
    return Site(board=shown, rows=tuple(rows), folders=sources.folders, guide=guide, publication=publication)


def _files(site: Site, board: Board, suites: Sequence[SuiteOnSite]) -> dict[str, bytes]:
    """Files of a site by path; the front page is last, so that its links lead to pages."""
    content = site.board.to_dict()
    trees: dict[str, dict[str, Any]] = {}
    for row, tree in zip(site.rows, content["rows"], strict=True):
        trees[row.id] = tree
        tree |= {"id": row.id, "page": links.row_page(row.id)}
    files = _downloads(site, board) | {"board.json": json_bytes(content)}
    for suite in suites:
        files |= suite_files(suite, trees)
    if any(f'<script src="{links.root_of(name)}{VEGA}">'.encode() in text for name, text in files.items()):
        files[VEGA] = bundle().encode()
    for name, rows in by_defense(site.rows).items():
        files[links.defense_page(name)] = defense_page(site, name, rows).encode()
    for name, cells in by_attack(site).items():
        files[links.attack_page(name)] = attack_page(site, name, cells).encode()
    for row in site.rows:
        page, tree = links.row_page(row.id), trees[row.id]
        files[page.replace("index.html", JSON)] = json_bytes({"version": board_version(), **tree})
        files[page] = row_page(site, row, tree).encode()
    return files | {links.FRONT: front_page(site, suites).encode()}


def _downloads(site: Site, board: Board) -> dict[str, bytes]:
    """Tables of the whole board; rows whose privacy unit is a client are in a Parquet file of their own."""
    tables = FORMATS["csv"](board, site.publication)
    # A board without rows has no table.
    parquet = FORMATS["parquet"](board, site.publication) if board.rows else {}
    names = {"record.parquet": "board.parquet", "client.parquet": "board_clients.parquet"}
    return tables | {names[name]: content for name, content in parquet.items()}


def front_page(site: Site, suites: Sequence[SuiteOnSite]) -> str:
    """Renders a front page with links to all others.

    Args:
        site: to list.
        suites: of the site.
    """
    context = {
        "root": links.root_of(links.FRONT),
        "facts": [(str(len(site.rows)), "rows", ""), (str(len(suites)), "suites", "")],
        "suites": [
            (suite.name, links.suite_page(suite.name), site.guide.suites.get(suite.name, "")) for suite in suites
        ],
        "defenses": [(name, links.defense_page(name)) for name in sorted(by_defense(site.rows))],
        "attacks": [(name, links.attack_page(name)) for name in sorted(by_attack(site))],
        "rows": [(row.row.suite, row.row.label, links.row_page(row.id)) for row in site.rows],
        "files": sorted(_downloads_of(site)),
    }
    return render_page("overview.html", context)


def _downloads_of(site: Site) -> set[str]:
    units = {"record": "board.parquet", "client": "board_clients.parquet"}
    return {"board.csv", "board.json", *(units[row.row.unit] for row in site.rows)}
