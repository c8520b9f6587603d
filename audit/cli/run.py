"""`leakbench run`: computes the records of a suite and prints their board."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..external.out_folder import check_folder
from .options import FAILED, OK, Json, Overrides, Recomputed, print_json, say

if TYPE_CHECKING:
    from ..suite.suite import Suite


def run(
    suite: Annotated[str, typer.Argument(help="Name of a suite, or path of a suite file.")],
    small: Annotated[bool, typer.Option("--small", help="The suite's small form: minutes on two cores.")] = False,
    defense: Annotated[list[str] | None, typer.Option(help="Only this defense; may be repeated.")] = None,
    attack: Annotated[list[str] | None, typer.Option(help="Only this attack; may be repeated.")] = None,
    add_defense: Annotated[
        list[str] | None,
        typer.Option(help="A defense beside the suite's: a name, FILE.py:NAME, or a TOML table with its settings."),
    ] = None,
    add_attack: Annotated[
        list[str] | None, typer.Option(help="An attack beside the suite's, in the same forms; may be repeated.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Where records go; results/SUITE if not given.")] = None,
    device: Annotated[
        str, typer.Option(help="cpu, cuda, or auto: small networks on the CPU, others on a GPU if there is one.")
    ] = "auto",
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes; one a core on the CPU if not given.")] = None,
    seed: Annotated[int | None, typer.Option(help="Only this seed, instead of the suite's.")] = None,
    settings: Overrides = None,
    secure_noise: Annotated[bool, typer.Option(help="Noise from the operating system's generator.")] = False,
    fail_fast: Annotated[bool, typer.Option(help="Stop at the first cell that fails.")] = False,
    recompute: Annotated[
        bool, typer.Option(help="Compute records of another code, or edited ones, again instead of refusing them.")
    ] = False,
    verify: Recomputed = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only rehearse added methods, and say how many cells would be computed.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Runs a suite, writes a record per cell, prints the board. Cells with existing records are not run again."""
    from leakbench.leaderboard.board.table import Board
    from leakbench.leaderboard.records.folder import Completeness
    from leakbench.leaderboard.records.manifest import read_manifests

    from ..run import harness
    from ..run.progress import show
    from ..suite import suite as suites
    from ..suite.small import small_forms

    if full := small_forms().get(suite):
        say(f"leakbench run {suite} is now leakbench run {full} --small; the old name goes with the next version")
        suite, small = full, True
    chosen = suites.load(suite, small=small)
    chosen = chosen.with_overrides(settings or [], seed=seed).select(defenses=defense, attacks=attack)
    chosen = chosen.with_added(defenses=add_defense or (), attacks=add_attack or ())
    if dry_run:
        return _dry_run(chosen, secure_noise, as_json)
    directory = out or Path("results") / chosen.name
    check_folder(directory)
    overrides = [*(settings or []), *([] if seed is None else [f"seeds=[{seed}]"])]
    methods = {"defense": defense, "attack": attack, "add-defense": add_defense, "add-attack": add_attack}
    command = _command_line(suite, small, methods, overrides, secure_noise)
    with show(quiet=as_json) as report:
        done = harness.run(
            chosen,
            directory,
            device=None if device == "auto" else harness.pick_device(device),
            jobs=jobs,
            secure_noise=secure_noise,
            fail_fast=fail_fast,
            recompute=recompute,
            verify=verify,
            command=command,
            report=report,
        )
    # A folder may hold manifests of other requests: the board's completeness is checked against this command's.
    ids = {record.id for record in done}
    manifests = [m for m in read_manifests(directory / "records") if ids <= {cell.id for cell in m.cells}]
    mine = tuple(m for m in manifests if m.command == command)[:1]
    # In the order of reading from disk, so that `leaderboard table` breaks ties alike.
    board = Board.from_records(done, Completeness(mine, directory))
    if as_json:
        print_json({"out": str(directory), "records": [record.id for record in done], "board": board.to_dict()})
    else:
        print(board.to_text())
        say(f"records: {directory}")
    failed = [record for record in done if record.status == "failed"]
    lost = [control for control in board.controls if not control.ok]
    return FAILED if failed or board.violations or lost else OK


def _dry_run(suite: Suite, secure_noise: bool, as_json: bool) -> int:
    """Plans a suite and rehearses its added methods; computes and writes nothing."""
    from ..plan.expand import plan
    from ..run.rehearsal import rehearse

    cells = plan(suite, secure_noise=secure_noise)
    rehearsed = rehearse(suite, cells)
    runnable = len(cells.cells) - len(cells.skipped)
    if as_json:
        print_json({"suite": suite.name, "cells": runnable, "skipped": len(cells.skipped), "rehearsed": rehearsed})
    else:
        print(f"{suite.name}: {runnable} cells would be computed, {len(cells.skipped)} skipped")
        for method, outcome in rehearsed.items():
            print(f"{method} {outcome}")
    return OK


def _command_line(
    suite: str, small: bool, methods: dict[str, list[str] | None], overrides: list[str], secure: bool
) -> tuple[str, ...]:
    """Returns the command that requests the same cells, without options on how and where they are computed."""
    options = [(f"--{option}", name) for option, names in methods.items() for name in names or ()]
    options += [("--set", override) for override in overrides]
    words = [word for option in options for word in option]
    return ("leakbench", "run", suite, *["--small"] * small, *words, *["--secure-noise"] * secure)
