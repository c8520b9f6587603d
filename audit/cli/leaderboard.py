"""`leakbench leaderboard`: the board of folders of records, as text, as the page of a run, or as a site."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from .options import FAILED, OK, Json, Recomputed, print_json, say


def table(
    results: Annotated[list[Path], typer.Argument(help="The --out of one run or of several.")],
    format_: Annotated[
        str,
        typer.Option(
            "--format",
            help="text, markdown, csv, latex, parquet, eval_results, model_index, every_eval_ever, private_ml or "
            "croissant.",
        ),
    ] = "text",
    out: Annotated[Path | None, typer.Option(help="Folder, or the file of a format that is one.")] = None,
    dataset: Annotated[str | None, typer.Option(metavar="ORG/NAME", help="Data set that publishes the board.")] = None,
    license_: Annotated[str | None, typer.Option("--license", help="Of the published board, as CC-BY-4.0.")] = None,
    verify: Recomputed = False,
    as_json: Json = False,
) -> int:
    """Prints the board of folders of records, or exports it.

    Exit 1 if its controls failed, a claim was refuted or, with --verify, numbers are wrong.
    """
    from leakbench.leaderboard.board.table import Board
    from leakbench.leaderboard.exports.formats import FORMATS, printable, write
    from leakbench.leaderboard.exports.publication import Publication
    from leakbench.leaderboard.records.folder import folders_below

    from ..catalog.messages import no_such

    if format_ not in ("text", *FORMATS):
        raise ValueError(no_such("format", format_, ["text", *FORMATS]))
    if format_ == "text" and out is not None:
        raise ValueError("--out needs a --format other than text")
    publication = Publication(dataset=dataset, license=license_)
    faults: list[str] = []
    board = Board.from_folders(
        [folder for path in results for folder in folders_below(path)], _verifier(verify, faults)
    )
    files = {} if format_ == "text" else FORMATS[format_](board, publication)
    if out is not None:
        for path in write(files, out):
            say(f"written: {path}")
    if as_json:
        print_json(board.to_dict())
    elif out is None:
        print((board.to_text() if format_ == "text" else printable(files, format_)).rstrip("\n"))
    return _judged(board, faults)


def build(
    results: Annotated[
        list[Path], typer.Argument(help="The --out of one run or of several, or folders with `records/` at any depth.")
    ],
    out: Annotated[Path, typer.Option(help="Folder of the site: absent, empty, or of a former build.")] = Path("site"),
    dataset: Annotated[str | None, typer.Option(metavar="ORG/NAME", help="Data set that publishes the board.")] = None,
    license_: Annotated[str | None, typer.Option("--license", help="Of the published board, as CC-BY-4.0.")] = None,
    url: Annotated[str | None, typer.Option(help="Address of the published site, for citations.")] = None,
    submissions: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of others' submissions.")] = None,
    verify: Recomputed = False,
    as_json: Json = False,
) -> int:
    """Builds a static site of folders of records: pages for suites, defenses, attacks, rows and submissions, no server.

    A later build removes the pages that no record needs any more. Exit 1 if the board's controls failed, a claim was
    refuted or, with --verify, numbers are wrong.
    """
    from leakbench.leaderboard.exports.publication import Publication
    from leakbench.leaderboard.site.build import build_site

    from .guide import guide
    from .submit import rules_of

    faults: list[str] = []
    publication = Publication(dataset=dataset, license=license_, url=url)
    site = build_site(
        results,
        out,
        guide=guide(),
        publication=publication,
        submissions=submissions,
        rules=None if submissions is None else rules_of(),
        verify=_verifier(verify, faults),
    )
    front = out / "index.html"
    if as_json:
        print_json({"site": str(front), "rows": [row.id for row in site.rows]})
    else:
        print(f"site: {front}")
    return _judged(site.board, faults)


def page(
    results: Annotated[Path, typer.Argument(help="The --out of a run.")],
    out: Annotated[Path | None, typer.Option(help="Folder of the page; RESULTS/page if not given.")] = None,
    verify: Recomputed = False,
    as_json: Json = False,
) -> int:
    """Builds the page of one run: a single file that needs no network, with its board as CSV and JSON.

    Exit 1 if the board's controls failed, a claim was refuted or, with --verify, numbers are wrong.
    """
    from leakbench.leaderboard.page.build import build_with_board

    faults: list[str] = []
    path, board = build_with_board(results, results / "page" if out is None else out, _verifier(verify, faults))
    if as_json:
        print_json({"page": str(path)})
    else:
        print(f"page: {path}")
    return _judged(board, faults)


def _judged(board: Any, faults: list[str]) -> int:
    for fault in faults:
        say(f"not verified: {fault}")
    lost = [control for control in board.controls if not control.ok]
    return FAILED if faults or lost or board.violations else OK


def _verifier(verify: bool, faults: list[str]) -> Callable[[Any, Path], str] | None:
    # `leaderboard` may not import `audit`, whose scorers recompute the numbers: it receives the function.
    if not verify:
        return None
    from leakbench.leaderboard.records.record import read_all

    from ..run.claims import multiplier_fault
    from ..run.verify import contradiction

    beside: dict[Path, list[Any]] = {}

    def check(record: Any, folder: Path) -> str:
        if folder not in beside:
            beside[folder] = [completed for completed in read_all(folder) if completed.status == "ok"]
        fault = contradiction(record, folder) or multiplier_fault(record, beside[folder])
        if fault:
            faults.append(f"record {record.id} ({record.defense.name}, {record.kind}, seed {record.seed}): {fault}")
        return fault

    return check
