"""`leakbench audit FILE` with `--update`, `--scores` or `--transcript`: the deprecated spelling of audits.

It is translated to `leakbench audit model`, `update`, `scores` and `transcript`, and will be removed in the next
version.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from ..options import say
from .model import model
from .scores import scores
from .transcript import transcript
from .update import update


def _options(command: Callable[..., int]) -> dict[str, inspect.Parameter]:
    """Returns the options of a command by name, without its files; none of them is required."""
    parameters = inspect.signature(command).parameters
    return {
        name: parameter.replace(default=None if parameter.default is parameter.empty else parameter.default)
        for name, parameter in parameters.items()
        if name not in ("file", "folder", "checkpoint")
    }


_MODEL, _SCORES, _UPDATE, _TRANSCRIPT = (_options(command) for command in (model, scores, update, transcript))
_FILES = {
    name: inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[Path | None, declared]
    )
    for name, declared in {
        "checkpoint": typer.Argument(),
        **dict.fromkeys(("scores", "update", "transcript"), typer.Option()),
    }.items()
}
_ALL = _FILES | _TRANSCRIPT | _UPDATE


def old_spelling(**values: Any) -> int:
    """Audits as before there was a command for each kind of audit."""
    # An explicit default value counts as not given.
    chosen = {name: value for name, value in values.items() if value != _ALL[name].default}
    _refuse(chosen)
    checkpoint = values["checkpoint"]
    if "update" in chosen:
        name, command, options = "update FILE --checkpoint FILE", update, _UPDATE
        files = {"file": values["update"], "checkpoint": checkpoint}
    elif "scores" in chosen:
        name, command, options, files = "scores FILE", scores, _SCORES, {"file": values["scores"]}
    elif "transcript" in chosen:
        name, command, options = "transcript DIR --checkpoint FILE", transcript, _TRANSCRIPT
        files = {"folder": values["transcript"], "checkpoint": checkpoint}
    else:
        name, command, options, files = "model FILE", model, _MODEL, {"file": checkpoint}
    say(f"note: this is now `leakbench audit {name} ...`; the old spelling goes with the next version")
    try:
        return command(**files, **{option: values[option] for option in options})
    except ValueError as error:
        if str(error).startswith("scores must be a file that"):  # an argument of the new command, an option of this one
            raise ValueError(f"--{error}") from None
        raise


old_spelling.__signature__ = inspect.Signature([*_ALL.values()])  # pyright: ignore[reportFunctionMemberAccess] -- read by typer
old_spelling.__annotations__ = {name: one.annotation for name, one in _ALL.items()}


def _refuse(chosen: Mapping[str, Any]) -> None:
    """Refuses kinds of audit that exclude one another, options that a kind ignores, and missing options."""
    names = chosen.keys()
    of_update = [name for name in _UPDATE if name not in _TRANSCRIPT]
    if "update" in names:
        if not {"checkpoint", "model", "batch_size"} <= names:
            raise ValueError("--update needs the checkpoint before the step, --model and --batch-size")
        if names & {"members", "non_members", "scores", "shadows", "bank", "claim", "fail_if"}:
            raise ValueError("--update asks about one step alone: give no members, scores, shadows, claim or rules")
        _refuse_others("--update", names - _UPDATE.keys() - {"update", "checkpoint"})
    elif names & of_update:
        *others, last = (f"--{name.replace('_', '-')}" for name in of_update)
        raise ValueError(f"{', '.join(others)} and {last} are of --update")
    elif "scores" in names:
        if names & {"checkpoint", "model", "members"}:
            raise ValueError("--scores is instead of a checkpoint and its examples, got both")
        _refuse_others("--scores", names - _SCORES.keys() - {"scores"})
    elif "checkpoint" not in names or ("model" not in names and not chosen["checkpoint"].is_dir()):
        raise ValueError("a checkpoint and --model must be given, or --scores; see leakbench audit --help")
    elif "transcript" in names and "claim" not in names:
        raise ValueError("--transcript is held against a claim; give --claim epsilon=...,noise_multiplier=...")
    elif "canaries" in names and "transcript" not in names:
        raise ValueError("--canaries are sought in the updates of a training; give --transcript")


def _refuse_others(kind: str, options: Collection[str]) -> None:
    """Raises for options that would be ignored silently."""
    if options:
        raise ValueError(f"{kind} makes no use of --{min(options).replace('_', '-')}; leave it out")
