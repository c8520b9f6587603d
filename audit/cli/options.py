"""What all commands share: options, exit codes, and where words go."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

OK, FAILED, USAGE, BAD_FILE, INTERRUPTED = 0, 1, 2, 3, 130

Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a setting.")]
Recomputed = Annotated[bool, typer.Option("--verify", help="Recompute numbers from the scores beside the records.")]


def print_json(document: Any) -> None:
    """One JSON document on stdout."""
    print(json.dumps(document, indent=2, allow_nan=False))


def say(text: str) -> None:
    """A line on stderr, which leaves stdout to results."""
    print(text, file=sys.stderr)
