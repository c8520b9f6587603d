"""`leakbench leaderboard`: the board of a folder of records, as text or as a page."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from .options import FAILED, OK, Json, Recomputed, print_json, say


def table(
    results: Annotated[Path, typer.Argument(help="The --out of a run.")],
    format_: Annotated[str, typer.Option("--format", help="text, markdown, csv or latex.")] = "text",
    verify: Recomputed = False,
    as_json: Json = False,
) -> int:
    """Prints the board of a folder of records.

    Exit 1 if its controls failed, a claim was refuted or, with --verify, numbers are wrong.
    """
    from leakbench.leaderboard.board.table import Board

    from ..catalog.messages import no_such

    formats: dict[str, Callable[[Board], str]] = {
        "text": Board.to_text,
        "markdown": Board.to_markdown,
        "csv": Board.to_csv,
        "latex": Board.to_latex,
    }
    if format_ not in formats:
        raise ValueError(no_such("format", format_, list(formats)))
    faults: list[str] = []
    board = Board.from_folder(results, _verifier(verify, faults))
    if as_json:
        print_json(board.to_dict())
    else:
        print(formats[format_](board).rstrip("\n"))
    return _judged(board, faults)


def build(
    results: Annotated[Path, typer.Argument(help="The --out of a run.")],
    out: Annotated[Path | None, typer.Option(help="Folder of the page; RESULTS/page if not given.")] = None,
    verify: Recomputed = False,
    as_json: Json = False,
) -> int:
    """Builds the page of a folder of records: a single file that needs no network, with its board as CSV and JSON.

    Exit 1 if the board's controls failed, a claim was refuted or, with --verify, numbers are wrong.
    """
    from leakbench.leaderboard.board.table import Board
    from leakbench.leaderboard.page.build import build as build_page

    faults: list[str] = []
    page = build_page(results, results / "page" if out is None else out, _verifier(verify, faults))
    if as_json:
        print_json({"page": str(page)})
    else:
        print(f"page: {page}")
    return _judged(Board.from_folder(results), faults)


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
