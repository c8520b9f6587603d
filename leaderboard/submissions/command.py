"""Command that computes a submission's records: it follows from the declaration, and is compared and never run."""

import json
import shlex

from .declaration import Declaration, SettingValue

SUITE_ROLES = {"defense": "--add-defense", "attack": "--add-attack"}
"""SubmissionKind of submission -> option of `leakbench run` that adds its method to the suite."""

ELSEWHERE = ("--out", "--device", "--jobs")
"""Options that say where records are computed and written, and change no request."""


def command_words(declaration: Declaration, seeds: tuple[int, ...]) -> tuple[str, ...]:
    """Returns the command that requests a submission's cells, word by word, as its manifest has it.

    Args:
        declaration: of the submission.
        seeds: of the submission.
    """
    words = ["leakbench", "run", declaration.suite, *["--small"] * declaration.small]
    if declaration.method is not None:
        words += [SUITE_ROLES[declaration.kind], entry(declaration)]
    return (*words, "--set", f"seeds={json.dumps(list(seeds), separators=(',', ':'))}")


def entry(declaration: Declaration) -> str:
    """Returns the method as an entry of a suite's list: its name, or a TOML table with its settings."""
    method = declaration.method
    if method is None:
        raise ValueError(f"a submission of kind {declaration.kind!r} has no method")
    if not method.settings:
        return method.name
    # A JSON string, number, list or Boolean is the same in TOML.
    values: dict[str, SettingValue | list[SettingValue]] = {"name": method.name, **method.settings}
    return "{ " + ", ".join(f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in values.items()) + " }"


def same_command(written: str, words: tuple[str, ...]) -> bool:
    """Returns whether a written command requests the same cells; where it writes and computes does not matter.

    Args:
        written: as in the declaration.
        words: of `command_words`.
    """
    try:
        words_written = shlex.split(written)
    except ValueError:  # an open quote
        return False
    for option in ELSEWHERE:
        if option in words_written:
            place = words_written.index(option)
            words_written = words_written[:place] + words_written[place + 2 :]
    return tuple(words_written) == words
