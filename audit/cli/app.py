"""Command `leakbench`: the table of its subcommands, exit codes, and errors as single sentences.

Exit codes: 0 done; 1 a cell failed, a control failed, a claim was violated or did not hold, or a file could not be
written; 2 bad usage; 3 a bad suite or record file; 130 interrupted. With `--json`, stdout holds a single JSON document;
progress always goes to stderr.
"""

from __future__ import annotations

import codecs
import gc
import io
import os
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import BrokenExecutor
from typing import Annotated, NoReturn

import typer

import leakbench
from leakbench.malloc import keep_freed_memory

from .audit import app as audit
from .cache import app as cache
from .doctor import doctor
from .epsilon import epsilon
from .evidence import evidence
from .features import features
from .leaderboard import build, page, table
from .list_explain import explain, list_
from .options import BAD_FILE, FAILED, INTERRUPTED, OK, USAGE, say
from .rank import rank
from .records import check, diff, merge, publish, schema
from .run import run
from .selftest import selftest
from .submit import submit
from .theory import theory
from .verify import verify
from .zoo import app as zoo

app = typer.Typer(
    name="leakbench",
    help="How much utility a private training keeps, what it proves, and what still leaks under real attacks.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
board = typer.Typer(help="Boards from records, and checks of records.", no_args_is_help=True)
app.add_typer(board, name="leaderboard")
app.add_typer(audit, name="audit")
app.add_typer(cache, name="cache")
app.add_typer(zoo, name="zoo")

app.command()(run)
app.command("list")(list_)
app.command()(explain)
app.command()(epsilon)
app.command()(evidence)
app.command()(theory)
app.command()(selftest)
app.command()(features)
app.command()(rank)
app.command()(submit)
app.command()(verify)
app.command()(doctor)
board.command("table")(table)
board.command("build")(build)
board.command("page")(page)
board.command("check")(check)
board.command()(diff)
board.command("merge")(merge)
board.command("publish")(publish)
board.command("schema")(schema)


def _print_version(requested: bool) -> bool:
    if requested:
        print(leakbench.__version__)
        raise typer.Exit(OK)
    return requested


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Prints the version, and ends.")
    ] = False,
) -> None:
    """Options of the command itself."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs the command and exits; every expected error is a single sentence on stderr."""
    keep_freed_memory()
    gc.freeze()  # imported objects are permanent: freezing them keeps garbage collections short
    codecs.register_error("shown", _replaced)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="shown")
    try:
        code = app(args=arguments, standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except BrokenPipeError:
        # The reader of the output has gone (`| head`); without this Python complains again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = OK
    # standalone_mode=False above: typer would print errors and exit codes of its own.
    except Exception as error:
        code = _known(error)
        if code is None:
            raise
        # Usage errors are exceptions of typer, which format their own messages.
        shown = getattr(error, "format_message", None)
        text = shown() if shown else _of_the_system(error) if isinstance(error, OSError) else str(error)
        if text:  # without arguments typer has printed the help, and the message is empty
            say(f"error: {text}")
    if code == INTERRUPTED:  # some versions of typer return the code instead of raising
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Control-C must not end in a traceback
        say("interrupted; what was finished is kept, run the same command to go on")
    sys.exit(code if isinstance(code, int) else OK)


def _replaced(error: UnicodeError) -> tuple[str | bytes, int]:
    """Replaces characters that an encoding lacks: a byte of a path by itself, others, such as ∞, by a question mark."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    # Python reads undecodable bytes of arguments as U+DC80 to U+DCFF (PEP 383).
    return b"".join(
        bytes([ord(character) - 0xDC00]) if "\udc80" <= character <= "\udcff" else b"?" for character in lacking
    ), error.end


def _of_the_system(error: OSError) -> str:
    """Formats an error of the operating system: the file, then the message without its number."""
    if not isinstance(error.filename, str | bytes) or not error.strerror:
        return str(error)
    return f"{os.fsdecode(error.filename)} cannot be used: {error.strerror}"


_OURS = ("leakbench",)


def _known(error: Exception) -> int | None:
    """Returns the exit code of an expected error; None for a bug, whose traceback should be shown."""
    from leakbench.leaderboard.records.files import WriteError
    from leakbench.leaderboard.records.record import RecordError

    from ..run.lock import BusyError
    from ..suite.errors import ChoiceError, SuiteError

    if isinstance(error, (SuiteError, RecordError)) and not isinstance(error, ChoiceError):
        return BAD_FILE
    if isinstance(error, (WriteError, BusyError)):
        return FAILED
    if isinstance(error, BrokenExecutor):  # a process of a run died, and the harness states the remedy
        return FAILED
    # Our own checks raise ValueError with a sentence for the user; OSError names the file.
    expected = isinstance(error, (ValueError, OSError)) or hasattr(error, "format_message")
    # Missing optional packages are reported with a remedy; a name missing from leakbench is a bug.
    lacking = (error.name or "").partition(".")[0] if isinstance(error, ImportError) else None
    expected = expected or (lacking is not None and lacking not in _OURS)
    return USAGE if expected else None
