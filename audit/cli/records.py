"""`leakbench leaderboard check`, `diff`, `merge`, `publish`, `schema`: folders of records before they join a board."""

from __future__ import annotations

import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor
from contextlib import suppress
from dataclasses import asdict
from importlib import resources
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..environment import environment_variable
from .options import BAD_FILE, FAILED, OK, Json, Recomputed, print_json

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from leakbench.leaderboard.checks.suites import KnownSuite
    from leakbench.leaderboard.records.manifest import Manifest

Folders = Annotated[
    list[Path],
    typer.Argument(help="The --out of a run, its folder of records, or a folder of published suites; may be several."),
]
FailedControls = Annotated[
    bool, typer.Option("--with-failed-controls", help="Flag measured controls that fail, instead of refusing them.")
]


def check(
    folders: Folders, verify: Recomputed = False, with_failed_controls: FailedControls = False, as_json: Json = False
) -> int:
    """Checks folders of records from anywhere: names, sizes, seals, arrays, figures, requests, controls, text.

    Nothing in a folder is executed or followed. Exit 3 if a fault keeps a file off a board.
    """
    from leakbench.leaderboard.checks.check import examine
    from leakbench.leaderboard.checks.report import fault_lines, verdict
    from leakbench.leaderboard.checks.text import printable
    from leakbench.leaderboard.records.folder import folders_below

    documents, refused = [], False
    for folder in (folder for path in folders for folder in folders_below(path)):
        checked = examine(
            folder,
            _recompute(folder) if verify else None,
            known=_known_suites,
            failed_control="flagged" if with_failed_controls else "refused",
        )
        refused |= checked.refused
        documents.append(
            {
                "folder": str(folder),
                "records": len(checked.records),
                "manifests": len(checked.manifests),
                "refused": checked.refused,
                "faults": [fault.to_dict() for fault in checked.faults],
            }
        )
        if not as_json:
            counts = f"{len(checked.records)} records, {len(checked.manifests)} manifests"
            # Folders of suites have names of strangers, which must not write to a terminal.
            name = printable(str(folder), 400)
            print("\n".join([*fault_lines(checked.faults), f"{name}: {counts}, {verdict(checked.faults)}"]))
    if as_json:
        print_json({"folders": documents})
    return BAD_FILE if refused else OK


def diff(
    before: Annotated[Path, typer.Argument(help="The --out of a run, its folder of records, or a board.json.")],
    after: Annotated[Path, typer.Argument(help="The same, to compare with.")],
    as_json: Json = False,
) -> int:
    """Compares two folders of records, or two boards: rows and cells, metric by metric. Exit 1 if they differ."""
    from leakbench.leaderboard.checks.difference import diff as compare
    from leakbench.leaderboard.checks.report import diff_lines

    difference = compare(before, after)
    if as_json:
        print_json(difference.to_dict())
    else:
        print("\n".join(diff_lines(difference)))
    return OK if difference.equal else FAILED


def merge(
    folders: Folders,
    out: Annotated[Path, typer.Option(help="New folder of the merged results.")],
    as_json: Json = False,
) -> int:
    """Merges folders of records into one, whole or not at all. Exit 3 for a conflict, or a fault of `check`."""
    from leakbench.leaderboard.checks.merge import MergeError
    from leakbench.leaderboard.checks.merge import merge as merged_from
    from leakbench.leaderboard.checks.report import fault_lines, verdict
    from leakbench.leaderboard.records.folder import folders_below

    try:
        sources = [folder for path in folders for folder in folders_below(path)]
        merged = merged_from(sources, out, known=_known_suites)
    except MergeError as error:
        if as_json:
            print_json({"out": None, "faults": [fault.to_dict() for fault in error.faults]})
        else:
            print("\n".join([*fault_lines(error.faults), f"nothing was merged: {verdict(error.faults)}"]))
        return BAD_FILE
    checked = merged.checked
    if as_json:
        faults = [fault.to_dict() for fault in checked.faults]
        print_json({"out": str(out), "records": len(checked.records), "copies": merged.copies, "faults": faults})
    else:
        print("\n".join([*fault_lines(checked.faults), f"{out}: {len(checked.records)} records"]))
    return OK


def publish(
    results: Annotated[list[Path], typer.Argument(help="The --out of a run of a suite; may be several.")],
    out: Annotated[Path, typer.Option(help="Folder of published suites, as leaderboard/published.")],
    arrays_up_to: Annotated[
        int, typer.Option(metavar="BYTES", help="Larger arrays are left out and listed; at least 65536.")
    ] = 2 * 2**20,
    verify: Recomputed = False,
    with_failed_controls: FailedControls = False,
    as_json: Json = False,
) -> int:
    """Copies records, manifests, searches and small arrays into a folder for each suite; larger arrays are listed.

    A suite's folder is replaced as a whole. Exit 3 for a fault of `check` or a path of this machine.
    """
    from leakbench.leaderboard.checks.publish import PublishError
    from leakbench.leaderboard.checks.publish import publish as publish_in
    from leakbench.leaderboard.checks.report import fault_lines, verdict

    try:
        suites = publish_in(
            results,
            out,
            most=arrays_up_to,
            known=_known_suites,
            recompute=_recompute if verify else None,
            failed_control="flagged" if with_failed_controls else "refused",
        )
    except PublishError as error:
        if as_json:
            print_json({"out": None, "faults": [fault.to_dict() for fault in error.faults]})
        else:
            print("\n".join([*fault_lines(error.faults), f"nothing was published: {verdict(error.faults)}"]))
        return BAD_FILE
    if as_json:
        described = [
            asdict(suite) | {"folder": str(suite.folder), "faults": [fault.to_dict() for fault in suite.faults]}
            for suite in suites
        ]
        print_json({"out": str(out), "suites": described})
        return OK
    for suite in suites:
        counts = f"{suite.records} records, {suite.bytes} bytes, {suite.left_out} arrays left out"
        print("\n".join([*fault_lines(suite.faults), f"{suite.folder}: {suite.state}, {counts}"]))
        if suite.changes:
            print(f"  {suite.changes}")
    return OK


def schema(document: Annotated[str, typer.Argument(help="Kind of file: record or manifest.")] = "record") -> int:
    """Prints the JSON Schema (draft 2020-12) of a record or of a manifest."""
    from leakbench.leaderboard.records.json_schema import manifest_schema, record_schema, to_json

    from ..catalog.messages import no_such

    schemas = {"record": record_schema, "manifest": manifest_schema}
    if document not in schemas:
        raise ValueError(no_such("schema", document, schemas))
    print(to_json(schemas[document]()), end="")
    return OK


def _recompute(folder: Path) -> Callable[[Any, Path], str]:
    """Returns the comparison of a record with its arrays, and of its noise with that of its training."""
    # `leaderboard` may not import `audit`, whose scorers recompute the numbers: it receives the function.
    from leakbench.leaderboard.checks.check import examine

    from ..run.claims import multiplier_fault
    from ..run.verify import contradiction

    measured = [record for record in examine(folder).records.values() if record.status == "ok"]
    return lambda record, place: contradiction(record, place) or multiplier_fault(record, measured)


_FREE = re.compile(r"seeds=\[[\d_, ]*\]|controls=(?:true|false)")
"""Overrides that choose cells and change none. Others may name files, which a check must not open; a stranger wrote
them, and nested brackets and dotted keys exhaust the parser's stack or time."""

_MOST_SEEDS = 100


def _known_suites(manifests: Sequence[Manifest]) -> list[KnownSuite | None]:
    """Returns the built-in suites of requests, with the seeds and controls of their commands; None for other suites."""
    keys = [_key(manifest) for manifest in manifests]
    if new := [key for key in dict.fromkeys(keys) if key is not None and key not in _resolved]:
        _resolved.update(zip(new, _listed(new), strict=True))
    return [None if key is None else _resolved[key] for key in keys]


_SuiteKey = tuple[str, tuple[str, ...], bool]
"""Name of a suite, overrides, and whether noise comes from the operating system."""

_resolved: dict[_SuiteKey, KnownSuite] = {}


def _key(manifest: Manifest) -> _SuiteKey | None:
    from ..suite.small import small_forms

    # Only names of files of the package: `load` would read any file for a path.
    files = {entry.name for entry in resources.files("leakbench.benchmarks.suites").iterdir()}
    if f"{manifest.suite}.toml" not in files and manifest.suite not in small_forms():
        return None
    command = manifest.command
    overrides = [word for option, word in pairwise(command) if option == "--set" and _FREE.fullmatch(word)]
    return manifest.suite, tuple(overrides), any(cell.secure for cell in manifest.cells)


def _listed(keys: Sequence[_SuiteKey]) -> list[KnownSuite]:
    """Returns the suites; by a process that ends, because PyTorch takes more than half a gigabyte.

    Raises:
        BrokenExecutor: the process was ended by something else, as the system does where memory is short.
    """
    if "torch" in sys.modules:
        return [*map(built_in, keys)]
    spawned = get_context("spawn")
    ours, theirs = spawned.Pipe(duplex=False)
    process = spawned.Process(target=_send_listed, args=(keys, theirs), daemon=True)
    # Both are started as `python -c`, which imports from the current folder first: here that of a stranger's files.
    with environment_variable("PYTHONSAFEPATH", "1"):
        process.start()
    theirs.close()
    try:
        answer = ours.recv()
    except (EOFError, OSError):  # the latter in the middle of an answer
        answer = None
    process.join()
    if answer is None:
        raise BrokenExecutor(
            f"the process that lists the cells of suites ended without an answer (exit code {process.exitcode}), so "
            "the folder was not checked; if memory was short, free a gigabyte and run the command again"
        )
    if isinstance(answer, Exception):
        raise answer
    return answer


def _send_listed(keys: Sequence[_SuiteKey], connection: Connection) -> None:
    """Sends the suites, or the exception that listing them raised, and ends this process."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Control-C is sent to both processes, and ours says so
    try:
        answer = [*map(built_in, keys)]
    except Exception as error:
        error.add_note(traceback.format_exc())  # a traceback is not sent with its exception
        answer = error
    connection.send(answer)
    # An orderly end runs PyTorch's destructors, which touch 130 MB more.
    os._exit(0)


def built_in(key: _SuiteKey) -> KnownSuite:
    """Returns a built-in suite, with its cells if they can be listed without a search and without a download.

    Args:
        key: of the suite.
    """
    from leakbench.benchmarks import data
    from leakbench.leaderboard.checks.suites import KnownSuite

    from ..plan.checkpoints import stored_weights
    from ..plan.expand import plan
    from ..plan.manifest import manifest_of
    from ..suite import suite as suites

    name, overrides, secure = key
    suite = suites.load(name)
    with suppress(ValueError):  # of a command that somebody else wrote
        suite = suite.with_overrides(overrides)
    sources = [suite.task.data] + ([] if suite.share is None else [suite.share.data])
    embedded = all("embedded" in data.describe(source) for source in sources)
    # A search's result is in the cells' ids, and the search is not repeated here.
    if suite.tune is not None or not embedded or len(suite.seeds) > _MOST_SEEDS:
        return KnownSuite(digest=suite.digest)
    cells = manifest_of(plan(suite, secure_noise=secure), suite, secure).cells
    return KnownSuite(digest=suite.digest, cells=cells, checkpoints=stored_weights(suite.zoo) if suite.zoo else {})
