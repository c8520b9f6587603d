"""The command `leakbench`: run suites, show boards, look methods up, compute epsilon, look at the machine.

Exit codes: 0 done; 1 a cell failed, a control failed, a claim was violated, or a file could not be written; 2 bad
usage; 3 a bad suite or record file; 130 interrupted. With `--json`, stdout holds one JSON document and nothing else;
progress goes to stderr always.
"""

from __future__ import annotations

import io
import json
import math
import os
import signal
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor
from pathlib import Path
from typing import Annotated, Any, NoReturn, get_args

import typer

app = typer.Typer(
    name="leakbench",
    help="How much utility a private training keeps, what it proves, and what still leaks under real attacks.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
board = typer.Typer(help="Boards from records.", no_args_is_help=True)
app.add_typer(board, name="leaderboard")

OK, FAILED, USAGE, BAD_FILE, INTERRUPTED = 0, 1, 2, 3, 130

Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else.")]
Settings = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a setting.")]


Verify = Annotated[bool, typer.Option("--verify", help="Recompute numbers from the scores beside the records.")]


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs the command and exits; every expected mistake is one sentence on stderr."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # an encoding without ∞ shows ?, instead of losing the board
        sys.stdout.reconfigure(errors="replace")
    try:
        code = app(args=arguments, standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone (`| head`); without this Python complains once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = OK
    except Exception as error:
        code = _known(error)
        if code is None:
            raise
        # Mistakes on the command line are exceptions of typer's own, which know how to be shown.
        shown = getattr(error, "format_message", None)
        text = shown() if shown else str(error)
        if text:  # without arguments there is nothing to add to the help
            _say(f"error: {text}")
    if code == INTERRUPTED:  # some versions of typer raise nothing, but return it
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # who presses it again gets this sentence, and no traceback
        _say("interrupted; what was finished is kept, run the same command to go on")
    sys.exit(code if isinstance(code, int) else OK)


@app.command()
def run(
    suite: Annotated[str, typer.Argument(help="Name of a suite, or path of a suite file.")],
    defense: Annotated[list[str] | None, typer.Option(help="Only this defense; may be repeated.")] = None,
    attack: Annotated[list[str] | None, typer.Option(help="Only this attack; may be repeated.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where records go; results/SUITE if not given.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes; one a core on the CPU if not given.")] = None,
    seed: Annotated[int | None, typer.Option(help="Only this seed, instead of the suite's.")] = None,
    settings: Settings = None,
    secure_noise: Annotated[bool, typer.Option(help="Noise from the operating system's generator.")] = False,
    fail_fast: Annotated[bool, typer.Option(help="Stop at the first cell that fails.")] = False,
    recompute: Annotated[
        bool, typer.Option(help="Compute records of another code, or edited ones, again instead of refusing them.")
    ] = False,
    verify: Verify = False,
    as_json: Json = False,
) -> int:
    """Runs a suite, writes a record per cell, prints the board. Cells that are there already are not run again."""
    from leaderboard.board.table import Board
    from leaderboard.records.folder import Completeness
    from leaderboard.records.manifest import read_manifests

    from ..run import harness
    from ..run.progress import show
    from ..suite import suite as suites

    chosen = suites.load(suite)
    overrides = [*(settings or []), *([] if seed is None else [f"seeds=[{seed}]"])]
    chosen = chosen.with_overrides(overrides).select(defenses=defense, attacks=attack)
    directory = out or Path("results") / chosen.name
    command = _asked(suite, defense, attack, overrides, secure_noise)
    with show(quiet=as_json) as report:
        done = harness.run(
            chosen,
            directory,
            device=harness.pick_device(device),
            jobs=jobs,
            secure_noise=secure_noise,
            fail_fast=fail_fast,
            recompute=recompute,
            verify=verify,
            command=command,
            report=report,
        )
    ids = {record.id for record in done}
    asked = [m for m in read_manifests(directory / "records") if ids <= {cell.id for cell in m.cells}]
    mine = tuple(m for m in asked if m.command == command)[:1]
    # In the order in which they are read again, so that `leaderboard table` breaks ties alike.
    found = Board.from_records(done, Completeness(mine, directory))
    if as_json:
        _print_json({"out": str(directory), "records": [record.id for record in done], "board": found.to_dict()})
    else:
        print(found.to_text())
        _say(f"records: {directory}")
    failed = [record for record in done if record.status == "failed"]
    lost = [control for control in found.controls if not control.ok]
    return FAILED if failed or found.violations or lost else OK


@app.command("list")
def list_(
    kind: Annotated[
        str | None, typer.Argument(help="defenses, attacks, suites, data or models; all if absent.")
    ] = None,
    as_json: Json = False,
) -> int:
    """Lists what there is, a line each."""
    from ..catalog import methods as catalog
    from ..catalog.settings import no_such

    if kind is not None and kind not in catalog.KINDS:
        raise ValueError(no_such("kind", kind, list(catalog.KINDS)))
    kinds: list[catalog.Kind] = [k for k in catalog.KINDS if kind in (None, k)]
    found = {k: {name: catalog.describe(k, name) for name in catalog.names(k)} | catalog.patterns(k) for k in kinds}
    if as_json:
        _print_json(found if kind is None else found[kinds[0]])
        return OK
    for k in kinds:
        if kind is None:
            print(f"{k}:")
        width = max((len(name) for name in found[k]), default=0)
        for name, line in found[k].items():
            size = ""
            if k == "models":
                parameters = catalog.count(name)
                size = f"{'' if parameters is None else f'{parameters:,}':>12}  "
            print(f"{'  ' if kind is None else ''}{name:<{width}}  {size}{line}")
    return OK


@app.command()
def explain(
    name: Annotated[str, typer.Argument(help="A defense, attack, suite, data set or model.")],
    as_json: Json = False,
) -> int:
    """Says what a method does, where it is from, and its settings."""
    from ..catalog import methods as catalog

    what = catalog.explain(name)
    if as_json:
        _print_json(what.to_dict())
        return OK
    print(f"{what.name} ({what.kind})\n\n{what.about}")
    if what.requires:
        print("\nneeds: " + "; ".join(f"{k} {v}" for k, v in what.requires.items() if v))
    if what.settings:
        print("\nsettings:")
        for setting in what.to_dict()["settings"]:
            default = "required" if setting.get("required") else f"default {setting.get('default')}"
            print(f"  {setting['name']} ({setting['type']}, {default}): {setting.get('about', '')}")
    return OK


@app.command()
def epsilon(
    defense: Annotated[str, typer.Option(help="Name of a defense.")],
    noise_multiplier: Annotated[float, typer.Option(help="Noise standard deviation / sensitivity.")],
    sample_rate: Annotated[float, typer.Option(help="Expected batch / number of examples.")],
    steps: Annotated[int, typer.Option(help="Number of steps.")],
    delta: Annotated[float, typer.Option(help="Probability that epsilon may fail.")],
    sampling: Annotated[str, typer.Option(help="poisson, shuffle, partition, fixed or full.")] = "poisson",
    settings: Settings = None,
    as_json: Json = False,
) -> int:
    """Epsilon of a planned run, from the defense's own plans."""
    import torch

    from defenses.core import Sampling, predict

    from ..catalog import methods as catalog
    from ..catalog.settings import no_such, parse_settings
    from ..suite import schema

    torch.set_num_threads(1)
    if not (math.isfinite(noise_multiplier) and noise_multiplier >= 0):
        raise ValueError(f"noise_multiplier must be zero or a positive number, got {noise_multiplier}")
    if not 0 < delta < 1:
        raise ValueError(f"delta must be in (0, 1), got {delta}")
    if sampling not in (known := get_args(schema.Sampling)):
        raise ValueError(no_such("sampling", sampling, known))
    made = catalog.defense(defense, parse_settings(settings or []), noise_multiplier=noise_multiplier)
    claim = predict(made, sampling=Sampling(sampling, sample_rate), steps=steps).claim(delta)  # pyright: ignore[reportArgumentType]  refused there by name
    proved = math.isfinite(claim.epsilon)
    document = {
        "defense": defense,
        "noise_multiplier": made.noise_multiplier,
        "epsilon": claim.epsilon if proved else None,
        "epsilon_rdp": claim.epsilon_rdp if proved else None,
        "delta": delta,
        "relation": claim.relation,
        "unit": claim.unit,
        "sampling": claim.sampling,
        "sample_rate": claim.sample_rate,
        "steps": steps,
        "accountant": claim.accountant,
        "as_if_poisson": claim.as_if_poisson,
        "events": list(claim.events),
        "reason": claim.reason or None,
    }
    if as_json:
        _print_json(document)
        return OK
    shown = f"{claim.epsilon:.4g}" if proved else "∞"
    print(f"epsilon {shown} at delta {delta:g} ({claim.relation}, unit: {claim.unit}, sampling: {claim.sampling})")
    if proved:
        print(f"by RDP  {claim.epsilon_rdp:.4g}")
        print(f"by      {claim.accountant}")
    else:
        print(f"because {claim.reason}")
    if claim.as_if_poisson is not None:
        print(f"as if the sampling were Poisson, as papers do, it would be {claim.as_if_poisson:.4g}: not proved")
    for event in claim.events:
        print(f"event   {event}")
    return OK


@board.command("table")
def table(
    results: Annotated[Path, typer.Argument(help="The --out of a run.")],
    format_: Annotated[str, typer.Option("--format", help="text, markdown, csv or latex.")] = "text",
    verify: Verify = False,
    as_json: Json = False,
) -> int:
    """Prints the board of a folder of records."""
    from leaderboard.board.table import Board

    from ..catalog.settings import no_such

    formats: dict[str, Callable[[Board], str]] = {
        "text": Board.to_text,
        "markdown": Board.to_markdown,
        "csv": Board.to_csv,
        "latex": Board.to_latex,
    }
    if format_ not in formats:
        raise ValueError(no_such("format", format_, list(formats)))
    found = Board.from_folder(results, _verifier(verify))
    if as_json:
        _print_json(found.to_dict())
    else:
        print(formats[format_](found).rstrip("\n"))
    return OK


@board.command("build")
def build(
    results: Annotated[Path, typer.Argument(help="The --out of a run.")],
    out: Annotated[Path | None, typer.Option(help="Folder of the page; RESULTS/page if not given.")] = None,
    verify: Verify = False,
    as_json: Json = False,
) -> int:
    """Makes the page of a folder of records: one file that needs no network, with its board as CSV and JSON."""
    from leaderboard.page.build import build as build_page

    page = build_page(results, results / "page" if out is None else out, _verifier(verify))
    if as_json:
        _print_json({"page": str(page)})
    else:
        print(f"page: {page}")
    return OK


@app.command()
def doctor(as_json: Json = False) -> int:
    """Says which device, versions, data sets, extras and optional weights are here."""
    from .doctor import examine, words

    found = examine()
    if as_json:
        _print_json(found)
    else:
        print(words(found))
    return OK


def _known(error: Exception) -> int | None:
    """The exit code of an expected mistake; None for a bug, whose traceback should be seen."""
    from leaderboard.records.files import WriteError
    from leaderboard.records.record import RecordError

    from ..run.lock import BusyError
    from ..suite.suite import ChoiceError, SuiteError

    if isinstance(error, (SuiteError, RecordError)) and not isinstance(error, ChoiceError):
        return BAD_FILE
    if isinstance(error, (WriteError, BusyError)):
        return FAILED
    if isinstance(error, BrokenExecutor):  # a process of a run died, and the harness says what to do
        return FAILED
    # Our own checks raise ValueError with a sentence for the user; OSError names the file.
    expected = isinstance(error, (ValueError, OSError)) or hasattr(error, "format_message")
    return USAGE if expected else None


def _asked(
    suite: str, defenses: list[str] | None, attacks: list[str] | None, overrides: list[str], secure_noise: bool
) -> tuple[str, ...]:
    """The command that asks for the same cells, whatever else was said about how to compute them."""
    options = [
        (f"--{kind}", name) for kind, names in (("defense", defenses), ("attack", attacks)) for name in names or ()
    ]
    options += [("--set", override) for override in overrides]
    words = [word for option in options for word in option]
    return ("leakbench", "run", suite, *words, *(["--secure-noise"] if secure_noise else []))


def _verifier(wanted: bool) -> Callable[[Any, Path], str] | None:
    if not wanted:
        return None
    from ..scoring.verify import contradiction

    return contradiction


def _print_json(document: Any) -> None:
    print(json.dumps(document, indent=2, allow_nan=False))


def _say(text: str) -> None:
    print(text, file=sys.stderr)
