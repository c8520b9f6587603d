"""Options, exit codes and output functions that all commands share."""

from __future__ import annotations

import functools
import inspect
import json
import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, get_type_hints

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


def grouped(command: Callable[..., int]) -> Callable[..., int]:
    """Shows typer the fields of each dataclass among a command's parameters as options of their own.

    Options that several commands share are declared once, as a dataclass, and a command receives them as one value.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name in groups:
            kinds = get_type_hints(groups[name], include_extras=True)
            options = [parameter.replace(name=field.name, default=field.default) for field in fields(groups[name])]
            parameters += [option.replace(annotation=kinds[option.name]) for option in options]
        else:
            parameters.append(parameter.replace(annotation=hints[name]))
    parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]

    @functools.wraps(command)
    def flat(**values: Any) -> int:
        grouped_values = {
            name: kind(**{field.name: values.pop(field.name) for field in fields(kind)})
            for name, kind in groups.items()
        }
        return command(**grouped_values, **values)

    flat.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportAttributeAccessIssue] -- read by typer
    flat.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return flat
