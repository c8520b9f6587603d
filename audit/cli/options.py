"""Options, exit codes and output functions that all commands share."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

# 130 is 128 + SIGINT, a shell's code for a command ended by Control-C.
OK, FAILED, USAGE, BAD_FILE, INTERRUPTED = 0, 1, 2, 3, 130

Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a setting.")]
Recomputed = Annotated[bool, typer.Option("--verify", help="Recompute numbers from the scores beside the records.")]


def print_json(document: Any) -> None:
    """Prints a JSON document on stdout; NaN and infinity, which many parsers refuse, are errors."""
    print(json.dumps(document, indent=2, allow_nan=False))


def say(text: str) -> None:
    """Prints a line on stderr, which leaves stdout to results."""
    print(text, file=sys.stderr)
